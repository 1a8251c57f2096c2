"""Skew of a routing: a hint of the caller that selects the expert ids that a tuning measures."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from triton_dist.errors import InvalidArgument

SKEWS = ("even", "zipf", "same_experts")
_ZIPF_EXPONENT = 1.2


class SkewedKey(NamedTuple):
    """Tuning key of a call with ``routing_skew``. Keys of calls without the hint do not change."""

    key: Any
    routing_skew: str

    @classmethod
    def of(cls, function: str, key: Any, routing_skew: str | None) -> Any:
        """Return ``key``, extended by the hint if there is one."""
        if routing_skew is None:
            return key
        if routing_skew not in SKEWS:
            expected = f"None, {', '.join(map(repr, SKEWS))}"
            raise InvalidArgument(function, "routing_skew", routing_skew, expected)
        return cls(key, routing_skew)

    @staticmethod
    def plain(key: Any) -> Any:
        """Return the key without the hint."""
        return key.key if isinstance(key, SkewedKey) else key


def skewed_ids(topk_ids: torch.Tensor, E: int, skew: str, seed: int = 0) -> torch.Tensor:
    """Return ids [M, topk] with a skew, different experts for each token; equal for equal seeds."""
    tokens, topk = topk_ids.shape
    if skew == "same_experts" or topk > E:
        ids = (torch.arange(topk, device="cpu") % E).repeat(tokens, 1)
    else:
        exponent = _ZIPF_EXPONENT if skew == "zipf" else 0.0
        odds = torch.arange(1, E + 1, device="cpu").float() ** -exponent
        generator = torch.Generator().manual_seed(seed)
        # multinomial requires a row
        ids = torch.multinomial(odds.expand(tokens + 1, E), topk, generator=generator)[:tokens]
    return ids.to(topk_ids)
