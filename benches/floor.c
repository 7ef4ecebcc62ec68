// The floor: what a C program on the driver API gets, and native callbacks for the other measurements.
//
// As a program it prints one line of JSON; as a shared object it has callbacks that count and take the time.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

// Callbacks for `add_native_callback`.
void rstream_count(void *data) { __atomic_fetch_add((uint64_t *)data, 1, __ATOMIC_RELAXED); }
void rstream_stamp(void *data) { *(volatile double *)data = now_us(); }

#ifdef PROGRAM
#include <cuda.h>

#define OK(call)                                                   \
    do {                                                           \
        CUresult result = (call);                                  \
        if (result != CUDA_SUCCESS) {                              \
            fprintf(stderr, "%s: error %d\n", #call, (int)result); \
            exit(1);                                               \
        }                                                          \
    } while (0)

static const char *PTX =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry work(.param .u64 limit) {\n"
    "  .reg .u64 start, now, passed, limit_; .reg .pred more;\n"
    "  ld.param.u64 limit_, [limit];\n  mov.u64 start, %globaltimer;\n"
    "again: mov.u64 now, %globaltimer; sub.u64 passed, now, start;\n"
    "  setp.lt.u64 more, passed, limit_; @more bra again; ret;\n}\n";

static CUfunction work;
static CUstream stream;
static volatile uint64_t *flag, *ack;
static CUdeviceptr flag_address, ack_address;
static uint64_t number;
static volatile int stop;

static void launch(uint64_t nanoseconds) {
    void *arguments[] = {&nanoseconds};
    OK(cuLaunchKernel(work, 1, 1, 1, 1, 1, 1, 0, stream, arguments, NULL));
}

static void signal_and_wait(int wait) {
    CUstreamBatchMemOpParams operations[2];
    memset(operations, 0, sizeof operations);
    number++;
    operations[0].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
    operations[0].writeValue.address = flag_address;
    operations[0].writeValue.value64 = number;
    operations[1].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
    operations[1].waitValue.address = ack_address;
    operations[1].waitValue.value64 = number;
    operations[1].waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
    OK(cuStreamBatchMemOp(stream, wait ? 2 : 1, operations, 0));
}

static void *acknowledge(void *nothing) {
    uint64_t seen = *ack;
    while (!stop) {
        uint64_t now = *flag;
        if (now > seen) *ack = seen = now;
    }
    return nothing;
}

static void CUDA_CB count_host(void *data) { rstream_count(data); }
static void CUDA_CB count_callback(CUstream s, CUresult r, void *data) {
    (void)s, (void)r;
    rstream_count(data);
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *values, int count) {
    qsort(values, count, sizeof *values, by_value);
    return values[count / 2];
}

enum way { MEMORY, HOST_FUNCTION, CALLBACK, KERNELS };

static double stage(enum way way, uint64_t kernel, int kernels) {
    double runs[7];
    uint64_t counted = 0;
    for (int run = 0; run < 7; run++) {
        int stages = kernel ? 500 : 2000;
        double start = now_us();
        for (int i = 0; i < stages; i++) {
            if (kernels) launch(kernel);
            if (way == MEMORY) signal_and_wait(1);
            if (way == HOST_FUNCTION) OK(cuLaunchHostFunc(stream, count_host, &counted));
            if (way == CALLBACK) OK(cuStreamAddCallback(stream, count_callback, &counted, 0));
        }
        OK(cuStreamSynchronize(stream));
        runs[run] = (now_us() - start) / stages;
    }
    return median(runs, 7);
}

static double latency(uint64_t kernel) {
    double runs[501];
    for (int run = 0; run < 501; run++) {
        double start = now_us();
        if (kernel) launch(kernel);
        signal_and_wait(0);
        while (*flag < number) {
        }
        runs[run] = now_us() - start;
        OK(cuStreamSynchronize(stream));
    }
    return median(runs, 501);
}

int main(void) {
    CUdevice device;
    CUcontext context;
    CUmodule module;
    uint64_t *words;
    pthread_t thread;
    OK(cuInit(0));
    OK(cuDeviceGet(&device, 0));
    OK(cuDevicePrimaryCtxRetain(&context, device));
    OK(cuCtxSetCurrent(context));
    OK(cuModuleLoadData(&module, PTX));
    OK(cuModuleGetFunction(&work, module, "work"));
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuMemHostAlloc((void **)&words, 256, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    memset(words, 0, 256);
    flag = words, ack = words + 16;
    OK(cuMemHostGetDevicePointer(&flag_address, words, 0));
    ack_address = flag_address + 128;
    stage(KERNELS, 0, 1);
    printf("{\"latency_idle\": %.3f, \"latency_30\": %.3f", latency(0), latency(30000));
    pthread_create(&thread, NULL, acknowledge, NULL);
    printf(", \"memory_empty\": %.3f, \"memory_20\": %.3f", stage(MEMORY, 0, 1), stage(MEMORY, 20000, 1));
    stop = 1;
    pthread_join(thread, NULL);
    printf(", \"host_function_empty\": %.3f, \"host_function_20\": %.3f", stage(HOST_FUNCTION, 0, 1),
           stage(HOST_FUNCTION, 20000, 1));
    printf(", \"callback_empty\": %.3f, \"callback_20\": %.3f, \"callback_each\": %.3f", stage(CALLBACK, 0, 1),
           stage(CALLBACK, 20000, 1), stage(CALLBACK, 0, 0));
    printf(", \"kernel_empty\": %.3f, \"kernel_20\": %.3f}\n", stage(KERNELS, 0, 1), stage(KERNELS, 20000, 1));
    return 0;
}
#endif
