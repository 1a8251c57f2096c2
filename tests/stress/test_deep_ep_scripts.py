"""DeepEP's own tests, unchanged, on CPU ranks."""

from __future__ import annotations

import os

import pytest

from tests.commands import python

FOLDER = os.environ.get("DEEP_EP_TESTS", "")


@pytest.mark.stress
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not FOLDER, reason="set DEEP_EP_TESTS to the folder tests of DeepEP V1")
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", ["intranode", "low_latency"])
def test_scripts(name, num_ranks):
    # With 512 elements, test_low_latency.py fails for scales in one int32.
    sizes = f"--num-processes={num_ranks} --num-experts=6 --hidden=1024".split()
    command = "-m", "tests.stress.deep_ep_scripts", FOLDER, name, *sizes
    options = {"TRITON_INTERPRET": "1", "TRITON_DIST_AUTOTUNE": "0"}
    result = python(*command, timeout=1000, **options)
    assert f"test_{name}.py passed on {num_ranks} ranks" in result.stdout, result.stderr
