"""Names that scripts import from ``triton_dist.utils``; each is defined where it belongs."""

from triton_dist.knobs import get_bool_env, get_int_env
from triton_dist.runtime.device import (
    get_device_max_shared_memory_size,
    is_cuda,
    sleep_async,
)
from triton_dist.runtime.distributed import (
    dist_print,
    finalize_distributed,
    initialize_distributed,
)
from triton_dist.runtime.random import init_seed, rand_tensor

__all__ = [
    "dist_print",
    "finalize_distributed",
    "get_bool_env",
    "get_device_max_shared_memory_size",
    "get_int_env",
    "init_seed",
    "initialize_distributed",
    "is_cuda",
    "rand_tensor",
    "sleep_async",
]
