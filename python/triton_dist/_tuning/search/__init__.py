"""Ways to choose what to measure next."""

from triton_dist._tuning.search.exhaustive import Exhaustive

__all__ = ["Exhaustive"]
