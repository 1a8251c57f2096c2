"""Store tuning records in memory, folders, packs and a remote store; journals and logs in files."""

from triton_dist._tuning.store.file import FileStore
from triton_dist._tuning.store.inventory import (
    InterruptedTuning,
    foreign_files,
    interrupted_tunings,
    is_in_use,
    record_stems,
    removable_files,
)
from triton_dist._tuning.store.journal import FileJournal
from triton_dist._tuning.store.layered import LayeredStore, MemoryStore
from triton_dist._tuning.store.log import (
    FileLog,
    StepLog,
    finished_tunings_in_log,
    last_line_by_rank,
)
from triton_dist._tuning.store.packs import PackStore
from triton_dist._tuning.store.readonly import ReadOnlyStore
from triton_dist._tuning.store.remote import (
    RemoteStore,
    configured_remote,
    entry_name,
    without_secrets,
)
