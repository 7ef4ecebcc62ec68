"""``python -m rstream info``."""

import platform
import sys

import rstream as rs
from rstream._interop import device_text

# Attributes that say yes or no, in the words of a reader.
_FEATURES = {
    "stream_priorities_supported": "stream priorities",
    "unified_addressing": "unified addressing",
    "managed_memory": "managed memory",
    "concurrent_managed_access": "managed memory used by host and device at once",
    "pageable_memory_access": "pageable memory used by the device",
    "memory_pools_supported": "memory pools",
    "can_use_64_bit_stream_mem_ops": "64-bit stream memory operations",
    "can_use_stream_wait_value_nor": "stream waits for NOR of a value",
    "can_flush_remote_writes": "flushing remote writes",
    "concurrent_kernels": "concurrent kernels",
    "integrated": "memory shared with the host (integrated)",
}


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _describe(device: rs.Device) -> list[tuple[str, str]]:
    free, total = device.memory_info()
    least, greatest = device.priority_range
    attributes = dict(device.attributes)
    supported = {text: attributes.pop(name, 0) for name, text in _FEATURES.items()}
    with rs.Stream(device) as stream:
        signal = stream.signal
    lines = [
        ("kind", "software, on CPU threads" if device.is_software else "GPU"),
        ("driver", f"CUDA {_dotted(device.driver_version)}"),
        ("compute capability", _dotted(device.compute_capability)),
        ("memory", f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB"),
        ("stream priorities", f"{least} (least) to {greatest} (greatest)"),
        ("callbacks by", f"{signal} signal"),
    ]
    lines += [(text, "yes" if value else "no") for text, value in supported.items()]
    lines += [(name.replace("_", " "), f"{value:,}") for name, value in attributes.items()]
    return lines


def run() -> int:
    """Print the devices and return the exit status."""
    print(f"rstream {rs.__version__}, {platform.python_implementation()} {platform.python_version()}")
    try:
        devices = rs.devices()
        if all(device.is_software for device in devices):
            print("no GPU: " + no_gpu_reason())
        for device in devices:
            print(f"\ndevice {device_text(device)}: {device.name}")
            for name, value in _describe(device):
                print(f"  {name:<48} {value}")
    except rs.CudaError as error:
        print(f"rstream info: {error}", file=sys.stderr)
        return 1
    return 0


def no_gpu_reason() -> str:
    """Return why there is no GPU 0, or the empty string if there is one."""
    try:
        rs.Device(0)
    except (rs.DriverNotFoundError, rs.InvalidValueError) as error:
        return str(error)
    return ""
