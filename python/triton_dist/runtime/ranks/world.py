"""The world as it is now, for who keeps what was agreed in it."""

from __future__ import annotations

import torch.distributed as dist


def current_world() -> object:
    """An object that is another one after ``init_process_group`` and ``destroy_process_group``."""
    return dist.group.WORLD
