"""Ways to choose what to measure next."""

from triton_dist._tuning.search.brief import Brief
from triton_dist._tuning.search.choose import Exhaustive, search_for
from triton_dist._tuning.search.plugged import Factory, Search
from triton_dist._tuning.search.racing import Racing

__all__ = ["Brief", "Exhaustive", "Factory", "Racing", "Search", "search_for"]
