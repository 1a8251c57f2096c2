"""What must tune again, and what must not."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import linecache
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
import torch
import triton

from tests.architecture.source import ROOT
from triton_dist._tuning.source import libraries, source_of
from triton_dist._tuning.source.stale import changes
from triton_dist.kernels.nvidia.allgather_gemm import ag_gemm

SOURCE = '''
import enum
import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from triton_dist.tune import autotune

SCALE = 2
TABLE = [1, 2]
_cache = {}
_calls = 0


class Method(enum.Enum):
    PUSH = 1


@dataclass(frozen=True)
class Plan:
    chunks: int = 3

    def size(self):
        return round_up(self.chunks)


@dataclass
class State:
    count: int = 0


STATE = State(count=3)


def round_up(n):
    return n + 7


def helper(x):
    """Doc."""
    return x * SCALE + TABLE[0]


def guard(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)

    return wrapper


def make_epilogue(bias):
    def epilogue(x):
        return x + bias

    return epilogue


epilogue = make_epilogue(5)
partial = functools.partial(helper, 11)


@triton.jit
def device_function(x):
    return x + 1


@triton.jit
def kernel(pointer, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(pointer + offsets, device_function(offsets))


@triton.autotune(configs=[triton.Config({"BLOCK": 64})], key=[])
@triton.jit
def tuned_kernel(pointer, BLOCK: tl.constexpr):
    tl.store(pointer, BLOCK)


@triton.heuristics({"BLOCK": lambda arguments: 32})
@triton.jit
def guessed_kernel(pointer, BLOCK: tl.constexpr):
    tl.store(pointer, BLOCK)


class Inner:
    @autotune([{"n": 1}], key_fn=lambda self: 1)
    def method(self, n):
        return n - 1


@autotune(config_space=[{"block": 1}, {"block": 2}], key_fn=lambda x: 1, max_trials=9)
@guard
def op(x, block, method=Method.PUSH):
    # comment
    global _calls
    _calls += 1
    _cache[x] = 1
    kernel[(1,)](x, BLOCK=16)
    tuned_kernel[(1,)](x)
    guessed_kernel[(1,)](x)
    STATE.count += 1
    plan = Plan()
    inner = [helper(y) for y in (1, 2)]
    return epilogue(torch.add(x, 1)), partial(), plan.size(), Inner, inner, method


def unrelated():
    return 1
'''


def all_of(roots):
    """What counts of ``roots``: digests and constants, by name."""
    found = source_of(roots)
    return {**found.digests, **found.literal, **found.bound}


def names_of(roots):
    """The names that ``roots`` reach, without modules and functions around them."""
    return {re.split(r":|<locals>\.", name)[-1] for name in source_of(roots).digests}


@pytest.fixture
def digests(tmp_path):
    """A function: the digests of ``op`` in a module with this source, under a name of its own."""
    count = 0

    def of(source, prepare=lambda module: None):
        nonlocal count
        count += 1
        name = f"ops_under_test_{count}"
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
            prepare(module)
            found = all_of([module.op.fn])
        finally:
            del sys.modules[name]
        return found

    return of


def test_it_reaches_helpers_closures_kernels_and_classes(digests):
    assert set(digests(SOURCE)) == {
        "guard",
        "guard.<locals>.wrapper",
        "op",
        "_cache",
        "STATE",
        "TABLE",
        "make_epilogue",
        "partial",
        "Method",
        "Plan",
        "State",
        "round_up",
        "helper",
        "epilogue",
        "device_function",
        "kernel",
        "tuned_kernel",
        "guessed_kernel",
        "Inner",
        "SCALE",
    }


OP = {"op", "STATE", "_cache"}  # it changes the latter two when it runs
MUTATIONS = {
    "the function": ("tuned_kernel[(1,)](x)", "tuned_kernel[(2,)](x)", OP),
    "a default": (
        "block, method=Method.PUSH)",
        "block, method=None)",
        OP | {"Method"},
    ),
    "a constant in it": ("BLOCK=16", "BLOCK=32", OP),
    "how a state begins": ("State(count=3)", "State(count=4)", {"STATE"}),
    "another operator": ("_calls += 1", "_calls -= 1", OP),
    "a helper": ("x * SCALE + TABLE", "x * SCALE - TABLE", {"helper"}),
    "a helper of a helper": ("n + 7", "n + 8", {"round_up"}),
    "a global constant": ("SCALE = 2", "SCALE = 3", {"SCALE"}),
    "the type of a constant": ("SCALE = 2", "SCALE = 2.0", {"SCALE"}),
    "a global table": ("TABLE = [1, 2]", "TABLE = [1, 3]", {"TABLE"}),
    "a closure": ("make_epilogue(5)", "make_epilogue(6)", {"epilogue"}),
    "a closure's code": ("return x + bias", "return x - bias", {"make_epilogue"}),
    "an argument of a partial": ("partial(helper, 11)", "partial(helper, 12)", {"partial"}),
    "a wrapper": (
        "return fn(*args, **kwargs)",
        "return fn(*args)",
        {"guard", "guard.<locals>.wrapper"},
    ),
    "a kernel": ("tl.arange(0, BLOCK)", "tl.arange(0, BLOCK) * 1", {"kernel"}),
    "a kernel's callee": ("return x + 1\n", "return x + 2\n", {"device_function"}),
    "a kernel's options": (
        "@triton.jit\ndef kernel",
        "@triton.jit(do_not_specialize=[0])\ndef kernel",
        {"kernel"},
    ),
    "a kernel's annotation": (
        "def kernel(pointer, BLOCK: tl.constexpr)",
        "def kernel(pointer, BLOCK)",
        {"kernel"},
    ),
    "configs of triton.autotune": ('{"BLOCK": 64}', '{"BLOCK": 128}', {"tuned_kernel"}),
    "a heuristic": ("arguments: 32", "arguments: 16", {"guessed_kernel"}),
    "a method": ("round_up(self.chunks)", "round_up(2 * self.chunks)", {"Plan"}),
    "a class attribute": ("chunks: int = 3", "chunks: int = 4", {"Plan"}),
    "an enum's member": ("PUSH = 1", "PUSH = 2", {"Method"}),
    "a tuned method": ("return n - 1", "return n - 2", {"Inner"}),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_change_of_meaning_is_seen_and_named(digests, mutation):
    old, new, names = MUTATIONS[mutation]
    assert old in SOURCE
    before, after = digests(SOURCE), digests(SOURCE.replace(old, new))
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed == names


NEUTRAL = {
    "a comment": ("# comment", "# another comment\n    # and one more"),
    "a docstring": ('"""Doc."""', '"""Better documentation,\n    of two lines.\n    """'),
    "formatting": ("x * SCALE + TABLE[0]", "(\n        x*SCALE\n        + TABLE[0]\n    )"),
    "quotes": ('{"BLOCK": 64}', "{'BLOCK': 64}"),
    "moved down": ("SCALE = 2", "\n\n\n\nSCALE = 2"),
    "another order": ("def unrelated", "def elsewhere():\n    return 2\n\n\ndef unrelated"),
    "something unrelated": ("def unrelated():\n    return 1", "def unrelated():\n    return 9"),
    "an import": ("import enum", "import enum\nimport json"),
    "the tuner's own arguments": ("max_trials=9", "max_trials=8"),
    "a comment in a kernel": ("offsets = tl", "# lanes\n    offsets = tl"),
    "a comment in a class": ("chunks: int = 3", "chunks: int = 3  # of a rank"),
    "a blank line in a body": ("plan = Plan()", "\n    plan = Plan()\n"),
}


@pytest.mark.parametrize("edit", NEUTRAL)
def test_an_edit_without_meaning_changes_nothing(digests, edit):
    old, new = NEUTRAL[edit]
    assert old in SOURCE
    assert digests(SOURCE) == digests(SOURCE.replace(old, new))


def test_what_a_program_does_while_it_runs_changes_nothing(digests):
    def use(module):
        module._cache["x"] = object()
        module._calls = 41
        module.STATE.count = 41

    assert digests(SOURCE) == digests(SOURCE, use)


def test_a_constant_that_another_module_sets_is_seen(digests):
    def patch(module):
        module.SCALE = 5

    assert (digests(SOURCE)["SCALE"], digests(SOURCE, patch)["SCALE"]) == ("2", "5")


def test_an_import_inside_the_function_is_followed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "late_helpers.py").write_text("def late(x):\n    return x\n")

    def op(x):
        from late_helpers import late

        return late(x)

    first = all_of([op])
    assert names_of([op]) == {"op", "late"}
    del sys.modules["late_helpers"]
    (tmp_path / "late_helpers.py").write_text("def late(x):\n    return x + 100\n")
    importlib.invalidate_caches()
    assert all_of([op])["late_helpers:late"] != first["late_helpers:late"]
    del sys.modules["late_helpers"]


def test_a_function_without_source_is_known_by_its_bytecode():
    def compiled(body):
        namespace = {}
        exec(f"def op(x):\n    return {body}", namespace)
        return all_of([namespace["op"]])

    assert compiled("x + 1") == compiled("x  +  1") != compiled("x + 2")


def test_lambdas_are_told_apart_by_what_they_do():
    assert all_of([lambda x: x + 1]) != all_of([lambda x: x + 2])
    assert all_of([lambda x: x + 1]) == all_of([lambda x: x + 1])


def test_library_code_is_not_followed():
    import json

    def op(x):
        return json.dumps(x), pytest.approx(x)

    assert names_of([op]) == {"op", "library pytest"}


def even(n):
    return n == 0 or odd(n - 1)


def odd(n):
    return n != 0 and even(n - 1)


def test_functions_that_call_one_another_end():
    assert set(all_of([even])) == {"even", "odd"}


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_every_process_finds_the_same_whatever_its_hash_seed(interpret):
    """The real op, with kernels compiled and interpreted; this process interprets and has a seed of
    its own."""
    found = {sources_of_an_op()} if interpret == "1" else set()
    for seed in ("1", "2")[len(found) :]:
        environment = os.environ | {
            "PYTHONHASHSEED": seed,
            "TRITON_INTERPRET": interpret,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT)]),
        }
        report = f"import {__name__} as here; print(here.sources_of_an_op())"
        done = subprocess.run(
            [sys.executable, "-c", report], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout.strip())
    (digests,) = found
    for name in ("kernel_gemm_persistent", "multiply_tile", "wait", "sharded_gemm"):
        assert f":{name}" in digests


def sources_of_an_op():
    def choose(x):
        return x in {"push", "pull", "both"}

    return json.dumps(source_of([ag_gemm.fn, choose])._asdict(), sort_keys=True)


def test_files_alone_tell_what_changed_of_the_real_op():
    found = source_of([ag_gemm.fn]).digests
    module, name = ag_gemm.origin().module, ag_gemm.origin().function
    assert changes(found, module, name) == ([], [])
    label = ".kernels.common.gemm.sharded:kernel_gemm_persistent"
    ((sentence,), _) = changes(found | {label: "another"}, module, name)
    assert re.fullmatch(
        r"source: triton_dist\.kernels\.common\.gemm\.sharded:\d+ changed: "
        r"def kernel_gemm_persistent\(",
        sentence,
    )


def test_files_tell_of_libraries_and_of_what_they_do_not_have(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some_ops.py").write_text("TABLE = [1]\ndef op(x): return TABLE\n")
    recorded = {"library pytest": "pytest 0", "TABLE": "1 2", "gone": "3", "elsewhere:f": "4"}
    found, unknown = changes(recorded, "some_ops", "op")
    assert found == [
        f"source: library pytest was pytest 0, is pytest {pytest.__version__}",
        "source: some_ops:1 changed: TABLE = [1]",
        "source: some_ops: a statement that sets gone is gone",
    ]
    assert unknown == ["elsewhere:f"]
    assert changes(recorded, "no_such_ops", "op") == (found[:1], ["TABLE", "gone", "elsewhere:f"])


INSTALLED = """
def helper(x):
    return x + 1

def op(x):
    return helper(x)
"""


def site_packages(folder):
    """As ``pip install`` leaves a module there."""
    folder = folder / "site-packages"
    folder.mkdir()
    (folder / "installed_ops.py").write_text(INSTALLED)
    return folder


def target(folder):
    """As ``pip install --target`` leaves a module in any folder."""
    (folder / "installed_ops.py").write_text(INSTALLED)
    lists = folder / "installed_ops-1.0.dist-info"
    lists.mkdir()
    files = ["installed_ops.py,sha256=abc,70", "installed_ops-1.0.dist-info/RECORD,,"]
    (lists / "RECORD").write_text("\n".join(files))
    return folder


@pytest.mark.parametrize("install", [site_packages, target])
def test_an_installed_package_is_followed_if_the_function_is_of_it(install, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(install(tmp_path)))
    module = importlib.import_module("installed_ops")
    helper = module.helper

    def op(x):
        return helper(x)

    try:
        assert set(all_of([module.op])) == {"op", "helper"}
        assert names_of([op]) == {"op"}
    finally:
        del sys.modules["installed_ops"]


def test_another_version_of_a_library_is_seen(tmp_path, monkeypatch):
    folder = site_packages(tmp_path)
    monkeypatch.syspath_prepend(str(folder))
    module = importlib.import_module("installed_ops")
    helper, found = module.helper, []

    def op(x):
        return helper(x) + module.op(x)

    for version in ("1.0", "2.0"):
        lists = folder / f"installed_ops-{version}.dist-info"
        lists.mkdir()
        (lists / "METADATA").write_text(f"Name: installed-ops\nVersion: {version}\n")
        libraries.version_of.cache_clear()
        found.append(source_of([op]).digests)
        shutil.rmtree(lists)
    libraries.version_of.cache_clear()
    del sys.modules["installed_ops"]
    changed = {name for name in found[0] | found[1] if found[0].get(name) != found[1].get(name)}
    assert changed == {"library installed_ops"}


def test_what_lies_beside_installed_packages_is_followed(tmp_path, monkeypatch):
    (target(tmp_path) / "ops_beside.py").write_text(INSTALLED)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("ops_beside")
    helper = module.helper

    def op(x):
        return helper(x)

    try:
        assert names_of([op]) == {"op", "helper"}
    finally:
        del sys.modules["ops_beside"]


@pytest.mark.parametrize("place", ["sched.py", "my-packages/team/ops_of_ours.py"])
def test_what_has_a_name_like_those_of_libraries_is_followed(tmp_path, monkeypatch, place):
    file = tmp_path / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("def helper(x): return x\n")
    monkeypatch.syspath_prepend(str(file.parent))
    monkeypatch.delitem(sys.modules, file.stem, raising=False)
    helper = importlib.import_module(file.stem).helper
    assert "helper" in names_of([lambda x: helper(x)])
    del sys.modules[file.stem]


def test_a_file_that_was_edited_after_its_import_is_not_taken_for_what_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "edited_ops.py"

    def digests(text_now):
        sys.modules.pop("edited_ops", None)
        importlib.invalidate_caches()
        path.write_text("def op(x):\n    return x + 1\n")
        module = importlib.import_module("edited_ops")
        path.write_text(text_now)
        return all_of([module.op])

    as_imported = digests("def op(x):\n    return x + 1\n")
    edited = digests("def op(x):\n    return x + 2\n")
    again = digests("def op(x):\n    return x + 3\n")
    del sys.modules["edited_ops"]
    assert edited == again  # what runs is the same: its bytecode tells
    assert edited != as_imported  # but a later process does not take it for either file
    path.write_text("def op(x):\n    return x + 2\n")
    assert all_of([importlib.import_module("edited_ops").op]) != edited
    del sys.modules["edited_ops"]


def test_a_module_in_a_zip_archive_is_followed(tmp_path, monkeypatch):
    def of(text):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("zipped_ops.py", text)
        with monkeypatch.context() as patched:
            patched.syspath_prepend(str(path))
            found = all_of([importlib.import_module("zipped_ops").op])
        del sys.modules["zipped_ops"]
        return found

    found = of(INSTALLED)
    assert set(found) == {"op", "helper"}
    assert "bytecode" not in str(found)
    assert found == of(f"# comment\n{INSTALLED}") != of(INSTALLED.replace("x + 1", "x + 2"))


def run_cells(*cells):
    """What counts of ``op``, which the cells of a notebook define."""
    space = {"__name__": "__main__", "__builtins__": __builtins__}
    for number, text in enumerate(cells):
        name = f"<ipython-input-{number}-{abs(hash(text))}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec", dont_inherit=True), space)
    return all_of([space["op"]])


def test_functions_in_the_cells_of_a_notebook_are_followed():
    cells = ["SCALE = 2\n", "def helper(x):\n    return x * SCALE\n", "def op(x): return helper(x)"]
    before = run_cells(*cells)
    assert "bytecode" not in str(before)
    assert before == run_cells(cells[0], "# comment\n" + cells[1], cells[2])
    assert before != run_cells(cells[0], cells[1].replace("*", "/"), cells[2])
    assert before != run_cells("SCALE = 3\n", *cells[1:])


def hook_a(arguments):
    arguments["x"].zero_()


def hook_b(arguments):
    arguments["x"].fill_(1)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (triton.Config({}, pre_hook=hook_a), triton.Config({}, pre_hook=hook_b)),
        (functools.cache(hook_a), functools.cache(hook_b)),
        (staticmethod(hook_a), staticmethod(hook_b)),
        (property(hook_a), property(hook_b)),
        ([hook_a], [hook_b]),
        ({"a": hook_a}, {"a": hook_b}),
        ((1, (hook_a,)), (1, (hook_b,))),
        (torch.device("cuda"), torch.device("cpu")),
        (torch.float16, torch.float32),
        (b"1", b"2"),
        (float("nan"), float("inf")),
    ],
)
def test_what_a_closure_holds_is_seen(one, other):
    def make(held):
        def op(x):
            return held, x

        return op

    assert all_of([make(one)]) == all_of([make(one)])
    assert all_of([make(one)]) != all_of([make(other)])


def test_which_device_it_is_does_not_count_since_ranks_differ_in_it():
    def make(held):
        return lambda: held

    one, other = torch.device("cuda", 0), torch.device("cuda", 1)
    assert all_of([make(one)]) == all_of([make(other)])


@dataclasses.dataclass
class State:
    count: int = 0
    parent: object = None


def test_values_that_lead_back_to_themselves_end():
    def make(count):
        state = State(count)
        state.parent = state
        return lambda: state

    assert all_of([make(1)]) == all_of([make(1)]) != all_of([make(2)])
