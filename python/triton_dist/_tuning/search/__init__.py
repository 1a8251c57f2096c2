"""Searches. A search decides which config is measured next."""

from triton_dist._tuning.search.choose import (
    Exhaustive,
    Search,
    SearchFactory,
    check_search,
    search_for,
)
from triton_dist._tuning.search.racing import Racing
from triton_dist._tuning.search.short_race import ShortRace
