"""Ways to turn a call into samples."""

from triton_dist._tuning.measure.device import DeviceBenchmarker

__all__ = ["DeviceBenchmarker"]
