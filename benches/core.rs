//! Times of the core on the software device, for one piece of host code each. They compare rstream with itself: how soon a
//! stream goes on is softcuda's, whose engine looks at memory every 10 to 500 µs.

mod common;

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use rstream::{Api, Completion, Device, Event, EventOptions, Signal, Stream, testing};

use common::{CALLS, Enqueue, KINDS, SIGNALS, new_stream};

/// So many are queued at a time. More than 500 on one stream would leave the memory signal.
const BATCH: u64 = 200;

/// Which part of the way is timed.
#[derive(Clone, Copy)]
enum Part {
    /// The enqueues, on a stream that is held.
    Enqueue,
    /// From the release of the stream until the last is resolved.
    Dispatch,
}

/// Queues `total` pieces in batches on a held stream, and times one part.
fn held(api: &Api<'_>, stream: &Stream, enqueue: Enqueue, part: Part, total: u64) -> Duration {
    let mut taken = Duration::ZERO;
    let mut left = total;
    while left > 0 {
        let count = left.min(BATCH);
        left -= count;
        let hold = testing::hold(api, stream).unwrap();
        let started = Instant::now();
        let completions: Vec<Completion<()>> = (0..count).map(|_| enqueue(api, stream)).collect();
        let queued = Instant::now();
        hold.release();
        for completion in completions {
            completion.into_result(None).unwrap();
        }
        taken += match part {
            Part::Enqueue => queued - started,
            Part::Dispatch => queued.elapsed(),
        };
        stream.synchronize(api, None, &mut || false).unwrap();
    }
    taken
}

/// Queues `total` pieces, in turn on each stream, and waits for all.
fn spread(api: &Api<'_>, streams: &[Stream], enqueue: Enqueue, total: u64) -> Duration {
    let each = (BATCH as usize / streams.len()).max(1);
    let mut taken = Duration::ZERO;
    let mut left = usize::try_from(total).unwrap();
    while left > 0 {
        let count = left.min(each * streams.len());
        left -= count;
        let started = Instant::now();
        let completions: Vec<_> = streams.iter().cycle().take(count).map(|stream| enqueue(api, stream)).collect();
        for completion in completions {
            completion.into_result(None).unwrap();
        }
        taken += started.elapsed();
    }
    taken
}

fn host_code(criterion: &mut Criterion) {
    Api::attach(|api| {
        let device = Device::soft(api, 0).unwrap();
        for (name, part) in [("enqueue", Part::Enqueue), ("dispatch", Part::Dispatch)] {
            let mut group = criterion.benchmark_group(name);
            for (signal_name, signal) in SIGNALS {
                let stream = new_stream(api, device, signal);
                for (kind, enqueue) in KINDS {
                    group.bench_function(BenchmarkId::new(kind, signal_name), |bencher| {
                        bencher.iter_custom(|total| held(api, &stream, enqueue, part, total));
                    });
                }
            }
        }
    })
    .unwrap();
}

fn idle(criterion: &mut Criterion) {
    Api::attach(|api| {
        let device = Device::soft(api, 0).unwrap();
        let stream = new_stream(api, device, Signal::Driver);
        let event = Event::new(api, device, EventOptions::default()).unwrap();
        let mut group = criterion.benchmark_group("idle");
        for (name, call) in CALLS {
            group.bench_function(name, |bencher| bencher.iter(|| call(api, black_box(&stream), &event)));
        }
    })
    .unwrap();
}

fn scaling(criterion: &mut Criterion) {
    Api::attach(|api| {
        let device = Device::soft(api, 0).unwrap();
        let mut group = criterion.benchmark_group("streams");
        for (signal_name, signal) in SIGNALS {
            for (kind, enqueue) in [KINDS[0], KINDS[2]] {
                for count in [1, 16, 128] {
                    let streams: Vec<Stream> = (0..count).map(|_| new_stream(api, device, signal)).collect();
                    group.bench_function(BenchmarkId::new(format!("{kind} {signal_name}"), count), |bencher| {
                        bencher.iter_custom(|total| spread(api, &streams, enqueue, total));
                    });
                }
            }
        }
    })
    .unwrap();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = host_code, idle, scaling
}
criterion_main!(benches);
