"""Ways to turn a call into samples."""

from triton_dist._tuning.measure.device import DeviceBenchmarker
from triton_dist._tuning.measure.replay import RecordedSpace, Replay

__all__ = ["DeviceBenchmarker", "RecordedSpace", "Replay"]
