"""Ids of routes, with which all ranks must come alike, compared by ranks.

A tuner compares them at the first call of a key. Later calls say nothing to one another, so that a
captured graph serves any ids: other ids on some rank make sums of unlike tokens, or waits for rows
that nobody sends. With ``TRITON_DIST_DEBUG=agree`` every call compares.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from triton_dist import knobs
from triton_dist.errors import RankDisagreement
from triton_dist.kernels.common.context import OpContext
from triton_dist.runtime import waits
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for


def ids_as_text(topk_ids: torch.Tensor) -> str:
    """Text that differs where ids do, for ranks to compare: how many there are, and a digest. Waits
    for the device. Of what cannot be looked at, tensors without memory and ids in the capture of a
    graph, there is no digest."""
    size = f"ids {tuple(topk_ids.shape)}"
    if topk_ids.is_meta or current_device().is_capturing():
        return size
    numbers = topk_ids.detach().to("cpu", torch.int64).numpy().tobytes()
    return f"{size}, digest {hashlib.sha256(numbers).hexdigest()[:16]}"


def every_call_compares() -> bool:
    """Tell whether contexts that are made now compare the ids of every call."""
    return "agree" in knobs.debug.get()


def compare_ids(function: str, ctx: OpContext[Any], topk_ids: torch.Tensor) -> None:
    """Let all ranks go on with a call of ``function``, or raise on each. Collective, but in the
    capture of a graph, where ids have no values, and while candidates are tried: the tuner has
    compared them.

    Raises:
        RankDisagreement: ranks come with other ids.
    """
    if waits.limit_seconds() is not None or current_device().is_capturing():
        return
    ranks = group_for(ctx.group)
    answers = ranks.gather(f"ids of {function}", ids_as_text(topk_ids))
    if len(set(answers)) > 1:
        by_rank = {ranks.named(rank): answer for rank, answer in enumerate(answers)}
        raise RankDisagreement(f"the ids of a call of {function}", by_rank)
