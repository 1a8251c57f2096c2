"""Open a profiler scope around each call of a tuned function, and record the call's work."""

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

Facts: TypeAlias = dict[str, Any]
"""Plain text and numbers about a call, by name."""
MakeScope: TypeAlias = Callable[[str, Facts], AbstractContextManager[object]]
"""Return a profiler scope, given its name and facts."""
MakeMarking: TypeAlias = Callable[[], AbstractContextManager[object]]
"""Return the context manager for a call whose kernels make marks."""
_NUMBERS = ("flops", "bytes", "link_bytes")


class Scopes:
    """Calls of tuned functions, each in a scope.

    Attributes:
        calls: facts of each call, by scope name: ``<op> <shape> #<number>``. A call without an
            OpInfo only has the function's name.

    Args:
        nvtx_range: also open NVTX ranges, which other profilers read.
    """

    def __init__(
        self,
        make_scope: MakeScope,
        make_marking: MakeMarking = nullcontext,
        nvtx_range: bool = True,
    ) -> None:
        self.calls: dict[str, Facts] = {}
        self._make_scope, self._make_marking = make_scope, make_marking
        self._nvtx_range = current_device().nvtx_range if nvtx_range else nullcontext
        # Import all ops and query the driver now instead of in the first call.
        _opinfos()
        device_peak()

    def on(self) -> AbstractContextManager[None]:
        """Context manager in which calls open scopes."""
        return wrapped_calls(self.around)

    @contextmanager
    def around(self, tuned: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        facts = facts_of(tuned, args, kwargs)
        # torch writes "unknown" for a name that is not ASCII, and does not escape a quote.
        title = trace.title_of(facts).encode("ascii", "replace").decode().replace('"', "?")
        name = f"{title} #{len(self.calls)}"
        self.calls[name] = facts
        before = tuned.tuning_count
        with ExitStack() as scopes:
            scopes.enter_context(self._nvtx_range(title))
            numbers = {key: value for key, value in facts.items() if key in _NUMBERS}
            scopes.enter_context(self._make_scope(name, numbers))
            scopes.enter_context(self._make_marking())
            try:
                yield
            finally:
                facts["tuned"] = tuned.tuning_count > before


def facts_of(tuned: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Facts:
    """Return the work of a call according to the op's OpInfo.

    Without an OpInfo, or if the arguments are invalid, return only the name.
    """
    info = _opinfos().get(id(tuned))
    if info is None:
        return {"op": tuned.__name__}
    try:
        shape, num_ranks, cost = info.cost_of(*args, **kwargs)
    except Exception:  # invalid arguments: the op itself raises a better error
        return {"op": info.name}
    bounds = cost.bounds_ms(device_peak())
    return {
        "op": info.name,
        "shape": str(shape),
        "dtype": str(cost.dtype).removeprefix("torch."),
        "num_ranks": num_ranks,
        "flops": cost.flops,
        "bytes": cost.memory_bytes,
        "link_bytes": cost.link_bytes,
        "bounds_ms": dict(bounds),
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
"""Receives a tuned function and the arguments of a call. Returns a context manager in which the
call is made."""


@contextmanager
def wrapped_calls(wrapper: CallWrapper) -> Iterator[None]:
    """Context manager in which each call of a tuned function is made inside ``wrapper(...)``.

    This includes all tuned functions of the process, except calls in code that torch compiles.
    Inside the context, ``AutoTuner.__call__`` is replaced. Calls outside have no overhead.
    """
    before: Any = AutoTuner.__call__

    def call(self: AutoTuner[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._is_compiled():
            return before(self, *args, **kwargs)
        with wrapper(
            self, args, {name: kwargs[name] for name in kwargs if name not in CALL_KEYWORDS}
        ):
            return before(self, *args, **kwargs)

    register_entry_points([call])
    AutoTuner.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        AutoTuner.__call__ = before  # type: ignore[method-assign]


@contextmanager
def proton_recording(file: Path) -> Iterator[None]:
    """Context manager that records the region into ``file`` with Proton, on GPUs only."""
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
            "The driver serves one profiler per process, and torch's profiler stays registered "
            "after use: record with Proton in a process that uses no other profiler."
        )
        raise DeviceUnavailable(device.name, f"Proton failed: {error}", remedy) from error
    scopes = Scopes(
        lambda name, numbers: proton.scope(name.rpartition(" #")[0], numbers),
        nvtx_range=False,  # Proton turns NVTX ranges into scopes, which would duplicate each call
    )
    try:
        with scopes.on():
            yield
        device.synchronize()
    finally:
        proton.finalize(session)


def merge(files: Sequence[tuple[int, Path]], merged: Path) -> None:
    """Merge the ranks' trees: each rank is a child of the root; devices are the first rank's."""
    children: list[Any] = []
    devices: Any = {}
    for rank, file in files:
        root, *rest = json.loads(file.read_text(encoding="utf-8"))
        named = {"name": f"rank {rank}", "type": "function"}
        children.append({**root, "frame": named})
        devices = devices or (rest[0] if rest else {})
    top = {"frame": {"name": "ROOT", "type": "function"}, "metrics": {}, "children": children}
    _files.write(merged, json.dumps([top, devices]).encode())
