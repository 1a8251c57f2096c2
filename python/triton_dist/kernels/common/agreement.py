"""Comparison of a call's arguments between ranks."""

from __future__ import annotations

import hashlib

import torch

from triton_dist import knobs
from triton_dist.errors import RankDisagreement
from triton_dist.runtime import waits
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import Group, group_for


def must_compare_calls() -> bool:
    """Return whether contexts and layers created now must compare the arguments of every call."""
    return "agree" in knobs.debug.get()


def digest_text(name: str, tensor: torch.Tensor) -> str:
    """Return the shape and a digest of a tensor as text, for comparison between ranks.

    Computing the digest waits for the device. Meta tensors, and tensors in a graph capture, get no
    digest.
    """
    size = f"{name} {tuple(tensor.shape)}"
    if tensor.is_meta or current_device().is_capturing():
        return size
    if not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.to(torch.int64)  # int32 and int64 ids with equal values have equal digests
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{size}, digest {hashlib.sha256(data).hexdigest()[:16]}"


def check_equal_on_ranks(function: str, name: str, tensor: torch.Tensor, group: Group) -> None:
    """Raise unless all ranks call ``function`` with equal values of ``tensor``. Collective.

    The comparison is skipped during a graph capture, where tensors have no values, and while the
    tuner tries candidates, because the tuner has already compared the arguments.

    Raises:
        RankDisagreement: values or shapes differ between ranks.
    """
    if waits.are_limited() or current_device().is_capturing():
        return
    ranks = group_for(group)
    answers = ranks.all_gather(f"{name} of {function}", digest_text(name, tensor))
    if len(set(answers)) > 1:
        by_rank = {ranks.global_rank(rank): answer for rank, answer in enumerate(answers)}
        raise RankDisagreement(f"the {name} of a call of {function}", by_rank)
