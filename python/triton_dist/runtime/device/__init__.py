"""The device that this process runs kernels on: one NVIDIA GPU, or the CPU through the
interpreter."""

from triton_dist.runtime.device.detect import current_device, interprets_kernels

__all__ = [
    "current_device",
    "get_device_max_shared_memory_size",
    "interprets_kernels",
    "is_cuda",
    "sleep_async",
]


def is_cuda() -> bool:
    """True if this process runs kernels on an NVIDIA GPU."""
    return current_device().name == "cuda"


def get_device_max_shared_memory_size(device_index: int | None = None) -> int:
    """Largest shared memory of one block in bytes, on this process's device.

    ``device_index`` is accepted for scripts that pass it; the GPUs of a host are taken to be alike.
    """
    return current_device().shared_memory_bytes()


def sleep_async(milliseconds: float) -> None:
    """Keep the current stream busy for about ``milliseconds`` without blocking the host (CPU:
    sleep)."""
    current_device().sleep_milliseconds(milliseconds)
