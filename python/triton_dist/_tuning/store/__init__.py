"""Store tuning records, journals and logs: in memory, in folders, and in packs."""

from triton_dist._tuning.store.file import FileStore
from triton_dist._tuning.store.inventory import (
    Interrupted,
    foreign,
    interrupted,
    is_in_use,
    places,
    removable,
)
from triton_dist._tuning.store.journal import FileJournal
from triton_dist._tuning.store.layered import LayeredStore, MemoryStore
from triton_dist._tuning.store.log import FileLog, StepLog, last_line_by_rank, tunings_in_log
from triton_dist._tuning.store.packs import PackStore
from triton_dist._tuning.store.readonly import ReadOnlyStore
from triton_dist._tuning.store.remote import (
    RemoteStore,
    configured_remote,
    entry_name,
    without_secrets,
)
