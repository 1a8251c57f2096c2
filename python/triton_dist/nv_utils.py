"""Import path of NVLink bandwidth helpers used by Triton-distributed's scripts."""

from triton_dist.runtime.peaks import get_intranode_max_speed_gbps

__all__ = ["get_intranode_max_speed_gbps"]
