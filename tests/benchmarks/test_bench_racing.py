"""Racing on the excerpts that the repository has, under clocks that drift."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import bench_racing

WORLDS = ("steady", "step", "walk", "tails", "modes", "all")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("results") / "racing.json"
    arguments = ["--draws", "8", "--configs", "200", "--worlds", *WORLDS, "--json", str(path)]
    scores = bench_racing.main(arguments)
    return scores, json.loads(path.read_text())


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("space", "most"), [("convolution_A100", 0.16), ("dedispersion_A100", 0.28)]
)
def test_a_winner_is_no_noise_whatever_the_clocks_do(results, space, most, world):
    found = {s.decision: s for s in results[0] if (s.space, s.world) == (space, world)}
    racing, usual = found["racing"], found["5 + 10"]
    assert racing.near >= min(0.95, found["oracle"].near)
    assert racing.regret_p95 <= max(usual.regret_p95, found["oracle"].regret_p95, 0.005)
    assert racing.cost <= most


def test_the_clocks_make_the_usual_way_choose_wrongly(results):
    """Else the test above would show nothing."""
    near = [s.near for s in results[0] if (s.space, s.decision) == ("dedispersion_A100", "5 + 10")]
    assert near[0] == 1.0
    assert min(near) < 0.7


def test_the_file_says_what_was_measured(results):
    scores, tree = results
    assert [each["near"] for each in tree["scores"]] == [score.near for score in scores]
    assert tree["draws"] == [0, 8]
    assert tree["policy"]["doubt"] == 60


@pytest.mark.parametrize("part", [*bench_racing.OF_THE_TIME, *bench_racing.OF_THE_RUN])
def test_a_part_of_a_world_is_as_large_as_it_says(part):
    at = np.linspace(0.0, 1.25, 10_000)
    make = {**bench_racing.OF_THE_TIME, **bench_racing.OF_THE_RUN}[part]
    low, high = (0.0, 2.0) if part == "tails" else (-0.05, 0.05)
    for seed in range(20):
        added = make(np.random.default_rng(seed), at)
        assert low - 1e-9 <= added.min() <= added.max() <= high + 1e-9
        if part == "tails":
            assert 0.03 < (added >= 0.2).mean() == (added > 0).mean() < 0.07
        if part in ("modes", "coin"):
            assert set(np.abs(added)) == {0.03}


def test_all_at_once_is_what_one_run_after_another_gives():
    space = bench_racing.Space.read(bench_racing.EXCERPTS / "dedispersion_A100_T4.json.gz", 20, 0)
    draw = bench_racing.Draw(space, "all", 5)
    slowly = [[draw.run(config) for _ in range(15)] for config in range(20)]
    assert np.allclose(draw.one_after_another(), slowly)
    assert draw.cost == pytest.approx(1.0)


def test_near_is_the_interval_of_the_median():
    """Of 32 runs the 10th to the 23rd hold the median in 95 % of all cases and more."""
    runs = 100.0 + (np.arange(32) - 15.5) * 0.63
    space = bench_racing.Space("made", (), np.array([runs, runs * 1.2]))
    assert space.near() == pytest.approx(6.5 * 0.63 / 100)
    assert space.regrets() == pytest.approx([0.0, 0.2])


def test_a_noisy_space_has_its_medians_and_the_noise_of_the_other():
    space, other = (
        bench_racing.Space.read(path, 50, 0)
        for path in sorted(bench_racing.EXCERPTS.glob("*_T4.json.gz"))
    )
    noisy = space.with_noise_of(other)
    assert noisy.regrets() == pytest.approx(space.regrets())
    assert not np.allclose(noisy.recorded, space.recorded)


def test_a_folder_without_spaces_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        bench_racing.main([str(tmp_path)])
    assert "no *_T4.json.gz" in capsys.readouterr().err
