"""Searches that try few, on the excerpts of recorded spaces that the repository has."""

from __future__ import annotations

import json

from benchmarks import bench_search


def test_a_model_comes_nearer_than_chance(tmp_path, capsys):
    path = tmp_path / "search.json"
    arguments = ["--seeds", "1", "--tries", "60", "--json", str(path)]
    for name in ("random", "surrogate", "generations"):
        arguments += ["--search", name]
    scores = bench_search.main(arguments)
    found = {(each.space, each.search): each.mean for each in scores}
    assert found["convolution_A100", "surrogate"] < found["convolution_A100", "random"]
    tree = json.loads(path.read_text())
    assert [each["mean"] for each in tree["scores"]] == [each.mean for each in scores]
    assert len(tree["scores"]) == 6
    assert "dedispersion_A100: 512 configs" in capsys.readouterr().out


def test_constants_are_judged_on_the_space_that_did_not_choose_them(monkeypatch, capsys):
    regrets = {("one", 0.1): 5.0, ("one", 0.5): 1.0, ("two", 0.1): 2.0, ("two", 0.5): 9.0}

    class Space:
        def __init__(self, name):
            self.name = name

    def score(space, name, make, policy, seeds):
        mean = regrets[space.name, bench_search.surrogate.ALIKE]
        return bench_search.Score(space.name, name, mean, 0.0, 0.0, 1, 0.0)

    for constant in ("ALIKE", "PRIOR"):
        monkeypatch.setattr(
            bench_search.surrogate, constant, getattr(bench_search.surrogate, constant)
        )
    monkeypatch.setattr(bench_search, "score", score)
    monkeypatch.setattr(bench_search, "CONSTANTS", [(0.1, 1.0), (0.5, 1.0)])
    bench_search.leave_one_out([Space("one"), Space("two")], range(1), 1)
    told = capsys.readouterr().out.splitlines()[-2:]
    assert told == [
        "one: 5.00 % with alike 0.1, prior 1, which are best on two",
        "two: 9.00 % with alike 0.5, prior 1, which are best on one",
    ]
