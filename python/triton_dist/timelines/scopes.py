"""Scopes of a profiler around calls of tuned functions, and what each call had to do."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

from triton_dist import _files
from triton_dist._tuning.engine.dispatch import observed
from triton_dist.errors import DeviceUnavailable, InvalidArgument
from triton_dist.runtime.device import current_device
from triton_dist.runtime.peaks import device_peak
from triton_dist.timelines import trace

Facts: TypeAlias = dict[str, Any]
"""Plain text and numbers about a call, by name."""
Opened: TypeAlias = Callable[[str, Facts], AbstractContextManager[object]]
"""Makes of a scope's name and numbers the scope of a profiler."""
Marked: TypeAlias = Callable[[], AbstractContextManager[object]]
"""Makes what is entered around a call whose kernels make marks."""
_NUMBERS = ("flops", "bytes", "link_bytes")


class Scopes:
    """Calls of tuned functions, each in a scope.

    Attributes:
        calls: facts of each call, by the name of its scope: ``<op> <shape> #<number>``. Those of
            calls without an OpInfo have the function alone.

    Args:
        ranged: also show them as ranges of NVTX, which other profilers read.
    """

    def __init__(self, opened: Opened, marked: Marked = nullcontext, ranged: bool = True) -> None:
        self.calls: dict[str, Facts] = {}
        self._opened, self._marked = opened, marked
        self._ranged = current_device().ranged if ranged else nullcontext
        # Load all ops and ask the driver now, not in the first call.
        _opinfos()
        device_peak()

    def on(self) -> AbstractContextManager[None]:
        """Region in which calls are put into scopes."""
        return observed(self.around)

    @contextmanager
    def around(self, tuned: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        facts = facts_of(tuned, args, kwargs)
        # torch writes "unknown" for a name that is not ASCII, and does not escape a quote.
        title = trace.title_of(facts).encode("ascii", "replace").decode().replace('"', "?")
        name = f"{title} #{len(self.calls)}"
        self.calls[name] = facts
        before = tuned.tuning_count
        with ExitStack() as scopes:
            scopes.enter_context(self._ranged(title))
            numbers = {key: value for key, value in facts.items() if key in _NUMBERS}
            scopes.enter_context(self._opened(name, numbers))
            scopes.enter_context(self._marked())
            try:
                yield
            finally:
                facts["tuned"] = tuned.tuning_count > before


def facts_of(tuned: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Facts:
    """Work of a call, by the op's OpInfo; without one, or for a call that the op is about to
    refuse, the name alone."""
    info = _opinfos().get(id(tuned))
    if info is None:
        return {"op": tuned.__name__}
    try:
        shape, num_ranks, cost = info.cost_of(*args, **kwargs)
    except Exception:  # the op says better what is wrong with the arguments
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
    # Here, so that what imports this starts without all ops.
    from triton_dist.testing.opinfo import OPINFOS

    return {id(info.op): info for info in OPINFOS.values()}


@contextmanager
def recorded(file: Path) -> Iterator[None]:
    """Record the region into ``file``.

    Raises:
        InvalidArgument: this process has no GPU, whose kernels are all that Proton times.
        DeviceUnavailable: the driver serves another profiler of this process.
    """
    device = current_device()
    if device.name != "cuda":
        expected = "'torch' on CPU ranks: Proton times kernels of GPUs alone"
        raise InvalidArgument("group_profile", "tool", "proton", expected)
    import triton.profiler as proton

    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        session = proton.start(str(file.with_suffix("")), data="tree")
    except RuntimeError as error:
        remedy = (
            "The driver serves one profiler in a process, and torch's keeps its place once it was "
            "used: record with Proton in a process that uses no other."
        )
        raise DeviceUnavailable(device.name, f"Proton says: {error}", remedy) from error
    scopes = Scopes(
        lambda name, numbers: proton.scope(name.rpartition(" #")[0], numbers),
        ranged=False,  # Proton takes ranges of NVTX for scopes: each call would be in one of both
    )
    try:
        with scopes.on():
            yield
        device.synchronize()
    finally:
        proton.finalize(session)


def merge(files: Sequence[tuple[int, Path]], merged: Path) -> None:
    """One tree: each rank is a child of its root; devices are those of the first rank."""
    children: list[Any] = []
    devices: Any = {}
    for rank, file in files:
        root, *rest = json.loads(file.read_text(encoding="utf-8"))
        named = {"name": f"rank {rank}", "type": "function"}
        children.append({**root, "frame": named})
        devices = devices or (rest[0] if rest else {})
    top = {"frame": {"name": "ROOT", "type": "function"}, "metrics": {}, "children": children}
    _files.write(merged, json.dumps([top, devices]).encode())
