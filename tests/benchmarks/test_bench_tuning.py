"""Racing on the excerpts of recorded spaces that the repository has."""

from __future__ import annotations

import json

import pytest

from benchmarks import bench_tuning


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "tuning.json"
    scores = bench_tuning.main(["--seeds", "12", "--json", str(path)])
    return scores, json.loads(path.read_text())


@pytest.mark.parametrize(
    ("space", "most"), [("convolution_A100", 0.15), ("dedispersion_A100", 0.4)]
)
def test_racing_costs_a_part_and_finds_as_much(results, space, most):
    by_search = {score.search: score for score in results[0] if score.space == space}
    usual, racing = by_search["5 + 10"], by_search["racing"]
    assert usual.cost == pytest.approx(1.0)
    assert racing.cost <= most
    assert racing.within_1_percent >= 0.95
    assert racing.regret_mean <= max(usual.regret_mean, 0.005)


def test_the_file_says_what_was_measured(results):
    scores, tree = results
    assert [each["cost"] for each in tree["scores"]] == [score.cost for score in scores]
    assert tree["seeds"] == [0, 12]
    assert tree["policy"]["indifference"] == "0.01"
    assert "hardware" in tree


def test_parts_of_a_space_and_other_seeds(capsys):
    scores = bench_tuning.main(["--seeds", "1", "--first-seed", "9", "--configs", "20"])
    assert {score.configs for score in scores} == {20}
    assert "convolution_A100[20, part 0]" in capsys.readouterr().out


def test_a_folder_without_spaces_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        bench_tuning.main([str(tmp_path)])
    assert "no *_T4.json.gz" in capsys.readouterr().err
