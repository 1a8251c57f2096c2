"""An op across ranks: ``sharded_rms_norm`` and its context."""

from own_op.op import NormContext, sharded_rms_norm

__all__ = ["NormContext", "sharded_rms_norm"]
