from __future__ import annotations

import pytest
from hypothesis import given

from tests.tuning.fakes import fingerprint
from tests.tuning.strategies import fingerprints


@given(fingerprints)
def test_nothing_differs_from_itself(one):
    assert one.diff(one) == []


@pytest.mark.parametrize(
    ("change", "sentence", "patch_level"),
    [
        ({"hardware": {"gpu": "H200", "driver": "550.54"}}, "gpu was fake, is H200", False),
        ({"hardware": {"gpu": "fake", "driver": "550.90.7"}}, "driver was 550.54", True),
        ({"hardware": {"gpu": "fake", "driver": "560.1"}}, "driver was 550.54, is 560.1", False),
        ({"software": {"torch": "2.9.2", "triton": "3.6.0"}}, "torch was 2.9.1+cpu", True),
        ({"software": {"torch": "2.9.1", "triton": "3.6.0"}}, "is 2.9.1", True),
        ({"software": {"torch": "2.10.0", "triton": "3.6.0"}}, "is 2.10.0", False),
        ({"software": {"torch": "2.9.1+cpu", "triton": "3.7.0"}}, "triton was 3.6.0", False),
        ({"software": {"torch": "2.9.1+cpu", "triton": "odd"}}, "is odd", False),
        ({"software": {"torch": "2.9.1+cpu"}}, "triton was 3.6.0, is not known", False),
        ({"topology": {"world_size": "2"}}, "topology: world_size was 1, is 2", False),
        ({"policy": {"timing": "graph"}}, "policy: timing was events, is graph", False),
        ({"source": {"run": "5678"}}, "source: run changed", False),
        ({"source": {"run": "1234", "f": "1"}}, "f is reached now and was not", False),
        ({"source": {}}, "run was reached and is not now", False),
        ({"space": "dcba"}, "config space: its digest was abcd, is dcba", False),
    ],
)
def test_each_difference_is_one_sentence(change, sentence, patch_level):
    (difference,) = fingerprint().compare(fingerprint(**change))
    assert sentence in difference.sentence
    assert difference.patch_level is patch_level
