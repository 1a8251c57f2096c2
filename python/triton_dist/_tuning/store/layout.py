"""Read and write records as readable JSON, in which values are kept on one line if they fit.

A look-up does not parse the thousands of trials of a record. It finds and skips their lines.
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
_NAME = re.compile(r"[0-9a-f]{32}(-[^.]*)?\..*")


def is_ours(name: str) -> bool:
    """Return whether a file is a record, or is next to it: digest of the key, place, and suffix.

    Triton-distributed keeps its files, with names of 64 hexadecimal digits, in the same folders.
    """
    return _NAME.fullmatch(name) is not None


def record_text(record: TuningRecord) -> str:
    """Return the content of the file of ``record``."""
    return with_checksum(record.to_tree())


def with_checksum(tree: codec.Tree) -> str:
    """Return the tree of a record as the text of its file, with a checksum in the last line."""
    text = readable_json({name: part for name, part in tree.items() if name != "checksum"})
    return f'{text[:-3]}{_CHECKSUM.decode()}{_hash(text.encode())}"\n}}\n'


def read_record(content: bytes) -> TuningRecord:
    """Return the record in ``content``. If the layout is unchanged, trials are parsed on demand.

    Raises:
        NewerSchema: a later version of triton_dist wrote the record.
        ValueError: ``content`` is not a record, or was damaged or edited.
    """
    text, mark, checksum = content.rpartition(_CHECKSUM)
    text += b"\n}\n"
    is_whole = bool(mark) and checksum == _hash(text).encode() + b'"\n}\n'
    cut = _trials(text) if is_whole else None
    if cut is not None:
        tree = codec.loads(cut[0])
        return TuningRecord.from_tree(tree, _winner(tree, cut[1]), cut[1])
    tree = codec.loads(content)
    if not _is_as_written(tree):
        raise ValueError("its checksum does not match: it was edited or is damaged")
    return TuningRecord.from_tree(tree)


def _is_as_written(tree: Any) -> bool:
    """Return whether the checksum is right. It does not depend on the layout.

    Records before schema 4 have no checksum.
    """
    if not isinstance(tree, dict) or tree.get("schema") not in range(1, SCHEMA + 1):
        return True  # the reader raises a specific error
    known = tree.pop("checksum", None)
    if known is None and tree["schema"] < SCHEMA:
        return True
    try:
        return bool(known == _hash(readable_json(tree).encode()))
    except RecursionError:
        return False


def _trials(content: bytes) -> tuple[bytes, bytes] | None:
    """Return the text without trials, and the text of the trials; ``None`` for other layouts."""
    begin = content.find(_TRIALS_BEGIN)
    end = content.find(_TRIALS_END, begin)
    if not 0 <= begin < end:
        return None
    rest = content[:begin] + b'\n  "trials": [],\n' + content[end + len(_TRIALS_END) :]
    return rest, b"[\n" + content[begin + len(_TRIALS_BEGIN) : end] + b"\n]"


def _winner(tree: Any, trials: bytes) -> Any:
    """Return the tree of the winning trial. Raises ``ValueError``."""
    try:
        digest = str(tree["best"]["digest"])
    except UNREADABLE as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    at = trials.index(f'"digest": "{digest}"'.encode())
    begin, end = trials.rfind(_TRIAL_BEGIN, 0, at), trials.find(_TRIAL_BEGIN, at)
    text = trials[begin : end if end > 0 else -1]
    return codec.loads(text.strip().rstrip(b","))


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:32]


def readable_json(tree: Any, width: int = 100) -> str:
    """Return ``tree`` as JSON that ends with a newline.

    Lines have at most ``width`` columns, unless a string is longer.
    """
    return _lines(tree, 0, 0, width) + "\n"


def _lines(tree: Any, depth: int, before: int, width: int) -> str:
    """Return ``tree`` as JSON for a position with ``before`` columns in front of the first line."""
    flat = json.dumps(tree, allow_nan=False)
    if not isinstance(tree, (dict, list)) or not tree or before + len(flat) < width:
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
