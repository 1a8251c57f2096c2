"""Spaces of a million configs, and searches that try few of them."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import random
import resource
import sys
import time

import numpy as np
import pytest
import torch

from tests.tuning.fakes import NOWHERE, Rank, thread_ranks, together
from tests.tuning.test_compile_ahead import FakeCompiler
from tests.tuning.test_resume import Killed, interrupt
from triton_dist import tune
from triton_dist._tuning.engine.components import Hooks
from triton_dist._tuning.search import check_search, search_for, surrogate
from triton_dist._tuning.values import (
    Config,
    Measurement,
    Policy,
    Product,
    TuningRecord,
    UnlistedCandidates,
)
from triton_dist.errors import InvalidArgument, MissingExtra, NoValidConfig, RankDisagreement

SIZES = (16, 32, 64, 128, 256)
AXES = {
    "m": (64, 16, 32, 128, 256),
    "n": SIZES,
    "k": SIZES,
    "warps": (1, 2, 4, 8),
    "stages": (1, 2, 3, 4, 5),
    "order": ("row", "column"),
    "split": range(1, 11),
    "group": range(1, 11),
}
COUNT = 5**3 * 4 * 5 * 2 * 10 * 10  # half a million, of which ``where`` keeps nine tenths


def fits(config):
    return config["m"] * config["n"] < 65536


def cost(rank, config):
    """A bowl whose bottom is at one config, and walls where a rank has no memory."""
    if config["m"] * config["k"] * config["stages"] > 256 * 256 * 3:
        raise MemoryError("too large")
    best = {"m": 128, "n": 128, "k": 64, "warps": 8, "stages": 3, "split": 2, "group": 8}
    far = sum(abs(math.log2(config[name] / value)) for name, value in best.items())
    return 1.0 + 0.2 * far + 0.1 * (config["order"] == "row") + 0.01 * rank


QUICK = Policy(warmup=0, repeat=4, search="surrogate", rounds=(1, 2), tries=40)


needs_optuna = pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None,
    reason="optuna is not installed: pip install '.[optuna]'",
)


@pytest.fixture(params=["surrogate", pytest.param("optuna", marks=needs_optuna)])
def quick(request):
    return dataclasses.replace(QUICK, search=request.param)


def one(folder, ranks=None, **options):
    ranks = ranks or thread_ranks(1)[0]
    defaults = {"policy": QUICK, "search": search_for, "folder": folder}
    return Rank(ranks, Product(AXES, fits), **({"cost": cost} | defaults | options))


def test_a_product_is_a_space_that_nobody_lists():
    product = Product(AXES, fits)
    assert len(product) == COUNT
    assert product.default == Config({name: next(iter(values)) for name, values in AXES.items()})
    config = product[123_456]
    assert product.index_of(config) == 123_456
    assert product.find(config.digest, config.tree) == config
    assert config in product
    assert product.find(config.digest, {**config.tree, "m": 17}) is None
    too_large = Config({**config, "m": 256, "n": 256})
    assert product.index_of(too_large) < COUNT
    assert too_large not in product
    assert Product(AXES, fits).digest == product.digest
    assert Product({**AXES, "m": SIZES}, fits).digest != product.digest
    assert fits in product.functions
    rest = product.without(Config({"m": 256}))
    assert (len(rest), rest.names) == (COUNT // 5, frozenset(AXES) - {"m"})
    assert rest.default["n"] == 16
    whole = dict(zip(AXES, (0, 4, 0, 0, 0, 0, 0, 0), strict=True))
    assert not rest.has_point(tuple(place for name, place in whole.items() if name != "m"))


def test_a_small_product_is_listed_in_the_order_of_itertools():
    product = Product({"a": (2, 1), "b": ("x", "y")}, lambda config: config["a"] + 1 != 2)
    assert [dict(config) for config in product] == [{"a": 2, "b": "x"}, {"a": 2, "b": "y"}]
    kept, pruned = product.prune(lambda config: config["b"] == "y", (), {})
    assert ([dict(each) for each in kept], len(pruned)) == ([{"a": 2, "b": "y"}], 1)


@pytest.mark.parametrize(
    ("parameters", "where"),
    [
        ({}, None),
        ({"a": ()}, None),
        ({"a": (1, 1)}, None),
        ({"a": 3}, None),
        ([1], None),
        ({"a": (1,)}, 5),
    ],
)
def test_what_is_no_product_is_refused(parameters, where):
    with pytest.raises(InvalidArgument):
        Product(parameters, where)
    with pytest.raises(InvalidArgument, match="keeps at least one of the first"):
        _ = Product({"a": range(3)}, lambda config: False).default


def test_sizes_need_a_list_which_a_product_gives():
    product = Product({"n": (1, 2)})

    def work(M, n):
        return n

    with pytest.raises(InvalidArgument, match=r"list\(product\)"):
        tune.autotune(product, key_fn=lambda M: 0, sizes=("M",))
    tuned = tune.autotune(list(product), key_fn=lambda M: 0, sizes=("M",))(work)
    assert [dict(config) for config in tuned.config_space] == [{"n": 1}, {"n": 2}]
    assert tuned(5, autotune=False) == 1


def test_a_million_configs_start_at_once_and_take_no_memory(tmp_path):
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    search = search_for(
        UnlistedCandidates(Product({**AXES, "more": (0, 1)}, fits), None, (), {}), QUICK
    )
    request, asks = search.ask(), []
    assert time.process_time() - began < 1.0
    while request is not None:
        search.tell(request, Measurement((cost(0, {**request.config, "m": 16}),), 0))
        began = time.process_time()
        request = search.ask()
        asks.append(time.process_time() - began)
    assert sorted(asks)[len(asks) // 2] < 0.02
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024


def test_the_winner_is_better_than_chance_and_the_record_is_small(tmp_path, quick):
    def prune(config, x):
        return config["k"] != 16

    rank = one(tmp_path, policy=quick, prune_fn=prune)
    rank.tuned(1)
    record = rank.tuned.tune(1)
    assert QUICK.tries < len(record.trials) + 1 <= QUICK.tries + 1
    assert all(trial.config["k"] != 16 for trial in record.trials)
    dropped = {"prune dropped it": record.num_pruned_by_reason["prune dropped it"]}
    assert record.num_pruned_by_reason == dropped
    assert record.num_pruned_by_reason["prune dropped it"] > 0
    assert TuningRecord.from_tree(record.to_tree()).num_pruned_by_reason == dropped
    tried = [t.outcome.median for t in record.trials if isinstance(t.outcome, Measurement)]
    assert record.best.outcome.median < 0.8 * sorted(tried)[len(tried) // 2]
    assert record.best.outcome.median < cost(0, rank.tuned.config_space.default)
    again = one(tmp_path, policy=quick, disk=rank.disk, prune_fn=prune)
    assert again.tuned(1) == (1, dict(rank.tuned.best_config(1)))
    assert again.tuned.num_tunings == 0


def test_ranks_try_the_same_and_a_rank_that_fails_a_config_keeps_nobody_waiting(quick):
    def fails_on_one(rank, config):
        if rank == 1 and config["order"] == "row":
            raise MemoryError("only here")
        return cost(rank, config)

    ranks = [one(NOWHERE, each, policy=quick, cost=fails_on_one) for each in thread_ranks(2)]
    results = together(ranks)
    assert results[0] == results[1]
    assert results[0][1]["order"] == "column"
    records = [rank.tuned.tune(1) for rank in ranks]
    assert records[0].trials == records[1].trials
    winner = records[0].times_by_rank[records[0].best.digest]
    assert winner.medians_ms[1] - winner.medians_ms[0] == pytest.approx(
        0.01
    )  # cost adds that much to rank 1
    taken = len(records[0].best.outcome.samples)
    assert (winner.num_slowest, len(records[0].times_by_rank) <= 16) == ((0, taken), True)
    assert f"rank 1 was the slowest in {taken} of {taken} samples" in str(winner)
    assert TuningRecord.from_tree(records[0].to_tree()).times_by_rank == records[0].times_by_rank
    failed = [t for t in records[0].trials if not isinstance(t.outcome, Measurement)]
    assert any(trial.outcome.rank == 1 for trial in failed)


def test_a_prune_fn_that_raises_late_is_told_to_all_ranks():
    def prune(config, x):
        if config["k"] != 16:
            raise KeyError("nothing of the kind")
        return True

    ranks = [one(NOWHERE, each, prune_fn=prune) for each in thread_ranks(2)]
    errors = together(ranks)
    assert isinstance(errors[0], KeyError)
    assert "nothing of the kind" in str(errors[1])


def test_a_prune_fn_that_drops_all_is_an_error(tmp_path):
    with pytest.raises(NoValidConfig, match="<lambda> dropped it"):
        one(tmp_path, prune_fn=lambda config, x: False).tuned(1)


def test_products_that_differ_are_told(tmp_path):
    ranks = [one(tmp_path, each) for each in thread_ranks(2)]
    ranks[1].tuned.config_space = Product({**AXES, "m": (64,)}, fits)
    assert all(isinstance(each, RankDisagreement) for each in together(ranks))


def test_an_interrupted_search_goes_on_where_it_was(tmp_path, quick):
    whole = one(tmp_path / "whole", policy=quick)
    whole.tuned(1)
    calls = []

    def killed(rank, config):
        calls.append(config)
        if len(calls) == 41:
            raise Killed
        return cost(rank, config)

    interrupt(one(tmp_path / "other", policy=quick, cost=killed))
    second = one(tmp_path / "other", policy=quick)
    assert second.tuned(1) == whole.tuned(1)
    assert len(second.calls) < len(whole.calls) - 30
    assert [t.digest for t in second.tuned.tune(1).trials] == [
        t.digest for t in whole.tuned.tune(1).trials
    ]


def test_a_generation_is_compiled_while_one_is_measured(tmp_path, quick):
    asked: list[str] = []

    def prepare(x, **config):
        asked.append(str(sorted(config.items())))

    class Generations(FakeCompiler):
        def begin(self, kernels, num_sharing_ranks):
            begun.append(list(kernels))
            self.begun += kernels

    begun: list[list[str]] = []
    rank = one(tmp_path, policy=quick, hooks=Hooks(prepare=prepare))
    rank.search = lambda *about: search_for(*about, compiles_ahead=True)
    rank.compiler = Generations(asked)
    rank.tuned(1)
    assert len(begun[0]) == 21  # the default, and those at random
    assert {len(each) for each in begun[1:-1]} == {4}
    assert len(set(rank.compiler.begun)) == len(rank.compiler.begun)
    tried = {trial.digest for trial in rank.tuned.tune(1).trials}
    assert len(tried) <= len(rank.compiler.begun) <= len(tried) + 8


def test_auto_races_few_and_models_many():
    policy = Policy.for_device("cuda", timing="events", search="auto")
    few, many = [[Config({"n": n}) for n in range(count)] for count in (300, 301)]
    assert [policy.is_model_based(each) for each in (few, many)] == [False, True]
    assert policy.is_model_based(UnlistedCandidates(Product(AXES), None, (), {}))
    quick = Policy.for_device("cuda", timing="events", search="racing", effort="quick")
    assert (quick.max_trials, quick.tries) == (50, None)
    most = Policy.for_device(
        "cuda", timing="events", search="surrogate", effort="max", max_trials=7
    )
    assert most.max_tried(10**6) == 7
    for search in ("racing", "exhaustive"):
        with pytest.raises(InvalidArgument, match=f'search is {search!r}, expected "surrogate"'):
            tune.autotune(Product(AXES), key_fn=len, search=search)


def test_without_optuna_every_rank_raises_the_same_error_before_it_tunes(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "optuna", None)
    policy = dataclasses.replace(QUICK, search="optuna")
    check = functools.partial(check_search, policy)
    ranks = [one(NOWHERE, each, policy=policy, check_search=check) for each in thread_ranks(2)]
    errors = together(ranks)
    assert [type(error) for error in errors] == [MissingExtra] * 2
    assert str(errors[0]) == str(errors[1])
    assert "pip install 'triton-dist-tuner[optuna]'" in str(errors[0])
    assert [rank.calls for rank in ranks] == [[], []]
    # A record needs no search.
    found = one(tmp_path, policy=QUICK)
    found.tuned(1)
    assert one(tmp_path, policy=policy, check_search=check, disk=found.disk).tuned(1)[0] == 1
    # Nor does the default config.
    tuned = tune.autotune([{"n": 1}, {"n": 2}], len, search="optuna", scope="rank")(lambda x, n: n)
    assert tuned("", autotune=False) == 1
    with pytest.raises(MissingExtra):
        tuned("")
    with pytest.raises(MissingExtra):  # also on the ranks that do not search
        tuned._components_for(None, False).check_search()


@needs_optuna
def test_optuna_is_deterministic_and_changes_nothing_outside(capfd):
    import optuna

    from triton_dist._tuning.search.tpe import Tpe

    def proposals(seed):
        candidates = UnlistedCandidates(
            Product(AXES, fits), lambda config: config["k"] != 16, (), {}
        )
        proposer, found = Tpe(candidates, seed=seed), []
        proposer.tell(candidates.product[5], 9.0)  # not asked for
        for _ in range(60):
            config = proposer.ask()
            assert config in candidates
            found.append(config)
            try:
                proposer.tell(config, cost(0, config))
            except MemoryError:
                proposer.tell(config, math.inf)
        assert len(set(found)) == 60
        return found

    def state():
        return (
            random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist(),
            torch.get_num_threads(), optuna.logging.get_verbosity(),
        )  # fmt: skip

    before = state()
    first = proposals(seed=1)
    assert proposals(seed=1) == first != proposals(seed=2)
    assert state() == before
    assert capfd.readouterr() == ("", "")
    # Every config of a small space is proposed once, although Optuna repeats itself.
    small, found = Tpe([Config({"n": n}) for n in range(30)]), []
    while (config := small.ask()) is not None:
        found.append(config["n"])
        small.tell(config, 1.0 + config["n"])
    assert sorted(found) == list(range(30))


def test_the_model_uses_one_blas_thread(monkeypatch):
    pools = pytest.importorskip("threadpoolctl")
    seen = []

    def threads():
        blas = (pool for pool in pools.threadpool_info() if pool["user_api"] == "blas")
        return [pool["num_threads"] for pool in blas]

    def predict(self, points):
        seen.append(threads())
        return np.zeros(len(points)), np.ones(len(points))

    monkeypatch.setattr(surrogate.Model, "predict", predict)
    surrogate._thread_pools.cache_clear()
    with pools.threadpool_limits(2, "blas"):
        before = threads()
        search = surrogate.Surrogate(UnlistedCandidates(Product(AXES), None, (), {}))
        for _ in range(25):  # 20 are random
            search.tell(search.ask(), 1.0)
        assert seen
        assert {number for each in seen for number in each} == {1}
        assert threads() == before


def test_a_search_of_the_users_own(tmp_path):
    told = []

    class Downhill:
        """One parameter after another, each value."""

        def __init__(self, values):
            assert {name: tuple(own) for name, own in values.items()} == {
                name: tuple(own) for name, own in AXES.items()
            }
            self.best, self.least = {name: own[0] for name, own in values.items()}, math.inf
            self.left = [(name, each) for name, own in values.items() for each in own]
            self.left.insert(0, ("m", "no value of it"))

        def ask(self):
            return None if not self.left else {**self.best, **dict([self.left.pop(0)])}

        def tell(self, config, milliseconds):
            told.append((dict(config), milliseconds))
            if milliseconds is not None and milliseconds < self.least:
                self.best, self.least = dict(config), milliseconds

    rank = one(tmp_path, search=lambda *about: search_for(*about, user_search=Downhill))
    _, winner = rank.tuned(1)
    assert told[0][0] == dict(rank.tuned.config_space.default)
    assert ({**told[0][0], "m": "no value of it"}, None) in told
    assert winner["order"] == "column"
    assert cost(0, winner) < cost(0, rank.tuned.config_space.default)
