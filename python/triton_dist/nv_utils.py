"""Import path of the NVLink bandwidth function that Triton-distributed's scripts use."""

from triton_dist.runtime.peaks import get_intranode_max_speed_gbps

__all__ = ["get_intranode_max_speed_gbps"]
