"""The tuner's data: frozen, comparable, free of torch, triton, files and clocks."""

from triton_dist._tuning.values.config import Config, ConfigSpace, FixedSpace, Pruned
from triton_dist._tuning.values.entry import Entry
from triton_dist._tuning.values.fingerprint import Difference, Fingerprint
from triton_dist._tuning.values.key import Key, Origin, bucket, to_hashable
from triton_dist._tuning.values.outcome import Failure, FailureKind, Measurement, Outcome
from triton_dist._tuning.values.policy import Policy
from triton_dist._tuning.values.record import SCHEMA, StoredRecord, Trial, TuningRecord
from triton_dist._tuning.values.request import Request
from triton_dist._tuning.values.validity import Validity, validity
from triton_dist._tuning.values.winner import winner

__all__ = [
    "SCHEMA",
    "Config",
    "ConfigSpace",
    "Difference",
    "Entry",
    "Failure",
    "FailureKind",
    "Fingerprint",
    "FixedSpace",
    "Key",
    "Measurement",
    "Origin",
    "Outcome",
    "Policy",
    "Pruned",
    "Request",
    "StoredRecord",
    "Trial",
    "TuningRecord",
    "Validity",
    "bucket",
    "to_hashable",
    "validity",
    "winner",
]
