"""Immutable data of the tuner, and functions on them.

The modules import neither torch nor Triton, and read no files or clocks.
"""

from triton_dist._tuning.values.config import (
    Config,
    ConfigSpace,
    PrunedConfig,
    RemainingSpace,
    numbered,
)
from triton_dist._tuning.values.fingerprint import (
    DIFFERS_BY_RANK,
    Difference,
    Fingerprint,
    ShippedFingerprint,
    with_equal_bound_constants,
)
from triton_dist._tuning.values.key import (
    FunctionIdentity,
    Key,
    bucket,
    original,
    qualified_name,
    to_hashable,
)
from triton_dist._tuning.values.outcome import (
    Failure,
    FailureKind,
    JournalEntry,
    LaunchStep,
    Measurement,
    Outcome,
    Request,
)
from triton_dist._tuning.values.pack import PACK_FORMAT, merge, pack, unpack
from triton_dist._tuning.values.policy import Policy
from triton_dist._tuning.values.product import Candidates, Point, Product, UnlistedCandidates
from triton_dist._tuning.values.record import (
    SCHEMA,
    StoredRecord,
    Trial,
    TuningRecord,
    Validity,
    validity,
)
from triton_dist._tuning.values.sizes import Sizes, fine_bucket
from triton_dist._tuning.values.winner import winner
