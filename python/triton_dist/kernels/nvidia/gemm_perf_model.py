"""Peak compute and memory rates of a GPU."""

from triton_dist.runtime.peaks import get_dram_gbps as get_dram_gbps
from triton_dist.runtime.peaks import get_tensorcore_tflops as get_tensorcore_tflops
