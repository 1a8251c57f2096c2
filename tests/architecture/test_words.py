"""Find replaced names and phrases, and state what to write instead."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

from scripts.sentences import GROUPS, lengths

ROOT = Path(__file__).resolve().parents[2]

NAMES = {
    "algorithm": "way ways Way Ways WAYS AskedWay SumWay SummingWay way_of",
    "library": "vendor vendors VendorMethod",
    "OpInfo": "Case bad_calls sample_keys",
    "candidate set": "field_of",
    "channel, agreement": "Conversation converse Meeting Arrival Situation",
    "warm start": "Transfer transfer_ms carried",
    "size table, latency curve": "times_of",
    "round": "lap laps LAPS LEAST_LAPS",
    "unstable constant": "Restless restless",
    "input variants": "vary_fn vary",
    "fallback": "safe_fn safe_kind is_safe",
    "tuning lock": "Gate gate_of",
    "alternate": "take_turns takes_turns",
    "workaround": "mend mends Mend MENDS",
    "validator": "judge judges Judge",
    "timeout word": "guard_of guard_ptr Guard GUARD",
    "fits": "suits suits_gemm suits_grouped suits_sum",
    "subcommand": "verb verbs add_verb VERBS",
    "chunk": "num_pieces NUM_PIECES MAX_PIECES flag_of_piece slab slabs slab_rows",
    "split": "part_of_unit num_parts",
}  # fmt: skip
"""Old identifiers by the word that replaced them."""

PHRASES = {
    r"\b(that|those) of\b": "repeat the noun",
    r"\bsuch (a )?ones?\b|\bnone such\b": "repeat the noun",
    r"\b(?<!there )(?<!which )(is|are|was|were) none\b": "negate with not",
    r"\bno multiples? of\b": "not a multiple of",
    r"\bnobody(?:'s)?\b|\bwhoever\b|\bwhom\b": "name the rank, padding or caller",
    r"(?<!reader )(?<!readers )(?<!user )(?<!users )(?<!people )(?<!engineers )(?<!anyone )"
    r"(?<!someone )(?<!caller )(?<!reviewer )(?<!persons to )\bwho\b": "that, which",
    r"\bso many\b": "a number",
    r"\bas likely\b": "input variants",
    r"\b(is|are|be|was|were) told\b|\btold (apart|from|to)\b": "broadcast, reported, passed",
    r"\b(is|are) said\b": "is reported, is printed",
    r"\bbeside\b": "next to, in addition to",
    r"\ball the same\b": "nevertheless",
    r"\bgo(?:es)? by\b": "depends on, uses",
    r"\bfor ever\b": "forever",
    r"\bOf what\b|^As of\b|^Of (a|an|each|all)\b": "write a sentence",
    r"(?<!GPU )\bvendors?\b": "library",
    r"\bmend(s|ed|ing)?\b": "patch, workaround",
    r"\brestless\b": "unstable",
    r"\b(own|each|older|another) ways?\b|\bways (of|that)\b": "algorithm",
    r"\bkits?\b": "building block",
    r"\bslabs?\b": "block of rows",
    r"\blaps?\b": "round",
}
"""Regular expressions of phrases, and what to write."""


def files(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", *patterns], capture_output=True, check=True
    )
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.exists() and path != Path(__file__)]


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of docstrings, comments and messages of a module, or prose of a page."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        blank = re.sub(r"^```.*?^```$", lambda m: "\n" * m[0].count("\n"), text, flags=re.M | re.S)
        for number, line in enumerate(blank.split("\n"), 1):
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)", " ", line)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
    for node in ast.walk(ast.parse(text)):
        if is_text(node):
            for number, line in enumerate(node.value.split("\n")):
                yield node.lineno + number, re.sub(r"``[^`]*``", " ", line).strip()


def test_no_name_that_was_replaced():
    old = {name: new for new, replaced in NAMES.items() for name in replaced.split()}
    any_name = re.compile(rf"\b(?:{'|'.join(old)})\b")
    found = [
        f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string}, write {old[token.string]}"
        for path in files("*.py")
        if any_name.search(text := path.read_text("utf-8"))  # most files need no tokens
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.NAME and token.string in old
    ]
    assert not found


def test_no_phrase_that_has_to_be_read_twice():
    any_phrase = re.compile("|".join(f"(?:{phrase})" for phrase in PHRASES))
    anywhere = re.compile(any_phrase.pattern.replace("^", ""))
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]!r}, write {instead}"
        for path in files("python/*.py", "*.md", ":!benchmarks/data")  # a licence text
        if anywhere.search(path.read_text("utf-8"))  # most files need no tokens
        for number, text in texts(path)
        if any_phrase.search(text)  # one regular expression for all: most lines have none
        for phrase, instead in PHRASES.items()
        if (match := re.search(phrase, text))
    ]
    assert not found


def test_sentences_are_short():
    for name, pattern in GROUPS.items():
        average, most, longest = lengths(sorted(ROOT.glob(pattern)))
        assert average <= 18, f"{name}: a sentence has {average:.1f} words on average"
        assert most <= 35, longest
