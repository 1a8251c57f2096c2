"""Recording with Triton's own profiler: a tree of scopes and kernels, with the work of each op."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from triton_dist import _files
from triton_dist.errors import DeviceUnavailable, InvalidArgument
from triton_dist.runtime.device import current_device
from triton_dist.timelines.scopes import Scopes


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
