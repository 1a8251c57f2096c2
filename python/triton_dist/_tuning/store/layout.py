"""JSON that a person reads: what fits on one line is on one line. And records in it, which are
looked up without reading thousands of trials."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from triton_dist._tuning.values import TuningRecord, codec
from triton_dist._tuning.values.outcome import UNREADABLE

_INDENT = 2
_TRIALS, _END = b'\n  "trials": [\n', b"\n  ],\n"
_TRIAL = b"\n    {"
_WHOLE = '  "whole": '


def record_text(record: TuningRecord) -> str:
    """The content of the file of ``record``.

    Its last line, ``whole``, is a hash of the trials' text with the winner's digest: who finds it
    right knows that the winner is the winner, and need not look at each trial.
    """
    text = readable_json(record.to_tree())
    trials = _trials(text.encode())
    if trials is None:
        return text
    whole = _hash(trials[1], record.best.digest)
    return text.removesuffix("\n}\n") + f',\n{_WHOLE}"{whole}"\n}}\n'


def read_record(content: bytes) -> TuningRecord:
    """The record in ``content``.

    Raises:
        NewerSchema: it is of a later version of triton_dist.
        ValueError: it is no record, or a damaged one.
    """
    cut = _trials(content)
    if cut is not None:
        tree = codec.loads(cut[0])
        best = _winner(tree, cut[1])
        if best is not None:
            return TuningRecord.unread(tree, best, cut[1])
    return TuningRecord.from_tree(codec.loads(content))


def _trials(content: bytes) -> tuple[bytes, bytes] | None:
    """The text without its trials, and these; ``None`` if it is not laid out as it is here."""
    begin = content.find(_TRIALS)
    end = content.find(_END, begin)
    if not 0 <= begin < end:
        return None
    rest = content[:begin] + b'\n  "trials": [],\n' + content[end + len(_END) :]
    return rest, b"[\n" + content[begin + len(_TRIALS) : end] + b"\n]"


def _winner(tree: Any, trials: bytes) -> Any:
    """The tree of the winner's trial; ``None`` if the hash is not there, or not right."""
    try:
        digest, whole = str(tree["best"]["digest"]), tree["whole"]
    except UNREADABLE:
        return None
    if whole != _hash(trials, digest):
        return None
    at = trials.index(f'"digest": "{digest}"'.encode())
    begin, end = trials.rfind(_TRIAL, 0, at), trials.find(_TRIAL, at)
    text = trials[begin : end if end > 0 else -1]
    return codec.loads(text.strip().rstrip(b","))


def _hash(trials: bytes, digest: str) -> str:
    return hashlib.sha256(trials + digest.encode()).hexdigest()[:32]


def readable_json(tree: Any, width: int = 100) -> str:
    """``tree`` as JSON with lines of at most ``width`` columns where a string allows it, newline at
    the end."""
    return _lines(tree, 0, 0, width) + "\n"


def _lines(tree: Any, depth: int, before: int, width: int) -> str:
    """``tree`` whose first line has ``before`` columns in front of it."""
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
