"""Benchmark many values of M (rows of a GEMM): choose the values, summarise and plot the results.

A *point* is the result at one M. ``ratio`` is the speed-up of the tuned op over the fastest
baseline, ``regret`` the slow-down of the tuned config compared to a full tuning at this M.
"""

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
from .workload import BEST_BASELINE, TUNED

Tree = dict[str, Any]
MIN_RATIO = 0.98
"""Points with a smaller ratio are measured again."""
_M_BANDS = ((1, 64), (64, 512), (512, 1 << 62))
_CONFIDENCE = 0.95


def random_sizes(number: int, largest: int, seed: int) -> list[int]:
    """Return ``number`` random sizes from 1 to ``largest``; their logarithms are uniform."""
    generator = random.Random(seed)
    return [round(math.exp(generator.uniform(0, math.log(largest)))) for _ in range(number)]


def near_bounds(largest: int, number: int | None, seed: int) -> list[int]:
    """Return b - 1 to b + 2 for each upper bound b of a range of sizes that share a tuning.

    ``number`` bounds are drawn at random; ``None``: all. Sizes above ``largest`` are left out.
    """
    ends = sorted({tune.fine_bucket(n) for n in range(1, largest + 1)})
    if number is not None and number < len(ends):
        ends = random.Random(seed).sample(ends, number)
    around = (end + step for end in ends for step in (-1, 0, 1, 2))
    return [size for size in around if 1 <= size <= largest]


def median_interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median of ``ratios``, from order statistics."""
    ranked, n = sorted(ratios), len(ratios)
    # Probability that exactly k, and at most k, of the ratios are below the true median.
    exactly = [math.comb(n, k) / 2**n for k in range(n + 1)]
    at_most = [sum(exactly[: k + 1]) for k in range(n + 1)]
    first = max(0, bisect.bisect_right(at_most, (1 - _CONFIDENCE) / 2) - 1)
    return ranked[first], ranked[n - 1 - first]


def make_point(
    M: int, samples: dict[str, Sequence[float]], baselines: Sequence[str], **details: Any
) -> Tree:
    """Return the point of ``M`` from the times in ms of each candidate, one per round."""
    medians = {name: round(statistics.median(times), 6) for name, times in samples.items()}
    best = min(baselines, key=medians.__getitem__)
    # Ratios within one round, so that drift between rounds cancels.
    ratios = [other / tuned for other, tuned in zip(samples[best], samples[TUNED], strict=True)]
    low, high = median_interval(ratios)
    return {
        "M": M,
        "ms": medians,
        "baselines": list(baselines),
        BEST_BASELINE: best,
        "ratio": round(medians[best] / medians[TUNED], 4),
        "interval": [round(low, 4), round(high, 4)],
        "rounds": len(ratios),
        **details,
    }


def is_slower(point: Tree) -> bool:
    """Return True if the ratio and its whole confidence interval are below ``MIN_RATIO``."""
    low, high = point["interval"]
    return point["ratio"] < MIN_RATIO and not low <= MIN_RATIO <= high


def summary(points: Sequence[Tree]) -> list[str]:
    """Return lines of text: statistics of the ratios by band of M, and points with low ratios."""
    lines = [f"{'M':>14} {'points':>7} {'worst':>7} {'5th pct':>8} {'geomean':>8} {'own wins':>8}"]
    for low, high in (*_M_BANDS, (1, 1 << 62)):
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
    warm = [each for each in points if "warm-started" in each["how"] and "first_call" in each]
    for name in ("host", "device") if warm else ():
        times = sorted(each["first_call"][name] for each in warm)
        lines.append(
            f"{len(times)} warm-started first calls, {name} time: median "
            f"{statistics.median(times):.1f} ms, largest {times[-1]:.1f} ms"
        )
    regrets = sorted(each["regret"] for each in points if "regret" in each)
    if regrets:
        share = sum(each <= 0.03 for each in regrets) / len(regrets)
        lines.append(
            f"regret at {len(regrets)} points: median {statistics.median(regrets):.1%}, worst "
            f"{regrets[-1]:.1%}; at most 3 % at {share:.0%} of the points"
        )
    for each in sorted(points, key=lambda each: float(each["ratio"])):
        if each["ratio"] < MIN_RATIO:
            low, high = each["interval"]
            verdict = "slower" if is_slower(each) else f"may be {MIN_RATIO}"
            before = f", in the first pass {each['before']:.3f}" if "before" in each else ""
            lines.append(
                f"M = {each['M']}: {each['ratio']:.3f} [{low:.3f}, {high:.3f}] {verdict}{before}; "
                f"{each['config']} compared with {each[BEST_BASELINE]}; {each['how']}"
            )
    return lines


def draw(tree: Tree, path: Path) -> None:
    """Write a PNG: speed of the tuned op and each baseline relative to the fastest baseline."""
    check_matplotlib()
    from matplotlib.figure import Figure

    points = sorted(tree["points"], key=lambda each: int(each["M"]))
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    panel = figure.subplots()
    baselines = sorted({name for each in points for name in each["baselines"]})
    for name in baselines:
        shown = [each for each in points if name in each["ms"]]
        panel.plot(
            [each["M"] for each in shown],
            [each["ms"][each[BEST_BASELINE]] / each["ms"][name] for each in shown],
            linewidth=0.8, alpha=0.6, label=name,
        )  # fmt: skip
    for own, marker in ((True, "o"), (False, "x")):
        shown = [each for each in points if each["own"] is own]
        label = "tuned, our algorithm" if own else "tuned, library algorithm"
        panel.plot(
            [each["M"] for each in shown], [each["ratio"] for each in shown],
            marker, color="#1f5f99", markersize=4, linestyle="none", label=label,
        )  # fmt: skip
    panel.axhline(MIN_RATIO, color="#b03030", linewidth=0.8, linestyle="--")
    panel.set_xscale("log", base=2)
    panel.set_ylim(0.5, None)
    panel.set_xlabel("M")
    panel.set_ylabel("speed-up over the fastest baseline")
    panel.set_title(f"{tree['op']}, N = {tree['N']}, K = {tree['K']}, {tree['ranks']} GPUs")
    panel.legend(frameon=False)
    figure.savefig(path, dpi=110)


def progress(points: Sequence[Tree], total: int, seconds: float, log: Callable[[str], Any]) -> None:
    """Log the last point, the number of points out of ``total``, and the ``seconds`` so far."""
    last = points[-1]
    log(
        f"[{len(points)}/{total}, {seconds:.0f} s] M = {last['M']}: {last['ms'][TUNED]:.4f} ms, "
        f"{last['ratio']:.3f} of {last[BEST_BASELINE]}, {last['config']}"
    )
