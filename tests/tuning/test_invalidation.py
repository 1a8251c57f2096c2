"""What must tune again, with the field that ``explain`` names, and what must not: real files are
edited."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from triton_dist._tuning import shared
from triton_dist.cli import validator
from triton_dist.cli.main import main
from triton_dist.runtime.device.cpu import CpuDevice
from triton_dist.runtime.ranks.solo import SoloRank

OPS = '''
import dataclasses
import enum
import functools

import torch
import triton
import triton.language as tl

import triton_dist
from triton_dist.tune import autotune

from . import constants
from .kernels import kernel

SCALE = 2
WIDTHS = [constants.WIDTH, 2]
TABLE = {}
for number in range(3):
    TABLE[number] = number + 1
_cache = {}
_calls = 0


@dataclasses.dataclass
class State:
    count: int = 0


STATE = State(count=3)


class Method(enum.Enum):
    PUSH = 1
    PULL = 2


class Base:
    def offset(self):
        return 5


class Layer(Base):
    """A layer."""

    bias = 3

    @property
    def doubled(self):
        return self.bias * 2

    def project(self, x):
        return x + self.doubled

    def unused(self):
        return 0

    @autotune([{"n": 1}], key_fn=lambda self, x: 1)
    def forward(self, x, n):
        return self.project(x) + self.bias


def helper(x):
    """Doc."""
    return x * SCALE + WIDTHS[0] + TABLE[0]


@functools.lru_cache
def cached(n):
    return n + 7


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
double = lambda x: x in {"a", "b", "c"}
shifted = functools.partial(helper, 11)


def early(configs, named_args, **kwargs):
    return configs[:1]


@triton.autotune(
    configs=[triton.Config({"BLOCK": 64})], key=[], prune_configs_by={"early_config_prune": early}
)
@triton.heuristics({"EVEN": lambda arguments: True})
@triton_dist.jit
def guessed(pointer, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    tl.store(pointer, BLOCK)


def keep(config, x, **kwargs):
    return config["block"] > 0


def close(output, reference):
    return output.shape == reference.shape


@autotune(
    config_space=[{"block": 4, "method": Method.PUSH}, {"block": 8, "method": Method.PUSH}],
    key_fn=lambda x, **kwargs: (tuple(x.shape), Method.PULL),
    prune_fn=keep,
    check_fn=close,
    max_trials=9,
)
@guard
def run(x, block, method=Method.PULL, rounds=1):
    # comment
    global _calls
    from . import late

    _calls += 1
    _cache[block] = 1
    STATE.count += 1

    def inner(y):
        return late.shift(y) - 1

    kernel[(1,)](x, BLOCK=4)
    cached(1), double("a"), guessed
    layer = Layer()
    return inner(epilogue(x)) + constants.WIDTH + shifted() + layer.project(x)


def unrelated():
    return 1
'''
KERNELS = '''
import triton.language as tl

import triton_dist

LANES = tl.constexpr(1)


@triton_dist.jit
def callee(x):
    return x + LANES


@triton_dist.jit
def kernel(pointer, BLOCK: tl.constexpr):
    """Add one."""
    offsets = tl.arange(0, BLOCK)
    tl.store(pointer + offsets, callee(tl.load(pointer + offsets)))
'''
FILES = {
    "__init__.py": "",
    "ops.py": OPS,
    "kernels.py": KERNELS,
    "constants.py": "WIDTH = 4\n",
    "late.py": "def shift(x):\n    return x - 1\n",
}


class Package:
    """A package on disk, its tuned function, and what ``explain`` says about that."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.capsys, self.name, self.module = root, capsys, "edited", "ops"
        for name, text in FILES.items():
            self.write(name, text)

    def write(self, file: str, text: str) -> None:
        (self.root / self.name).mkdir(exist_ok=True)
        (self.root / self.name / file).write_text(text)

    def edit(self, old: str, new: str) -> None:
        """Replace ``old``, which stands once in one of the files."""
        texts = {path: path.read_text() for path in (self.root / self.name).glob("*.py")}
        (path,) = [path for path, text in texts.items() for _ in range(text.count(old))]
        path.write_text(texts[path].replace(old, new))

    @contextlib.contextmanager
    def edited(self, old: str, new: str) -> Iterator[None]:
        """Context manager: edit a file, and restore it."""
        texts = {path: path.read_text() for path in (self.root / self.name).glob("*.py")}
        self.edit(old, new)
        yield
        for path, text in texts.items():
            path.write_text(text)

    def fresh(self) -> ModuleType:
        """The module as a new process would have it."""
        self.forget()
        return importlib.import_module(f"{self.name}.{self.module}")

    def forget(self) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == self.name]:
            del sys.modules[name]
        importlib.invalidate_caches()

    def call(self, function: str = "run") -> int:
        """How often a call in a new process tunes."""
        value = self.fresh()
        for part in function.split("."):
            owner, value = value, getattr(value, part)
        if function == "run":
            value(torch.zeros(4))
        else:
            value(owner(), torch.zeros(4))
        count: int = value.num_tunings
        return count

    def digests(self) -> dict[str, str]:
        """What counts of the function's code, by name without modules and functions around it."""
        found = self.fresh().run.fingerprint()
        counts = {**found.source, **found.literal, **found.bound}
        return {re.split(r":|<locals>\.", name)[-1]: text for name, text in counts.items()}

    def explain(self, *options: str, function: str = "run") -> tuple[int, str]:
        self.fresh()
        return self._explain(*options, function=function)

    def explain_files(self, function: str = "run") -> tuple[int, str]:
        """What it says when it imports nothing."""
        self.forget()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(validator, "OWN_PACKAGES", set())
            result = self._explain(function=function)
        assert f"{self.name}.{self.module}" not in sys.modules
        return result

    def _explain(self, *options: str, function: str = "run") -> tuple[int, str]:
        self.capsys.readouterr()
        status = main(["explain", f"{self.name}.{self.module}:{function}", *options])
        return status, self.capsys.readouterr().out


@pytest.fixture
def package(tmp_path, monkeypatch, capsys) -> Package:
    monkeypatch.setattr(validator, "OWN_PACKAGES", {"edited", "moved"})  # imported in this process
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # edits come within a file's time stamp
    monkeypatch.syspath_prepend(str(tmp_path))
    made = Package(tmp_path, capsys)
    assert made.call() == 1
    yield made
    for name in [name for name in sys.modules if name.partition(".")[0] in ("edited", "moved")]:
        del sys.modules[name]


RUN = "def run(x, block"
LAYER = "class Layer(Base):"
KERNEL = "def kernel(pointer"
# The old and the new text, and what ``explain`` says: a statement's first line, or a constant.
MUTATIONS: dict[str, tuple[str, str, str]] = {
    "the function": ("constants.WIDTH + shifted", "constants.WIDTH - shifted", RUN),
    "another operator": ("_calls += 1", "_calls -= 1", RUN),
    "a default argument": ("rounds=1", "rounds=2", RUN),
    "a default enum": ("method=Method.PULL, r", "method=Method.PUSH, r", RUN),
    "a nested function": ("late.shift(y) - 1", "late.shift(y) - 2", RUN),
    "a constant in it": ("kernel[(1,)](x, BLOCK=4)", "kernel[(1,)](x, BLOCK=2)", RUN),
    "how a state begins": ("State(count=3)", "State(count=4)", "STATE = State("),
    "a helper": ("x * SCALE", "x / SCALE", "def helper(x):"),
    "a constant": ("SCALE = 2", "SCALE = 3", "constant: SCALE was 2, is 3"),
    "the type of a constant": ("SCALE = 2", "SCALE = 2.0", "constant: SCALE was 2, is 2.0"),
    "what a table is computed from": ("WIDTH = 4", "WIDTH = 5", "constant: WIDTH was 4, is 5"),
    "a table": ("constants.WIDTH, 2]", "constants.WIDTH, 3]", "WIDTHS = [constants.WIDTH, 3]"),
    "a table that is filled": ("= number + 1", "= number + 2", "for number in range(3):"),
    "a cached helper": ("n + 7", "n + 8", "def cached(n):"),
    "a closure's value": ("make_epilogue(5)", "make_epilogue(6)", "epilogue = make_epilogue(6)"),
    "a closure's code": ("x + bias", "x - bias", "def make_epilogue(bias):"),
    "a lambda": ('"b", "c"', '"b", "d"', "double = lambda x: x in"),
    "an argument of a partial": ("helper, 11", "helper, 12", "shifted = functools.partial("),
    "a decorator": ("fn(*args, **kwargs)", "fn(*args, **{**kwargs})", "def guard(fn):"),
    "a kernel": ("tl.arange(0, BLOCK)", "tl.arange(0, BLOCK) * 1", KERNEL),
    "a kernel's annotation": ("EVEN: tl.constexpr", "EVEN", "def guessed("),
    "a kernel's callee": ("x + LANES", "x - LANES", "def callee(x):"),
    "a constant of a kernel": ("constexpr(1)", "constexpr(2)", "constant: LANES was 1, is 2"),
    "a kernel's option": ("jit\ndef kernel", "jit(do_not_specialize=[0])\ndef kernel", KERNEL),
    "configs of triton.autotune": ('"BLOCK": 64', '"BLOCK": 32', "def guessed("),
    "a pruner of triton.autotune": ("configs[:1]", "configs[:2]", "def early("),
    "a heuristic": ("arguments: True", "arguments: False", "def guessed("),
    "a class attribute": ("bias = 3", "bias = 4", LAYER),
    "a method": ("return x + self.doubled", "return x - self.doubled", LAYER),
    "a tuned method": ("self.project(x) + self.bias", "self.project(x) - self.bias", LAYER),
    "a base class": ("return 5", "return 6", "class Base:"),
    "an enum's member": ("PULL = 2", "PULL = 3", "class Method(enum.Enum):"),
    "an import inside": ("x - 1", "x - 2", "def shift(x):"),
}
# The names that change with a statement, where they are not the one that it binds.
CHANGED = {
    "run": {"run", "STATE", "_cache"},
    "guard": {"guard", "wrapper"},
    "for": {"TABLE", "number"},
}
SPACE = {
    "another config": ('{"block": 8, ', '{"block": 2, "method": Method.PULL}, {"block": 8, '),
    "a value in a config": ('{"block": 8, ', '{"block": 16, '),
    "another order": ('{"block": 4, "method": Method.PUSH}, {"block": 8', '{"block": 8, "method": '
                      'Method.PUSH}, {"block": 4'),
    "prune_fn": ('config["block"] > 0', 'config["block"] > 1'),
    "check_fn": ("output.shape == reference.shape", "output.dtype == reference.dtype"),
    "worst_input": ("max_trials=9", "max_trials=9, worst_input=True"),
}  # fmt: skip
POLICY = {
    "max_trials=8": "max_trials was 9, is 8",
    "max_seconds=9.0": "max_seconds was not recorded, is 9.0",
}


def not_used(package: Package, field: str, **options: str) -> None:
    """Check that ``explain`` names ``field`` as the reason why the only record is not used."""
    status, said = package.explain(**options)
    assert status == 1, field
    assert re.search(f"  not used: {field}", said), said
    assert re.search(r"1 record of [\w.]+, 0 used\.", said)


def statement(first_line: str) -> str:
    return rf"source: edited\.\w+:\d+ changed: {re.escape(first_line)}"


def test_a_record_depends_on_helpers_closures_kernels_and_classes(package):
    of_the_package = {"__getattr__", "_MODULES"}  # how ``triton_dist.jit`` is imported
    names = """run guard wrapper epilogue make_epilogue helper cached double shifted shift kernel
    callee LANES guessed early Layer Base Method State STATE SCALE WIDTH WIDTHS TABLE number
    _cache"""
    assert package.digests().keys() - of_the_package == set(re.findall(r"\w+", names))


def test_a_change_of_the_code_is_named_by_its_statement(package):
    before = package.digests()
    for mutation, (old, new, changed) in MUTATIONS.items():
        (name,) = re.findall(r"^(?:def |class |constant: )?(\w+)", changed)
        is_constant = changed.startswith("constant: ")
        first_line = {"SCALE": "SCALE = ", "WIDTH": "WIDTH = 5", "LANES": "LANES = "}.get(
            changed.split(" ")[1], changed
        )
        with package.edited(old, new):
            after = package.digests()
            status, said = package.explain_files()
            not_used(package, changed if is_constant else statement(changed))
        names = {
            each for each in before.keys() | after.keys() if before.get(each) != after.get(each)
        }
        assert names == CHANGED.get(name, {name}), mutation
        assert status == 1, mutation
        assert re.search(f"  not used: {statement(first_line)}", said), mutation
    assert package.digests() == before


def test_a_change_of_the_space_or_the_policy_is_named(package):
    before = package.digests()
    for old, new in SPACE.values():
        with package.edited(old, new):
            not_used(package, "config space: its digest was ")
    for new, field in POLICY.items():
        with package.edited("max_trials=9", new):
            assert package.digests() == before
            not_used(package, f"policy: {field}")


def test_what_is_not_used_is_tuned_again_once(package):
    for old, new in (
        MUTATIONS["a helper"][:2],
        SPACE["prune_fn"],
        ("max_trials=9", "max_trials=8"),
    ):
        assert package.call() == 0
        package.edit(old, new)
        assert package.call() == 1
        assert package.explain()[0] == 0
    assert package.call() == 0


def versions(**changes: str) -> Callable[[], dict[str, str]]:
    known = shared.software_versions() | {"torch": "2.9.1+cu128", "triton": "3.6.0"}
    return lambda: known | {"cuda": "12.8"} | changes


def facts(**changes: str) -> Callable[[CpuDevice], dict[str, str]]:
    known = {"gpu": "NVIDIA H200", "gpus_on_host": "8", "capability": "9.0", "sms": "132"}
    return lambda _: known | {"driver": "550.54.15", "peer_access": "full mesh of 8"} | changes


# What is different in a later process, and what is said of it.
ELSEWHERE: list[tuple[dict[str, str], str]] = [
    ({"triton": "3.7.0"}, "software: triton was 3.6.0, is 3.7.0"),
    ({"torch": "2.10.0+cu128"}, "software: torch was 2.9.1+cu128, is 2.10.0+cu128"),
    ({"cuda": "13.0"}, "software: cuda was 12.8, is 13.0"),
    ({"gpu": "NVIDIA A100"}, "hardware: gpu was NVIDIA H200, is NVIDIA A100"),
    ({"gpus_on_host": "4"}, "hardware: gpus_on_host was 8, is 4"),
    ({"capability": "10.0"}, "hardware: capability was 9.0, is 10.0"),
    ({"sms": "114"}, "hardware: sms was 132, is 114"),
    ({"driver": "570.1"}, "hardware: driver was 550.54.15, is 570.1"),
    ({"peer_access": "none"}, "hardware: peer_access was full mesh of 8, is none"),
]
PATCH_LEVELS: list[tuple[dict[str, str], str]] = [
    ({"torch": "2.9.2"}, "software: torch was 2.9.1+cu128, is 2.9.2"),
    ({"triton": "3.6.1"}, "software: triton was 3.6.0, is 3.6.1"),
    ({"driver": "550.90.07"}, "hardware: driver was 550.54.15, is 550.90.07"),
]


@pytest.fixture
def become(package, monkeypatch) -> Callable[..., None]:
    """A function that changes versions and GPU; the package was tuned with the usual ones."""

    def change(**changes: str) -> None:
        software = {"torch", "triton", "cuda"} & changes.keys()
        monkeypatch.setattr(shared, "software_versions", versions(**changes if software else {}))
        monkeypatch.setattr(CpuDevice, "facts", facts(**{} if software else changes))

    change()
    package.call()
    return change


def test_other_software_hardware_or_ranks_tune_again(package, become, monkeypatch):
    for changes, field in ELSEWHERE:
        become(**changes)
        assert f"  not used: {field}\n" in package.explain()[1]
    assert (package.call(), package.call()) == (1, 0)
    become()
    for name in ("world_size", "local_world_size"):
        status, said = package.explain(f"--{name.replace('_', '-')}", "8")
        assert status == 1
        assert f"  not used: topology: {name} was 1, is 8\n" in said
    group = SoloRank().facts() | {"world_size": "8"}
    monkeypatch.setattr(SoloRank, "facts", lambda _: group)
    assert package.call() == 1


def test_a_patch_level_is_accepted_and_said_unless_versions_are_strict(
    package, become, monkeypatch
):
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_PRINT", "1")
    for changes, field in PATCH_LEVELS:
        become(**changes)
        assert f"  used\n  accepted: {field}\n" in package.explain()[1]
        assert package.call() == 0
        assert field in package.capsys.readouterr().err
        with monkeypatch.context() as strict:
            strict.setenv("TRITON_DIST_AUTOTUNE_VERSION_CHECK", "1")
            assert f"  not used: {field}\n" in package.explain()[1]
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_VERSION_CHECK", "1")
    assert package.call() == 1
    assert field in package.capsys.readouterr().err


NEUTRAL = {
    "a comment": ("# comment", "# another\n    # and one more"),
    "a comment at the top": ("import enum\n", "# Copyright\nimport enum\n"),
    "a docstring": ('"""Doc."""', '"""Better documentation,\n    of two lines."""'),
    "a class's docstring": ('    """A layer."""\n', ""),
    "a kernel's docstring": ('    """Add one."""\n', ""),
    "a comment in a class": ("bias = 3", "bias = 3  # of a rank"),
    "a comment in a kernel": ("    offsets = tl", "    # lanes\n    offsets = tl"),
    "formatting": ("x * SCALE + WIDTHS[0]", "(\n        x*SCALE\n        + WIDTHS[0])"),
    "quotes": ('{"early_config_prune": early}', "{'early_config_prune': early}"),
    "moved down": ("SCALE = 2\n", "\n\n\n\nSCALE = 2\n"),
    "a kernel moved down": ("LANES = ", "\n\n\nLANES = "),
    "another order": ("def keep", "def another():\n    return 2\n\n\ndef keep"),
    "something unrelated": ("def unrelated():\n    return 1", "def other(): return 9"),
    "an import": ("import enum\n", "import enum\nimport json\n"),
    "blank lines in a body": ("    layer = Layer()", "\n    layer = Layer()\n"),
    "the layout of the space": ('=[{"block": 4, ', '=[\n {"block": 4,\n'),
    "a constant that is not reached": ("WIDTH = 4", "WIDTH = 4\nDEPTH = 3"),
}


def must_not_tune_again(package: Package) -> None:
    assert "  not compared: its code is the same" in package.explain_files()[1]
    status, said = package.explain()
    assert (status, "not used" in said) == (0, False), said
    assert "  used\n" in said
    assert package.call() == 0


def test_edits_without_meaning_do_not_tune_again(package):
    before = package.digests()
    for edit, (old, new) in NEUTRAL.items():
        package.edit(old, new)
        assert package.digests() == before, edit
    must_not_tune_again(package)


def test_renaming_the_file_or_the_package_does_not_tune_again(package):
    (package.root / "edited" / "ops.py").rename(package.root / "edited" / "renamed.py")
    package.module = "renamed"
    must_not_tune_again(package)
    (package.root / "edited").rename(package.root / "moved")
    package.name = "moved"
    must_not_tune_again(package)


def test_functions_of_one_name_in_two_modules_do_not_replace_each_others_records(package):
    package.write("twin.py", OPS.replace("x * SCALE", "x / SCALE"))
    for _ in range(2):
        for module in ("ops", "twin"):
            package.module = module
            package.call()
    for package.module in ("ops", "twin"):
        assert package.call() == 0
        status, said = package.explain()
        assert status == 0
        assert "2 records of run, 1 used" in said


METHOD = {
    "a method that it calls": ("return x + self.doubled", "return x - self.doubled"),
    "a property": ("self.bias * 2", "self.bias * 3"),
    "an attribute of the class": ("bias = 3", "bias = 4"),
}


def test_a_tuned_method_depends_on_its_class_and_its_space_counts_by_value(package):
    forward = "Layer.forward"
    package.call(forward)
    for old, new in METHOD.values():
        with package.edited(old, new):
            not_used(package, statement("class Layer(Base):"), function=forward)
    package.edit(
        'autotune([{"n": 1}], key_fn=lambda self', "autotune([dict(n=1)], key_fn=lambda self"
    )
    status, said = package.explain(function=forward)
    assert (status, "  used\n" in said) == (0, True), said
    assert "  not compared: its code is the same" in package.explain_files(forward)[1]
    assert package.call(forward) == 0
    package.edit(*METHOD["a property"])
    assert package.call(forward) == 1
