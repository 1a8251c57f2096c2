"""Ways to choose what to measure next."""

from triton_dist._tuning.search.brief import Brief
from triton_dist._tuning.search.exhaustive import Exhaustive
from triton_dist._tuning.search.racing import Racing

__all__ = ["Brief", "Exhaustive", "Racing"]
