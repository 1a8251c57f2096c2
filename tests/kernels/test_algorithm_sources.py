"""A record of an op holds as long as the code of its ways."""

from __future__ import annotations

import importlib
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch

from triton_dist._tuning.source import source_of
from triton_dist.cli import validator
from triton_dist.cli.main import main
from triton_dist.kernels.nvidia import ag_gemm, all_gather, all_reduce, gemm_rs, reduce_scatter
from triton_dist.kernels.nvidia.allgather_gemm.algorithms import ALGORITHMS as AG_GEMM_ALGORITHMS
from triton_dist.kernels.nvidia.allreduce.algorithms import ALGORITHMS as ALL_REDUCE_ALGORITHMS
from triton_dist.kernels.nvidia.gemm_reduce_scatter.algorithms import (
    ALGORITHMS as GEMM_RS_ALGORITHMS,
)
from triton_dist.kernels.nvidia.shard_collectives.algorithms import AllGatherCall, ReduceScatterCall

OP = """
from triton_dist.kernels.common.op import op

from edited_op.algorithms import ALGORITHMS, Call


@op(
    algorithms=ALGORITHMS,
    call=Call,
    sizes=lambda x, *_, **__: x.numel(),
    key_fn=lambda x, *_, **__: x.numel(),
    agree_fn=lambda x, *_, **__: x.numel(),
    version="1",
)
def add(x, ctx, amount=1, algorithm=None):
    return Call(x, ctx, amount, algorithm).run()
"""
ALGORITHMS = """
from triton_dist.kernels.common.op import OpCall, Algorithm, Algorithms

from edited_op import helpers


class Call(OpCall):
    def __init__(self, x, ctx, amount, algorithm):
        self.x, self.amount, self.chosen = x, amount, ALGORITHMS[algorithm or "whole"]


class Whole(Algorithm):
    name, tunables = "whole", ("amount",)

    def candidates(self):
        yield (1,)

    def fits(self, config, sizes):
        return sizes > 0

    def run(self, call):
        return call.x + call.amount


class Halves(Whole):
    def __init__(self, name, parts):
        self.name, self._parts = name, parts

    def run(self, call):
        return helpers.joined(call.x, call.amount, self._parts)


ALGORITHMS = Algorithms("add", (Whole(), Halves("halves", 2)))
"""
HELPERS = """
import torch


def joined(x, amount, parts):
    return torch.cat([part + amount for part in x.chunk(parts)])
"""


class Package:
    """An op on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "edited_op"
        self.folder.mkdir()
        files = {"__init__": "", "op": OP, "algorithms": ALGORITHMS, "helpers": HELPERS}
        for name, text in files.items():
            (self.folder / f"{name}.py").write_text(text)

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.folder / f"{file}.py"
        assert path.read_text().count(old) == 1
        path.write_text(path.read_text().replace(old, new))

    def fresh(self) -> ModuleType:
        """The module of the op as a new process would have it."""
        for name in [name for name in sys.modules if name.partition(".")[0] == "edited_op"]:
            del sys.modules[name]
        importlib.invalidate_caches()
        return importlib.import_module("edited_op.op")

    def tunings(self) -> int:
        """How often a call in a new process tunes."""
        add = self.fresh().add
        assert torch.equal(add(torch.zeros(4), None), torch.ones(4))
        return int(add.tuning_count)


@pytest.fixture
def package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(validator, "OWN_PACKAGES", {"edited_op"})  # imported in this process
    yield Package(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "edited_op"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("algorithms", "return call.x + call.amount", "return call.amount + call.x"),
        ("algorithms", "yield (1,)", "yield 1,\n        yield (True,)"),
        ("algorithms", "return sizes > 0", "return sizes >= 1"),
        ("algorithms", 'Halves("halves", 2)', 'Halves("halves", 4)'),
        ("helpers", "part + amount", "amount + part"),
    ],
    ids=["run", "candidates", "fits", "an argument of a way", "a helper"],
)
def test_a_changed_way_is_tuned_again(package, capsys, file, old, new):
    assert [package.tunings(), package.tunings()] == [1, 0]
    package.edit(file, old, new)
    package.fresh()
    capsys.readouterr()
    main(["explain", "edited_op.op:add"])
    said = capsys.readouterr().out
    assert re.search(r"source: edited_op\.\w+:\d+ changed: ", said) or "config space" in said
    assert "1 record of add, 0 used" in said
    assert [package.tunings(), package.tunings()] == [1, 0]


def test_a_comment_in_a_way_changes_nothing(package):
    assert package.tunings() == 1
    package.edit(
        "algorithms", "        return sizes > 0", "        # Of anything.\n        return sizes > 0"
    )
    assert package.tunings() == 0


def test_the_source_of_the_ops_has_all_of_their_ways():
    ops = {
        ag_gemm: AG_GEMM_ALGORITHMS,
        gemm_rs: GEMM_RS_ALGORITHMS,
        all_reduce: ALL_REDUCE_ALGORITHMS,
        all_gather: AllGatherCall.algorithms,
        reduce_scatter: ReduceScatterCall.algorithms,
    }
    digests = source_of([op.fn for op in ops]).digests
    found = Counter(name.rpartition(":")[2] for name in digests)
    classes = {
        each
        for algorithms in ops.values()
        for algorithm in algorithms.values()
        for each in type(algorithm).__mro__
    }
    own = Counter(each.__name__ for each in classes if ".kernels." in each.__module__)
    assert own <= found
