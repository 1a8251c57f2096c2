"""Searches. A search decides which config is measured next."""

from triton_dist._tuning.search.brief import ShortRace
from triton_dist._tuning.search.choose import Exhaustive, Factory, Search, check_search, search_for
from triton_dist._tuning.search.racing import Racing
