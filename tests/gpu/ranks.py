"""How many ranks tests on GPUs run with."""

from __future__ import annotations

import pytest
import torch

EVERY = (2, 3, 4) if torch.cuda.device_count() >= 4 else (2, 3)
"""Four ranks on fewer GPUs take longer turns than three. test_eight_ranks.py tests many peers on
any number of GPUs."""
FEW = EVERY if torch.cuda.device_count() >= max(EVERY) else EVERY[:1]

few_ranks = pytest.mark.parametrize("num_ranks", FEW, indirect=True)
"""Before tests of what hardly depends on the number of ranks: dtypes, layouts, candidates, operands
that are refused. They run with two where ranks share a GPU, since each number has kernels of its
own to compile, and more ranks take longer turns."""
