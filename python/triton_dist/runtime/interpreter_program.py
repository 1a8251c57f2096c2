"""Index of the program that Triton's interpreter runs."""

from __future__ import annotations

from triton.runtime import interpreter as upstream


def current_program() -> tuple[int, int, int]:
    """Return ``tl.program_id`` of the program that runs, or ran last, for error messages."""
    x, y, z = getattr(upstream.interpreter_builder, "grid_idx", (0, 0, 0))
    return x, y, z


def current_program_number() -> int:
    """Return the linear program number in the order of GPUs: the first dimension varies fastest."""
    x, y, z = current_program()
    width, height, _ = getattr(upstream.interpreter_builder, "grid_dim", (1, 1, 1))
    return x + width * (y + height * z)
