"""The device of this process: one NVIDIA GPU, or the CPU with Triton's interpreter."""

from triton_dist.runtime.device.detect import current_device, interprets_kernels

__all__ = [
    "current_device",
    "get_device_max_shared_memory_size",
    "interprets_kernels",
    "is_cuda",
    "sleep_async",
]


def is_cuda() -> bool:
    """Return whether this process runs kernels on an NVIDIA GPU."""
    return current_device().name == "cuda"


def get_device_max_shared_memory_size(device_index: int | None = None) -> int:
    """Return the largest shared memory of one block, in bytes.

    Args:
        device_index: ignored, because all GPUs of a host are assumed to be equal. Accepted for
            existing scripts.
    """
    return current_device().shared_memory_bytes()


def sleep_async(milliseconds: float) -> None:
    """Keep the current stream busy for about ``milliseconds``. Block the host only on the CPU."""
    current_device().sleep_milliseconds(milliseconds)
