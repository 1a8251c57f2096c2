"""Lines for a person: what a rank did step by step, and what was chosen."""

from __future__ import annotations

from collections.abc import Sequence

from triton_dist._tuning.engine.contextual.context import Context, shown
from triton_dist._tuning.engine.contextual.turn import Stepped
from triton_dist._tuning.values import Measurement


def step_line(call: int, context: Context, stepped: Stepped) -> str:
    """A line about one step of this rank."""
    took = f"{stepped.milliseconds:.4f} ms" if stepped.timed else "warm-up"
    failed = "; ".join(map(str, stepped.failures.values()))
    config = shown(context.live[stepped.digest])
    return f"call {call} {context.name} config {config} iter {stepped.iteration}: {failed or took}"


def summary(tuned: Sequence[Context], calls: int, seconds: float) -> str:
    """A table of what was chosen."""
    rows = [f"{calls} calls of the function, {seconds:.1f} s"]
    for context in tuned:
        best = context.record.best.outcome if context.record else None
        took = f"{best.median:10.4f} ms" if isinstance(best, Measurement) else ""
        of = f"{len(context.candidates):3} configs"
        rows.append(f"  {took}  {of}  {context.name}  {shown(context.winner)}")
    return "\n".join(rows)
