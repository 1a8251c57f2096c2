"""What all ops across ranks have in common, on GPUs: errors, contexts, autograd modes."""

from __future__ import annotations

import pytest

from tests.distributed import every_op_ranks
from tests.gpu.ranks import few_ranks

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]


@few_ranks
@pytest.mark.parametrize("name", every_op_ranks.NAMES)
def test_errors_contexts_and_autograd_modes(on_gpus, name):
    for (seen, of_bad, of_good), contexts, history in on_gpus(every_op_ranks.everything, name):
        assert all(argument == case.split(" (")[0] for case, (argument, _) in seen.items())
        assert of_bad == []
        assert of_good
        _, refused, differs = contexts
        assert all(argument == case.split(" (")[0] for case, (argument, _) in refused.items())
        assert "  rank 1: " in differs
        assert history == 0
