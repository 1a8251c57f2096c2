"""Names that scripts import from ``triton_dist.nv_utils``."""

from triton_dist.runtime.peaks import get_intranode_max_speed_gbps

__all__ = ["get_intranode_max_speed_gbps"]
