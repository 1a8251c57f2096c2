"""The tuner's data: frozen, comparable, free of torch, triton, files and clocks."""

from triton_dist._tuning.values.config import Config, ConfigSpace, Pruned
from triton_dist._tuning.values.fingerprint import Difference, Fingerprint
from triton_dist._tuning.values.key import Key, bucket, to_hashable
from triton_dist._tuning.values.outcome import Failure, FailureKind, Measurement, Outcome
from triton_dist._tuning.values.policy import Policy
from triton_dist._tuning.values.record import SCHEMA, Trial, TuningRecord

__all__ = [
    "SCHEMA",
    "Config",
    "ConfigSpace",
    "Difference",
    "Failure",
    "FailureKind",
    "Fingerprint",
    "Key",
    "Measurement",
    "Outcome",
    "Policy",
    "Pruned",
    "Trial",
    "TuningRecord",
    "bucket",
    "to_hashable",
]
