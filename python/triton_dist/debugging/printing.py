"""Text that interpreted kernels print: each line says which rank, program and line it is of."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import triton.language as tl

from triton_dist.debugging.accesses import Undo, replace, undo_all
from triton_dist.debugging.site import is_of_program, site
from triton_dist.runtime.addresses import describe_address

# The interpreter holds blocks of these as their bits.
_AS_BITS = {
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}
_MOST_POINTERS = 4
_HEX: Any = {"int": hex}


def dump(label: str, values: Iterable[Any]) -> None:
    """Print ``values`` of the kernel that runs, each in a line, or below it if it is a matrix."""
    _print_all(label, [described(value) for value in values])


def _print_all(label: str, texts: Iterable[str]) -> None:
    at = site()
    for text in texts:
        # In one piece, so that ranks which share a terminal do not mix.
        sys.stdout.write(f"{at}: {label} {text}\n")
    sys.stdout.flush()


def described(value: Any) -> str:
    """Type, shape and elements of a value in a kernel; of pointers, where they point to."""
    value = getattr(value, "value", value)  # of a constexpr
    if not isinstance(value, tl.tensor):
        return str(value)
    return _described(value.handle, [int(size) for size in value.shape])


def _described(handle: Any, shape: list[int]) -> str:
    element = handle.dtype.scalar
    name = f"{element}{shape or ''}"
    if element.is_ptr():
        flat = np.ravel(handle.data)
        shown = [describe_address(int(address)) for address in flat[:_MOST_POINTERS]]
        if flat.size > _MOST_POINTERS:
            shown.append(f"... {describe_address(int(flat[-1]))}")
        return f"{name} {', '.join(shown)}"
    numbers = _numbers(np.asarray(handle.data), str(element))
    if not shape:
        return f"{name} {numbers.flat[0]}"
    if numbers.dtype.kind == "f" and (odd := np.count_nonzero(~np.isfinite(numbers))):
        name += f", {odd} of {numbers.size} not finite,"
    text = np.array2string(numbers, threshold=64)
    return f"{name} {text}" if "\n" not in text else f"{name}\n{text}"


def _numbers(block: Any, element: str) -> Any:
    """The values of a block, of which the interpreter may hold the bits."""
    if element not in _AS_BITS:
        return block
    signed = torch.from_numpy(np.ascontiguousarray(block).view(f"i{block.itemsize}"))
    return signed.view(_AS_BITS[element]).float().numpy()


def notify_ranks(upstream: Any) -> Undo:
    """Let ``print`` and ``tl.device_print`` in kernels say who prints; of ``upstream``, the module
    ``triton.runtime.interpreter``. Until undone."""

    def of_python(original: Any, *values: Any, **named: Any) -> None:
        if is_of_program(sys._getframe(2)) and (at := site()).kernel != "?":
            values = (f"{at}:", *values)
        original(*values, **named)

    def of_device(_: Any, self: Any, prefix: str, hex: bool, values: Any, *signs: Any) -> None:
        texts = (
            np.array2string(value.data, formatter=_HEX)
            if hex
            else _described(value, [] if value.data.size == 1 else [*value.data.shape])
            for value in values
        )
        _print_all(prefix.strip(" :"), texts)  # Triton puts them there

    return undo_all(
        [
            replace(builtins, "print", of_python),
            replace(upstream.InterpreterBuilder, "create_print", of_device),
        ]
    )
