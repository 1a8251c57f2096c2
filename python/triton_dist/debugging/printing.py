"""Print from interpreted kernels. Each message begins with rank, program and source line."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import triton.language as tl

from triton_dist.debugging.accesses import Undo, patch, undo_all
from triton_dist.debugging.kernel_location import current_location, is_user_code
from triton_dist.runtime.addresses import describe_address

# The interpreter stores blocks of these types as bit patterns.
_STORED_AS_BITS = {
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}
_MAX_POINTERS = 4  # printed with the name of their region
_HEX: Any = {"int": hex}


def dump(label: str, values: Iterable[Any]) -> None:
    """Print ``label`` and ``values`` of the running kernel. A matrix starts on a new line."""
    _print_all(label, [describe(value) for value in values])


def _print_all(label: str, texts: Iterable[str]) -> None:
    location = current_location()
    for text in texts:
        # A single write, so that lines of ranks do not interleave.
        sys.stdout.write(f"{location}: {label} {text}\n")
    sys.stdout.flush()


def describe(value: Any) -> str:
    """Return type, shape and elements of a value as text. For pointers, the text contains the names
    of the memory regions that they point to."""
    value = getattr(value, "value", value)  # unwraps a constexpr
    if not isinstance(value, tl.tensor):
        return str(value)
    return _describe_handle(value.handle, [int(size) for size in value.shape])


def _describe_handle(handle: Any, shape: list[int]) -> str:
    element = handle.dtype.scalar
    name = f"{element}{shape or ''}"
    if element.is_ptr():
        flat = np.ravel(handle.data)
        names = [describe_address(int(address)) for address in flat[:_MAX_POINTERS]]
        if flat.size > _MAX_POINTERS:
            names.append(f"... {describe_address(int(flat[-1]))}")
        return f"{name} {', '.join(names)}"
    numbers = _numbers(np.asarray(handle.data), str(element))
    if not shape:
        return f"{name} {numbers.flat[0]}"
    if numbers.dtype.kind == "f" and (num_not_finite := np.count_nonzero(~np.isfinite(numbers))):
        name += f", {num_not_finite} of {numbers.size} not finite,"
    text = np.array2string(numbers, threshold=64)
    return f"{name} {text}" if "\n" not in text else f"{name}\n{text}"


def _numbers(block: Any, element: str) -> Any:
    """Return the values of a block as numbers. The interpreter stores bf16 and fp8 as bits."""
    if element not in _STORED_AS_BITS:
        return block
    signed = torch.from_numpy(np.ascontiguousarray(block).view(f"i{block.itemsize}"))
    return signed.view(_STORED_AS_BITS[element]).float().numpy()


def prefix_output(upstream: Any) -> Undo:
    """Prefix the output of ``print`` and ``tl.device_print`` in kernels with rank, program and
    source line. Return a function that undoes this."""

    def python_print(original: Any, *values: Any, **kwargs: Any) -> None:
        if is_user_code(sys._getframe(2)) and (location := current_location()).kernel != "?":
            values = (f"{location}:", *values)
        original(*values, **kwargs)

    def device_print(_: Any, self: Any, prefix: str, hex: bool, values: Any, *signs: Any) -> None:
        texts = (
            np.array2string(value.data, formatter=_HEX)
            if hex
            else _describe_handle(value, [] if value.data.size == 1 else [*value.data.shape])
            for value in values
        )
        _print_all(prefix.strip(" :"), texts)  # Triton adds blanks and a colon to the prefix

    return undo_all(
        [
            patch(builtins, "print", python_print),
            patch(upstream.InterpreterBuilder, "create_print", device_print),
        ]
    )
