"""DeepEP's ``Buffer`` (V1) on one host, for programs that import ``deep_ep``.

``ep_dispatch`` and ``ep_combine`` move the tokens. New programs call these ops.
"""

from triton_dist.deep_ep.buffer import Buffer, topk_idx_t
from triton_dist.deep_ep.utils import Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"]
