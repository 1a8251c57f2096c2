"""How many ranks tests on GPUs run with."""

from __future__ import annotations

import pytest
import torch

EVERY = (2, 3, 4)
FEW = EVERY if torch.cuda.device_count() >= max(EVERY) else EVERY[:1]

few_ranks = pytest.mark.parametrize("num_ranks", FEW, indirect=True)
"""Before tests of what hardly depends on the number of ranks: dtypes, layouts, candidates, operands
that are refused. They run with two where ranks share a GPU, since each number has kernels of its
own to compile, and more ranks take longer turns."""
