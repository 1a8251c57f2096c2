"""The journal of a tuning on disk: what is written is there, what was cut off is passed over."""

from __future__ import annotations

import errno
import os
import threading
import time

import pytest

from triton_dist._tuning.store import FileJournal, journal
from triton_dist._tuning.values import Entry, Failure, Measurement

HEAD = {"function": "op", "candidates": ["a", "b", "c"]}
OTHER = {"function": "op", "candidates": ["a"]}
STUCK = Failure("timeout", "rank 1 is stuck", 1)


def entry(n, config="a", outcome=None):
    return Entry(n, config, 4, outcome or Measurement((1.0 + n, 2.0), 1, "maximum"), 0.25)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "key.journal"


def begun(path, head=HEAD, record=None):
    """A journal as the next start of the leader opens it, and what it is told."""
    opened = FileJournal(path)
    return opened, opened.begin(head, record)


def write(path, *entries, head=HEAD):
    opened, _ = begun(path, head)
    for each in entries:
        opened.append(each)
    opened.close()


def entries(path, head=HEAD, record=None):
    opened, known = begun(path, head, record)
    opened.close()
    return list(known)


def test_a_new_journal_is_empty_and_its_folder_is_made(path):
    assert entries(path) == []
    assert path.exists()


def test_what_was_appended_is_told_to_the_next_start(path):
    written = [entry(0), entry(1, "b", STUCK), entry(2, "a")]
    write(path, *written)
    assert entries(path) == written
    assert entries(path) == written


def test_each_line_is_written_before_append_returns_and_on_the_disk_at_the_end(path, monkeypatch):
    synced = []

    def slow(file):
        written = path.read_bytes().count(b'"n"')
        time.sleep(0.05)
        synced.append(written)

    monkeypatch.setattr(os, "fsync", slow)
    journal = FileJournal(path)
    journal.begin(HEAD, None)
    for n in range(3):
        journal.append(entry(n))
        assert path.read_bytes().count(b'"n"') == n + 1
    journal.close()
    assert synced[0] == 0
    assert synced[-1] == 3
    assert not any("journal" in thread.name for thread in threading.enumerate())


@pytest.mark.parametrize("keep", [1, 20, -5, -1])
def test_a_line_that_was_cut_off_is_passed_over(path, keep):
    write(path, entry(0))
    whole = path.read_bytes()
    write(path, entry(1))
    added = path.read_bytes()[len(whole) :]
    path.write_bytes(whole + added[:keep])
    assert entries(path) == [entry(0), entry(1)][: 2 if keep == -1 else 1]
    write(path, entry(1, "c"))
    assert entries(path) == [entry(0), entry(1, "c")]


def test_a_cut_off_head_begins_anew(path):
    write(path, entry(0))
    path.write_bytes(path.read_bytes()[:20])
    assert entries(path) == []
    write(path, entry(0))
    assert entries(path) == [entry(0)]


@pytest.mark.parametrize("junk", [b"\xff\xfe\n", b"[1, 2]\n", b'{"n": 1}\n', b"[" * 100_000])
def test_what_is_no_entry_is_passed_over(path, junk):
    write(path, entry(0))
    with open(path, "ab") as file:
        file.write(b"\n" + junk)
    write(path, entry(1))
    assert entries(path) == [entry(0), entry(1)]


def test_an_entry_that_comes_again_replaces_what_followed(path):
    write(path, entry(0), entry(1, "b"), entry(2))
    write(path, entry(1, "c"))
    assert entries(path) == [entry(0), entry(1, "c")]


def test_after_a_gap_nothing_is_believed(path):
    write(path, entry(0), entry(2))
    assert entries(path) == [entry(0)]


def test_another_head_begins_anew(path):
    write(path, entry(0))
    assert entries(path, OTHER) == []
    assert entries(path) == []


def test_a_finished_journal_is_gone_on_with_only_until_its_record_is_there(path):
    opened, _ = begun(path)
    opened.append(entry(0))
    opened.finish("1234")
    opened.close()
    assert entries(path, record=None) == [entry(0)]
    assert entries(path, record="5678") == [entry(0)]
    assert entries(path, record="1234") == []


def test_any_rank_may_quarantine_while_another_leads(path):
    leader, _ = begun(path)
    leader.append(entry(0))
    assert FileJournal(path).quarantine(HEAD, "b", STUCK)
    leader.append(entry(1))
    leader.close()
    assert entries(path) == [entry(0), entry(1)]
    assert FileJournal(path).quarantined(HEAD) == {"b": STUCK}
    assert FileJournal(path).quarantined(OTHER) == {}


def test_a_quarantine_outlives_another_tunings_head_but_not_in_its_name(path):
    assert FileJournal(path).quarantine(HEAD, "b", STUCK)
    assert entries(path) == []
    assert FileJournal(path).quarantined(HEAD) == {"b": STUCK}
    entries(path, OTHER)
    assert FileJournal(path).quarantined(HEAD) == {}


def test_a_second_job_tunes_without_a_journal_and_disturbs_nothing(path):
    first, _ = begun(path)
    first.append(entry(0))
    second, known = begun(path)
    assert known == []
    second.append(entry(0, "c"))
    second.remove()
    first.append(entry(1))
    first.close()
    assert entries(path) == [entry(0), entry(1)]


def test_a_child_of_a_fork_does_not_lead(path):
    """It may outlive its parent, as a worker of a data loader does."""
    (journal, _), (reads, writes), (awaits, says) = begun(path), os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writes)
        os.write(says, b"!")
        os.read(reads, 1)  # until the parent is done
        os._exit(0)
    os.read(awaits, 1)  # it runs
    journal.append(entry(0))
    journal.close()
    assert entries(path) == [entry(0)], "the lock is free, though the child lives"
    os.close(writes)
    os.waitpid(child, 0)


def test_a_follower_removes_its_own_file_and_never_a_leaders(path):
    write(path, entry(0))
    FileJournal(path).remove()
    assert entries(path) == [entry(0)]
    own = path.with_name("own.journal")
    FileJournal(own).quarantine(HEAD, "b", STUCK)
    FileJournal(own).remove()
    assert not own.exists()


def test_the_leader_removes_it(path):
    opened, _ = begun(path)
    opened.remove()
    assert not path.exists()
    assert entries(path) == []


def refuses(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_full_from_the_beginning_keeps_nothing_and_raises_nothing(path, monkeypatch):
    monkeypatch.setattr(os, "open", refuses)
    opened, known = begun(path)
    assert known == []
    opened.append(entry(0))
    opened.finish("1234")
    opened.remove()
    assert not opened.quarantine(HEAD, "b", STUCK)
    assert opened.quarantined(HEAD) == {}


def test_a_disk_that_fills_up_keeps_what_was_before(path, monkeypatch):
    opened, _ = begun(path)
    opened.append(entry(0))
    with monkeypatch.context() as full:
        full.setattr(journal, "_write", refuses)
        opened.append(entry(1))
    opened.append(entry(2))
    opened.close()
    assert entries(path) == [entry(0)]


def test_a_line_that_the_disk_takes_half_is_the_last(path, monkeypatch):
    opened, _ = begun(path)
    write_all = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, data: write_all(file, data[: len(data) // 2]))
        opened.append(entry(0))
    opened.append(entry(1))
    opened.close()
    assert entries(path) == []


def started(path, *lines):
    """A start of the leader that ends without a word after these."""
    opened, known = begun(path)
    for line in lines:
        line(opened)
    opened.close()
    return known


def tries(config):
    return lambda opened: opened.trying(config)


def learns(n, config):
    return lambda opened: opened.append(entry(n, config))


def spares(config):
    return lambda opened: opened.spared(config)


def test_a_config_that_ended_two_starts_is_not_tried_again(path):
    started(path, tries("a"), learns(0, "a"), tries("b"))
    assert FileJournal(path).quarantined(HEAD) == {}
    assert len(started(path, tries("b"))) == 1
    (config, failure), *others = FileJournal(path).quarantined(HEAD).items()
    assert (config, failure.kind, others) == ("b", "crashed", [])
    assert FileJournal(path).quarantined(OTHER) == {}


@pytest.mark.parametrize("end", [learns(0, "a"), spares("a")])
def test_a_config_that_came_to_its_end_or_did_not_end_the_process_is_not_blamed(path, end):
    started(path, tries("a"), end)
    started(path, tries("a"))
    assert FileJournal(path).quarantined(HEAD) == {}
