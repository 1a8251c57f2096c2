"""Which rank compiles what, and what a candidate waits for; the compiler is a fake."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.tuning.fakes import Rank, thread_ranks, together
from triton_dist._tuning.engine.compile_ahead import MissingKernels, kernels_to_compile
from triton_dist._tuning.engine.components import Hooks
from triton_dist.errors import CandidateFailed, CompileTimeout, NoValidConfig

SPACE = [{"n": n} for n in (4, 2, 3, 1)]


@dataclass
class FakeCompiler:
    """``prepare`` hands it, in ``asked``, the kernels that it would compile."""

    asked: list[str]
    cache: str = "host"
    begun: list[str] = field(default_factory=list)
    waited: list[str] = field(default_factory=list)
    num_sharing_ranks: int = 0
    closed: int = 0
    fails: dict[str, Exception] = field(default_factory=dict)

    def collect(self, prepare):
        self.asked.clear()
        prepare()
        return list(self.asked)

    def begin(self, kernels, num_sharing_ranks):
        self.begun, self.num_sharing_ranks = list(kernels), num_sharing_ranks

    def wait(self, kernel):
        if kernel in self.begun:
            self.waited.append(kernel)
            if kernel in self.fails:
                raise self.fails[kernel]

    def close(self):
        self.closed += 1


def ranks_that_compile(size: int, kernels=lambda rank, n: [f"kernel {n}"], caches=None):
    made = []
    for rank in thread_ranks(size):
        asked: list[str] = []

        def prepare(x: Any, n: int, rank=rank.rank, asked=asked) -> None:
            asked.extend(kernels(rank, n))

        each = Rank(rank, SPACE, lambda rank, config: config["n"], hooks=Hooks(prepare=prepare))
        each.compiler = FakeCompiler(asked, *([caches[rank.rank]] if caches else []))
        made.append(each)
    return made


def test_the_ranks_of_a_host_share_the_work():
    ranks = ranks_that_compile(2)
    assert together(ranks) == [(1, {"n": 1})] * 2
    assert ranks[0].compiler.begun == ["kernel 4", "kernel 3"]
    assert ranks[1].compiler.begun == ["kernel 2", "kernel 1"]
    assert [rank.compiler.num_sharing_ranks for rank in ranks] == [2, 2]
    for rank in ranks:
        assert rank.compiler.waited == rank.compiler.begun
        assert rank.compiler.closed == 1


def test_a_candidate_is_prepared_after_its_kernel_was_waited_for():
    ranks = ranks_that_compile(2)
    together(ranks)
    phases = [phase for phase in ranks[0].ranks.phases if "2/4" in phase]
    assert [phase.split()[0] for phase in phases[:3]] == ["compile", "prepare", "run"]


def test_a_kernel_is_compiled_once_for_all_candidates_that_need_it():
    ranks = ranks_that_compile(2, lambda rank, n: ["same"])
    together(ranks)
    assert [rank.compiler.begun for rank in ranks] == [["same"], []]
    assert sum(phase.startswith("compile ") for phase in ranks[0].ranks.phases) == 1


def test_nothing_is_waited_for_where_nothing_is_missing():
    ranks = ranks_that_compile(2, lambda rank, n: [])
    together(ranks)
    assert not any("compile " in phase for phase in ranks[0].ranks.phases)


def test_a_kernel_that_fails_fails_its_candidate_on_all_ranks():
    ranks = ranks_that_compile(2)
    ranks[1].compiler.fails = {
        "kernel 2": CandidateFailed("no registers left"),
        "kernel 1": CompileTimeout("gemm", 3),
    }
    assert together(ranks) == [(1, {"n": 3})] * 2
    for rank in ranks:
        outcomes = [trial.outcome for trial in rank.tuned.tune(1).trials]
        assert (outcomes[1].kind, outcomes[1].rank) == ("compile", 1)
        assert "no registers left" in outcomes[1].message
        assert outcomes[3].kind == "timeout"
        assert {"n": 2} not in rank.calls


def test_the_compiler_ends_with_a_tuning_that_fails():
    ranks = ranks_that_compile(1)
    ranks[0].cost = lambda rank, config: 1 / 0
    with pytest.raises(NoValidConfig):
        ranks[0].tuned(1)
    assert ranks[0].compiler.closed == 1


def test_without_a_prepare_hook_nothing_is_compiled_ahead():
    (rank,) = ranks_that_compile(1)
    rank.tuned._hooks.__dict__["prepare"] = None
    rank.tuned(1)
    assert rank.compiler.begun == []


def needs(*kernels: list[str], cache: str = "host") -> MissingKernels:
    return MissingKernels(cache, {f"config {n}": each for n, each in enumerate(kernels)})


@pytest.mark.parametrize(
    ("everyone", "expected"),
    [
        # Each host for itself.
        ([needs(["a"], ["b"]), needs(["a"], ["b"], cache="other")], [["a", "b"], ["a", "b"]]),
        # Kernels that differ by rank stay where they are needed.
        ([needs(["a"], ["c"]), needs(["b"], ["d"])], [["a", "c"], ["b", "d"]]),
        # Who has less to do takes what both need.
        ([needs(["a", "b"], ["z"]), needs([], ["z"])], [["a", "b"], ["z"]]),
        # In memory already on one rank.
        ([needs([], ["b"]), needs(["a"], ["b"])], [["b"], ["a"]]),
        ([needs(), needs()], [[], []]),
    ],
)
def test_shares(everyone, expected):
    assert [kernels_to_compile(everyone, rank) for rank in range(len(everyone))] == expected


def test_shares_are_disjoint_complete_and_even():
    everyone = [needs(*([f"{n}", f"{n + 1}"] for n in range(21)))] * 4
    shares = [kernels_to_compile(everyone, rank) for rank in range(4)]
    assert sorted(itertools.chain(*shares), key=int) == [str(n) for n in range(22)]
    assert {len(each) for each in shares} == {5, 6}


def test_what_the_budget_leaves_out_is_not_compiled():
    ranks = ranks_that_compile(2)
    for rank in ranks:
        rank.policy = dataclasses.replace(rank.policy, max_trials=2)
    assert together(ranks) == [(1, {"n": 2})] * 2
    assert [rank.compiler.begun for rank in ranks] == [["kernel 4"], ["kernel 2"]]
