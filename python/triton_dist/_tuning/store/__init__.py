"""Where tuning records are kept."""

from triton_dist._tuning.store.file import FileStore
from triton_dist._tuning.store.layered import LayeredStore
from triton_dist._tuning.store.memory import MemoryStore

__all__ = ["FileStore", "LayeredStore", "MemoryStore"]
