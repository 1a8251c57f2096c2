"""Convert records to and from readable JSON text.

A list or object is on one line if it fits. A record may have thousands of trials: reading a record
finds their lines without parsing them.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from triton_dist._tuning.values import SCHEMA, TuningRecord, codec
from triton_dist._tuning.values.outcome import UNREADABLE

_INDENT = 2
_TRIALS_BEGIN, _TRIALS_END = b'\n  "trials": [\n', b"\n  ],\n"
_TRIAL_BEGIN = b"\n    {"
_CHECKSUM = b',\n  "checksum": "'
_FILE_NAME = re.compile(r"[0-9a-f]{32}(-[^.]*)?\..*")


def is_tuner_file(name: str) -> bool:
    """Return whether ``name`` is the file name of a record, or of its journal or log.

    Triton-distributed keeps its files, with names of 64 hexadecimal digits, in the same folders.
    """
    return _FILE_NAME.fullmatch(name) is not None


def record_text(record: TuningRecord) -> str:
    """Return the content of the file of ``record``."""
    return with_checksum(record.to_tree())


def with_checksum(tree: codec.Tree) -> str:
    """Return the text of the file with the record ``tree``. The last entry is a checksum."""
    text = readable_json({name: part for name, part in tree.items() if name != "checksum"})
    return f'{text[:-3]}{_CHECKSUM.decode()}{_hash(text.encode())}"\n}}\n'


def read_record(content: bytes) -> TuningRecord:
    """Return the record in ``content``, the bytes of a file.

    The trials are parsed at first use, unless another program changed the layout of the file.

    Raises:
        NewerSchema: a later version of triton_dist wrote the record.
        ValueError: ``content`` is not a record, or was damaged or edited.
    """
    text, separator, checksum = content.rpartition(_CHECKSUM)
    text += b"\n}\n"
    is_unchanged = bool(separator) and checksum == _hash(text).encode() + b'"\n}\n'
    split = _split_trials(text) if is_unchanged else None
    if split is not None:
        text_without_trials, trials_json = split
        tree = codec.loads(text_without_trials)
        return TuningRecord.from_tree(tree, _winning_trial(tree, trials_json), trials_json)
    tree = codec.loads(content)
    if not _matches_checksum(tree):
        raise ValueError("its checksum does not match: it was edited or is damaged")
    return TuningRecord.from_tree(tree)


def _matches_checksum(tree: Any) -> bool:
    """Return whether the checksum is right or, as in records before schema 4, missing."""
    if not isinstance(tree, dict) or tree.get("schema") not in range(1, SCHEMA + 1):
        return True  # the reader raises a specific error
    recorded = tree.pop("checksum", None)
    if recorded is None and tree["schema"] < SCHEMA:
        return True
    try:
        return bool(recorded == _hash(readable_json(tree).encode()))
    except RecursionError:
        return False


def _split_trials(content: bytes) -> tuple[bytes, bytes] | None:
    """Return the text without trials and the text of the trials; ``None`` if they are not found."""
    begin = content.find(_TRIALS_BEGIN)
    end = content.find(_TRIALS_END, begin)
    if not 0 <= begin < end:
        return None
    rest = content[:begin] + b'\n  "trials": [],\n' + content[end + len(_TRIALS_END) :]
    return rest, b"[\n" + content[begin + len(_TRIALS_BEGIN) : end] + b"\n]"


def _winning_trial(tree: Any, trials: bytes) -> Any:
    """Return the tree of the winning trial. Raise ``ValueError`` if ``trials`` do not have it."""
    try:
        digest = str(tree["best"]["digest"])
    except UNREADABLE as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    offset = trials.index(f'"digest": "{digest}"'.encode())
    begin, end = trials.rfind(_TRIAL_BEGIN, 0, offset), trials.find(_TRIAL_BEGIN, offset)
    text = trials[begin : end if end > 0 else -1]
    return codec.loads(text.strip().rstrip(b","))


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:32]


def readable_json(tree: Any, width: int = 100) -> str:
    """Return ``tree`` as JSON that ends with a newline.

    Lines have at most ``width`` columns, unless a string is longer.
    """
    return _lines(tree, 0, 0, width) + "\n"


def _lines(tree: Any, depth: int, column: int, width: int) -> str:
    """Return ``tree`` as JSON text.

    Args:
        depth: number of columns by which the last line is indented.
        column: column at which the first line starts.
    """
    flat = json.dumps(tree, allow_nan=False)
    if not isinstance(tree, (dict, list)) or not tree or column + len(flat) < width:
        return flat
    indent = " " * (depth + _INDENT)
    if isinstance(tree, list):
        items = [_lines(item, depth + _INDENT, len(indent), width) for item in tree]
        opening, closing = "[", "]"
    else:
        names = [f"{json.dumps(name)}: " for name in tree]
        items = [
            name + _lines(item, depth + _INDENT, len(indent) + len(name), width)
            for name, item in zip(names, tree.values(), strict=True)
        ]
        opening, closing = "{", "}"
    return (
        opening + "\n" + ",\n".join(indent + item for item in items) + "\n" + " " * depth + closing
    )
