"""Links of this host to others, as the system lists them."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import torch

_SYSTEM = Path("/sys/class")


def get_nic_gbps_per_gpu(system: Path = _SYSTEM) -> float:
    """Bandwidth to other hosts for each GPU of this one, one direction, in GB/s.

    The fastest adapters count, InfiniBand ones if there are any, and are shared evenly. 0.0 where
    the system tells no speed. ``system``: where it lists them.
    """
    rates = _infiniband(system / "infiniband") or _ethernet(system / "net")
    fastest = [rate for rate in rates if rate == max(rates)]
    return sum(fastest) / 8 / max(1, torch.cuda.device_count())


def _infiniband(folder: Path) -> list[float]:
    """Gbit/s of each port, written as ``400 Gb/sec (4X NDR)``."""
    found = (re.match(r"[\d.]+", _text(file)) for file in folder.glob("*/ports/*/rate"))
    return [float(rate.group()) for rate in found if rate is not None]


def _ethernet(folder: Path) -> list[float]:
    """Gbit/s of each adapter that is hardware, written in Mbit/s; -1 if it is down."""
    adapters = (path.parent for path in folder.glob("*/device"))
    speeds = (_text(adapter / "speed") for adapter in adapters)
    return [int(speed) / 1e3 for speed in speeds if speed.isdigit()]


def _text(file: Path) -> str:
    with suppress(OSError):  # an adapter that is down may refuse to tell
        return file.read_text().strip()
    return ""
