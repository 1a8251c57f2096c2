"""Open a profiler scope around each call of a tuned function, with the call's FLOPs and bytes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

from triton_dist import _files
from triton_dist._tuning.engine.decorated import CALL_KEYWORDS
from triton_dist._tuning.engine.dispatch import AutoTuner
from triton_dist._warn import register_entry_points
from triton_dist.errors import DeviceUnavailable, InvalidArgument
from triton_dist.runtime.device import current_device
from triton_dist.runtime.peaks import device_peak
from triton_dist.timelines import trace

CallMetadata: TypeAlias = dict[str, Any]
"""Texts and numbers that describe a call, by name."""
MakeScope: TypeAlias = Callable[[str, CallMetadata], AbstractContextManager[object]]
"""Function that returns a profiler scope, given its name and the numbers of ``_WORK_KEYS``."""
MakeMarking: TypeAlias = Callable[[], AbstractContextManager[object]]
"""Function that returns a context manager in which kernels make marks (time spans in kernels)."""
_WORK_KEYS = ("flops", "bytes", "link_bytes")


class Scopes:
    """Opens a profiler scope for each call of a tuned function.

    Attributes:
        calls: metadata of each call, by scope name: ``<op> <shape> #<number>``. See
            :func:`metadata_of_call`.

    Args:
        make_scope: opens a scope of the profiler.
        make_marking: turns marks in kernels on for a call; default: no marks.
        nvtx_range: also open NVTX ranges, which other profilers read.
    """

    def __init__(
        self,
        make_scope: MakeScope,
        make_marking: MakeMarking = nullcontext,
        nvtx_range: bool = True,
    ) -> None:
        self.calls: dict[str, CallMetadata] = {}
        self._make_scope, self._make_marking = make_scope, make_marking
        self._nvtx_range = current_device().nvtx_range if nvtx_range else nullcontext
        # Import all ops and query the driver now, so that the first recorded call does not do this.
        _opinfos()
        device_peak()

    def on(self) -> AbstractContextManager[None]:
        """Context manager in which calls open scopes."""
        return wrap_calls(self.wrap_call)

    @contextmanager
    def wrap_call(
        self, tuned: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[None]:
        metadata = metadata_of_call(tuned, args, kwargs)
        # torch writes "unknown" for a name that is not ASCII, and does not escape a quote.
        title = trace.call_title(metadata).encode("ascii", "replace").decode().replace('"', "?")
        name = f"{title} #{len(self.calls)}"
        self.calls[name] = metadata
        num_tunings_before = tuned.num_tunings
        with ExitStack() as scopes:
            scopes.enter_context(self._nvtx_range(title))
            numbers = {key: value for key, value in metadata.items() if key in _WORK_KEYS}
            scopes.enter_context(self._make_scope(name, numbers))
            scopes.enter_context(self._make_marking())
            try:
                yield
            finally:
                metadata["tuned"] = tuned.num_tunings > num_tunings_before


def metadata_of_call(tuned: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallMetadata:
    """Return name, shape, FLOPs, bytes and time limits of a call, from the op's OpInfo. Return only
    the name if the function has no OpInfo, or if the arguments are invalid."""
    info = _opinfos().get(id(tuned))
    if info is None:
        return {"op": tuned.__name__}
    try:
        shape, num_ranks, cost = info.cost_of(*args, **kwargs)
    except Exception:  # invalid arguments: the op itself raises an error
        return {"op": info.name}
    return {
        "op": info.name,
        "shape": str(shape),
        "dtype": str(cost.dtype).removeprefix("torch."),
        "num_ranks": num_ranks,
        "flops": cost.flops,
        "bytes": cost.memory_bytes,
        "link_bytes": cost.link_bytes,
        "bounds_ms": dict(cost.bounds_ms(device_peak())),
        "limit_ms": cost.limit_ms(device_peak()),
    }


@functools.cache
def _opinfos() -> dict[int, Any]:
    # Imported here because it loads all ops.
    from triton_dist.testing.opinfo import OPINFOS

    return {id(info.op): info for info in OPINFOS.values()}


CallWrapper: TypeAlias = Callable[
    [AutoTuner[..., Any], tuple[Any, ...], dict[str, Any]], AbstractContextManager[None]
]
"""Function of a tuned function and a call's arguments. Returns a context manager for the call."""


@contextmanager
def wrap_calls(wrapper: CallWrapper) -> Iterator[None]:
    """Context manager in which each call of a tuned function is made inside ``wrapper(...)``.

    This affects all tuned functions of the process, except for calls in code that torch compiles.
    ``AutoTuner.__call__`` is replaced while the context is active, so other calls have no overhead.
    """
    original_call: Any = AutoTuner.__call__

    def call(self: AutoTuner[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._is_compiled():
            return original_call(self, *args, **kwargs)
        with wrapper(self, args, {key: kwargs[key] for key in kwargs if key not in CALL_KEYWORDS}):
            return original_call(self, *args, **kwargs)

    register_entry_points([call])
    AutoTuner.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        AutoTuner.__call__ = original_call  # type: ignore[method-assign]


@contextmanager
def proton_recording(file: Path) -> Iterator[None]:
    """Context manager that records its body into ``file`` with Proton, Triton's GPU profiler."""
    device = current_device()
    if device.name != "cuda":
        expected = "'torch' on CPU ranks: Proton only times GPU kernels"
        raise InvalidArgument("group_profile", "tool", "proton", expected)
    import triton.profiler as proton

    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        session = proton.start(str(file.with_suffix("")), data="tree")
    except RuntimeError as error:
        remedy = (
            "The driver supports one profiler per process, and torch's profiler stays registered "
            "after use: record with Proton in a process that uses no other profiler."
        )
        raise DeviceUnavailable(device.name, f"Proton failed: {error}", remedy) from error
    scopes = Scopes(
        lambda name, numbers: proton.scope(name.rpartition(" #")[0], numbers),
        nvtx_range=False,  # Proton would record each NVTX range as a second scope
    )
    try:
        with scopes.on():
            yield
        device.synchronize()
    finally:
        proton.finalize(session)


def merge(files: Sequence[tuple[int, Path]], merged: Path) -> None:
    """Merge Proton's trees of all ranks into one tree, in which each rank is a child of the root.
    Metadata of devices is taken from the first rank."""
    children: list[Any] = []
    devices: Any = {}
    for rank, file in files:
        root, *rest = json.loads(file.read_text(encoding="utf-8"))
        children.append({**root, "frame": {"name": f"rank {rank}", "type": "function"}})
        devices = devices or (rest[0] if rest else {})
    top = {"frame": {"name": "ROOT", "type": "function"}, "metrics": {}, "children": children}
    _files.write(merged, json.dumps([top, devices]).encode())
