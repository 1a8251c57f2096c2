"""Points of a sweep over M: their selection, evaluation and plot."""

from __future__ import annotations

import bisect
import math
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from triton_dist import tune

from .plot import check_matplotlib
from .workload import TUNED

Tree = dict[str, Any]
FLOOR = 0.98
"""Tuned over the best peer: below it a point is measured again."""
_BANDS = ((1, 64), (64, 512), (512, 1 << 62))
_CONFIDENCE = 0.95


def random_sizes(number: int, most: int, seed: int) -> list[int]:
    """Return sizes from 1 to ``most``, log-uniform."""
    draw = random.Random(seed)
    return [round(math.exp(draw.uniform(0, math.log(most)))) for _ in range(number)]


def bounds(most: int, number: int | None, seed: int) -> list[int]:
    """Return b - 1 to b + 2 of each bound b of a range up to ``most``, or of ``number`` of them,
    drawn at random."""
    ends, n = [], 1
    while n <= most:
        ends.append(tune.fine_bucket(n))
        n = ends[-1] + 1
    if number is not None and number < len(ends):
        ends = random.Random(seed).sample(ends, number)
    around = (end + step for end in ends for step in (-1, 0, 1, 2))
    return [each for each in around if 1 <= each <= most]


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median of ``ratios``, by order statistics."""
    ranked, n = sorted(ratios), len(ratios)
    below = [math.comb(n, k) / 2**n for k in range(n + 1)]
    sums = [sum(below[: k + 1]) for k in range(n + 1)]
    first = max(0, bisect.bisect_right(sums, (1 - _CONFIDENCE) / 2) - 1)
    return ranked[first], ranked[n - 1 - first]


def point(
    M: int, samples: dict[str, Sequence[float]], baselines: Sequence[str], **about: Any
) -> Tree:
    """Return a point from the samples of each candidate, round by round."""
    medians = {name: round(statistics.median(each), 6) for name, each in samples.items()}
    best = min(baselines, key=medians.__getitem__)
    # Ratios within one round, so that drift between rounds cancels.
    ratios = [theirs / ours for theirs, ours in zip(samples[best], samples[TUNED], strict=True)]
    low, high = interval(ratios)
    return {
        "M": M,
        "ms": medians,
        "baselines": list(baselines),
        "best_peer": best,
        "ratio": round(medians[best] / medians[TUNED], 4),
        "interval": [round(low, 4), round(high, 4)],
        "rounds": len(ratios),
        **about,
    }


def is_low(each: Tree) -> bool:
    """Return True for a point that counts as slower than the best baseline."""
    return each["ratio"] < FLOOR and not each["interval"][0] <= FLOOR <= each["interval"][1]


def summary(points: Sequence[Tree]) -> list[str]:
    """Return lines that compare tuned with the best baseline by band of M, and points behind."""
    lines = [f"{'M':>14} {'points':>7} {'worst':>7} {'5th pct':>8} {'geomean':>8} {'ours':>8}"]
    for low, high in (*_BANDS, (1, 1 << 62)):
        inside = [each for each in points if low <= each["M"] < high]
        if not inside:
            continue
        ratios = sorted(each["ratio"] for each in inside)
        fifth = ratios[int(0.05 * (len(ratios) - 1))]
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        own = sum(each["own"] for each in inside) / len(inside)
        band = "all" if (low, high) == (1, 1 << 62) else f"{low}-{high - 1 if high < 1e9 else ''}"
        lines.append(
            f"{band:>14} {len(inside):>7} {ratios[0]:>7.3f} {fifth:>8.3f} {mean:>8.3f} {own:>8.0%}"
        )
    first = [
        each["first_call"]
        for each in points
        if "warm-started" in each["how"] and "first_call" in each
    ]
    for name in ("host", "device") if first else ():
        times = sorted(each[name] for each in first)
        lines.append(
            f"{len(first)} first calls of a range next to tuned ones, {name}: median "
            f"{statistics.median(times):.1f} ms, worst {times[-1]:.1f} ms"
        )
    regrets = sorted(each["regret"] for each in points if "regret" in each)
    if regrets:
        few = sum(each <= 0.03 for each in regrets) / len(regrets)
        lines.append(
            f"regret at {len(regrets)} points: median {statistics.median(regrets):.1%}, worst "
            f"{regrets[-1]:.1%}; at most 3 % at {few:.0%}"
        )
    for each in sorted(points, key=lambda each: float(each["ratio"])):
        if each["ratio"] < FLOOR:
            low, high = each["interval"]
            said = "behind" if is_low(each) else "holds 0.98"
            before = f", before {each['before']:.3f}" if "before" in each else ""
            lines.append(
                f"M = {each['M']}: {each['ratio']:.3f} [{low:.3f}, {high:.3f}] {said}{before}; "
                f"{each['config']} beside {each['best_peer']}; {each['how']}"
            )
    return lines


def draw(tree: Tree, path: Path) -> None:
    """Write a PNG: speed-up of the tuned op and the baselines over the best baseline, by M."""
    check_matplotlib()
    from matplotlib.figure import Figure

    points = sorted(tree["points"], key=lambda each: int(each["M"]))
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    panel = figure.subplots()
    baselines = sorted({name for each in points for name in each["baselines"]})
    for name in baselines:
        there = [each for each in points if name in each["ms"]]
        panel.plot(
            [each["M"] for each in there],
            [each["ms"][each["best_peer"]] / each["ms"][name] for each in there],
            linewidth=0.8, alpha=0.6, label=name,
        )  # fmt: skip
    for own, marker in ((True, "o"), (False, "x")):
        there = [each for each in points if each["own"] is own]
        label = "tuned, our algorithm" if own else "tuned, library algorithm"
        panel.plot(
            [each["M"] for each in there], [each["ratio"] for each in there],
            marker, color="#1f5f99", markersize=4, linestyle="none", label=label,
        )  # fmt: skip
    panel.axhline(FLOOR, color="#b03030", linewidth=0.8, linestyle="--")
    panel.set_xscale("log", base=2)
    panel.set_ylim(0.5, None)
    panel.set_xlabel("M")
    panel.set_ylabel("times as fast as the best peer")
    panel.set_title(f"{tree['op']}, N = {tree['N']}, K = {tree['K']}, {tree['ranks']} GPUs")
    panel.legend(frameon=False)
    figure.savefig(path, dpi=110)


def progress(points: Sequence[Tree], asked: int, took: float, log: Callable[[str], Any]) -> None:
    """Print the progress of a sweep."""
    last = points[-1]
    log(
        f"[{len(points)}/{asked}, {took:.0f} s] M = {last['M']}: {last['ms'][TUNED]:.4f} ms, "
        f"{last['ratio']:.3f} of {last['best_peer']}, {last['config']}"
    )
