"""What must tune again, and what must not."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import linecache
import re
import shutil
import sys
import zipfile

import pytest
import torch
import triton

from triton_dist._tuning.source import libraries, source_of, sources_of
from triton_dist._tuning.source.runtime_values import Snapshot
from triton_dist._tuning.source.stale import changes
from triton_dist.kernels.nvidia.allgather_gemm import ag_gemm


def all_of(roots):
    """What counts of ``roots``: digests and constants, by name."""
    found = source_of(roots)
    return {**found.digests, **found.literal, **found.bound}


def names_of(roots):
    """The names that ``roots`` reach, without modules and functions around them."""
    return {re.split(r":|<locals>\.", name)[-1] for name in source_of(roots).digests}


@pytest.fixture
def imported(monkeypatch):
    """A function: import a module from a folder; the test's end forgets it."""
    names = []

    def of(folder, name):
        monkeypatch.syspath_prepend(str(folder))
        sys.modules.pop(name, None)
        names.append(name)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield of
    for name in names:
        sys.modules.pop(name, None)


def test_a_function_without_source_is_known_by_its_bytecode():
    def compiled(body):
        namespace = {}
        exec(f"def op(x):\n    return {body}", namespace)
        return all_of([namespace["op"]])

    assert compiled("x + 1") == compiled("x  +  1") != compiled("x + 2")


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


def test_files_alone_tell_what_changed_of_the_real_op():
    found = source_of([ag_gemm.fn]).digests
    module, name = ag_gemm.identity().module, ag_gemm.identity().function
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
    for module, other in (("one", "two"), ("two", "one")):
        (tmp_path / f"{module}.py").write_text(f"from {other} import op\n")
    assert changes({"op": "1"}, "one", "op")[0] == ["source: one: a statement that sets op is gone"]


def test_an_edited_lambda_among_the_hooks_is_seen(imported, tmp_path):
    text = "from triton_dist.tune import autotune\n@autotune([{'B': 1}], lambda x: 0, prune_fn="
    text += "lambda config, x: config['B'] < VALUE)\ndef op(x, B): return x\n"
    found = []
    for value in "12":
        (tmp_path / value).mkdir()
        (tmp_path / value / "hooked.py").write_text(text.replace("VALUE", value))
        op = imported(tmp_path / value, "hooked").op
        found.append(sources_of([op.fn], [op.prune_fn])[1].digests)
    assert found[0].keys() == found[1].keys()
    assert found[0] != found[1]


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
    """As ``pip install --target`` leaves a module in any folder, with one that is not installed."""
    for name in ("installed_ops", "ops_beside"):
        (folder / f"{name}.py").write_text(INSTALLED)
    lists = folder / "installed_ops-1.0.dist-info"
    lists.mkdir()
    files = ["installed_ops.py,sha256=abc,70", "installed_ops-1.0.dist-info/RECORD,,"]
    (lists / "RECORD").write_text("\n".join(files))
    return folder


@pytest.mark.parametrize("install", [site_packages, target])
def test_an_installed_package_is_followed_if_the_function_is_of_it(install, tmp_path, imported):
    module = imported(install(tmp_path), "installed_ops")
    helper = module.helper
    assert set(all_of([module.op])) == {"op", "helper"}
    assert "helper" not in names_of([lambda x: helper(x)])


def test_a_script_in_an_installed_package_is_followed(tmp_path, imported, monkeypatch):
    """``python package/script.py`` gives the module another name than its package."""
    module = imported(target(tmp_path), "installed_ops")
    monkeypatch.setitem(sys.modules, "script", module)
    module.op.__module__ = "script"
    assert set(all_of([module.op])) == {"op", "helper"}


def test_another_version_of_a_library_is_seen(tmp_path, imported):
    folder = site_packages(tmp_path)
    module = imported(folder, "installed_ops")
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
    changed = {name for name in found[0] | found[1] if found[0].get(name) != found[1].get(name)}
    assert changed == {"library installed_ops"}


def test_what_lies_beside_installed_packages_is_followed(tmp_path, imported):
    helper = imported(target(tmp_path), "ops_beside").helper
    assert "helper" in names_of([lambda x: helper(x)])


@pytest.mark.parametrize("place", ["sched.py", "my-packages/team/ops_of_ours.py"])
def test_what_has_a_name_like_those_of_libraries_is_followed(tmp_path, imported, place):
    file = tmp_path / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("def helper(x): return x\n")
    helper = imported(file.parent, file.stem).helper
    assert "helper" in names_of([lambda x: helper(x)])


def test_a_file_that_was_edited_after_its_import_is_not_taken_for_what_runs(
    tmp_path, monkeypatch, imported
):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / "edited_ops.py"

    def digests(text_now):
        path.write_text("def op(x):\n    return x + 1\n")
        module = imported(tmp_path, "edited_ops")
        path.write_text(text_now)
        return all_of([module.op])

    as_imported = digests("def op(x):\n    return x + 1\n")
    edited = digests("def op(x):\n    return x + 2\n")
    again = digests("def op(x):\n    return x + 3\n")
    assert edited == again  # what runs is the same: its bytecode tells
    assert edited != as_imported  # but a later process does not take it for either file
    path.write_text("def op(x):\n    return x + 2\n")
    assert all_of([imported(tmp_path, "edited_ops").op]) != edited


def test_a_module_whose_asserts_pytest_rewrites_is_followed(tmp_path, imported):
    path = tmp_path / "rewritten_ops.py"
    path.write_text("TABLE = [1]\ndef op(x): return TABLE\ndef check(x): assert x\n")
    module = imported(tmp_path, "rewritten_ops")
    exec(compile("\n\ndef check(x): return x", str(path), "exec"), vars(module))
    module.__loader__ = type("Hook", (), {"__module__": "_pytest.assertion.rewrite"})()
    assert set(source_of([module.op]).digests) == {"op", "TABLE"}


def test_a_module_in_a_zip_archive_is_followed(tmp_path, imported):
    def of(text):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("zipped_ops.py", text)
        return all_of([imported(path, "zipped_ops").op])

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


def test_the_order_of_a_frozenset_in_a_closure_does_not_count():
    """Hashes of strings differ by process; those of 0 and 8 make the order that of insertion."""

    class Part:
        def __hash__(self) -> int:
            return 3

    def make(held):
        return lambda: held

    texts = []
    for numbers in ((0, 8), (8, 0)):
        steps = (frozenset([*numbers, Part()]),)
        texts.append(Snapshot([make(steps)]).text(steps))
    assert texts[0] == texts[1] is not None


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
