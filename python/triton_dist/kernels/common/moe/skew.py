"""Routing skew: how unevenly tokens choose experts. It selects the ids that a tuning measures."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from triton_dist.errors import InvalidArgument

SKEWS = ("even", "zipf", "same_experts")
_ZIPF_EXPONENT = 1.2


class SkewedKey(NamedTuple):
    """Tuning key of a call with the argument ``routing_skew``. It also has the attributes of
    ``key``. For "same_experts", ``E`` counts only the experts that receive tokens."""

    key: Any
    routing_skew: str

    @classmethod
    def of(cls, function: str, key: Any, routing_skew: str | None) -> Any:
        """Return ``key``, extended by ``routing_skew`` unless it is ``None``."""
        if routing_skew is None:
            return key
        if routing_skew not in SKEWS:
            expected = f"None, {', '.join(map(repr, SKEWS))}"
            raise InvalidArgument(function, "routing_skew", routing_skew, expected)
        return cls(key, routing_skew)

    @staticmethod
    def without_skew(key: Any) -> Any:
        """Return the key without ``routing_skew``."""
        return key.key if isinstance(key, SkewedKey) else key

    @property
    def E(self) -> int:
        """Number of experts that receive tokens."""
        E: int = self.key.E
        return min(E, self.key.topk) if self.routing_skew == "same_experts" else E

    def __getattr__(self, name: str) -> Any:
        return getattr(self.key, name)


def skewed_ids(topk_ids: torch.Tensor, E: int, skew: str, seed: int = 0) -> torch.Tensor:
    """Return random ids with the shape of ``topk_ids`` [M, topk] and the skew ``skew``.

    "same_experts": all tokens choose experts 0 to topk - 1. "zipf": probabilities follow Zipf's law
    with exponent 1.2. "even": all experts are equally probable. The experts of a token differ
    unless ``topk`` exceeds E: choice j is then expert j modulo E.
    """
    tokens, topk = topk_ids.shape
    if skew == "same_experts" or topk > E:
        ids = (torch.arange(topk, device="cpu") % E).repeat(tokens, 1)
    else:
        exponent = _ZIPF_EXPONENT if skew == "zipf" else 0.0
        odds = torch.arange(1, E + 1, device="cpu").float() ** -exponent
        generator = torch.Generator().manual_seed(seed)
        # One additional row, because multinomial requires at least one.
        ids = torch.multinomial(odds.expand(tokens + 1, E), topk, generator=generator)[:tokens]
    return ids.to(topk_ids)
