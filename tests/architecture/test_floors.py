"""Who may import whom, who may read the environment, and who may touch hardware."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, ROOT, modules, name, tree, uses

HARDWARE = ("torch.cuda", "torch.distributed")
MAY_TOUCH_HARDWARE = ("runtime/", "debugging/", "kernels/", "layers/", "testing/", "test/")
LONGEST = 680
"""Think again above 400, but do not split a class or a function to satisfy a number."""
ENVIRONMENT = ("os.environ", "os.getenv", "os.putenv", "os.environb")


def offences(path: Path, forbidden: tuple[str, ...]) -> list[str]:
    return [
        f"{name(path)}:{line} uses {used}"
        for line, used in uses(tree(path))
        if any(used == word or used.startswith(word + ".") for word in forbidden)
    ]


def test_imports_point_down(monkeypatch, capsys) -> None:
    # Imported here, because machines that run only the tests on GPUs may lack it.
    from importlinter.cli import lint_imports

    monkeypatch.chdir(ROOT)
    # Its logging set-up would disable the loggers of this process.
    monkeypatch.setattr("logging.config.dictConfig", lambda config: None)
    assert lint_imports(str(ROOT / "pyproject.toml"), no_cache=True, no_logo=True) == 0
    assert " kept, 0 broken" in capsys.readouterr().out


def test_no_module_imports_itself_through_others() -> None:
    """Imports inside functions and for type checking count too."""
    files = {path.relative_to(PACKAGE.parent).with_suffix(""): path for path in modules()}
    by_name = {".".join(path.parts).removesuffix(".__init__"): files[path] for path in files}

    def imported(path: Path) -> Iterator[str]:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{name(path)}: relative import"
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    yield full if full in by_name else str(node.module)

    graph = {module: set(imported(path)) & set(by_name) for module, path in by_name.items()}
    assert sum(map(len, graph.values())) > len(graph), "imports are found"
    TopologicalSorter(graph).prepare()  # raises CycleError, which lists the modules of a cycle


def test_only_knobs_reads_the_environment() -> None:
    found = [
        line
        for path in modules()
        if name(path) != "knobs.py"
        for line in offences(path, ENVIRONMENT)
    ]
    assert not found, "read it through triton_dist.knobs:\n" + "\n".join(found)


def test_no_exception_hides_another() -> None:
    """``raise … from None`` would hide an exception of the user's that is being handled."""
    found = [
        f"{name(path)}:{node.lineno}"
        for path in modules()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Raise) and isinstance(node.cause, ast.Constant)
    ]
    assert not found, "raise from the exception, or after the except block:\n" + "\n".join(found)


def test_what_triton_does_not_promise_is_asked_in_two_files_of_the_runner() -> None:
    """With every Triton that is supported ``make versions`` runs these two."""
    private = re.compile(r"triton\.(compiler\.compiler|runtime\.(jit|interpreter)|(.*\.)?_(?!_))")
    found = {
        name(path)
        for path in modules()
        if name(path).startswith("runner/")
        for _, used in uses(tree(path))
        if private.match(used)
    }
    assert found == {"runner/build.py", "runner/function.py"}


def test_only_rooms_that_know_hardware_touch_it() -> None:
    found = [
        line
        for path in modules()
        if not name(path).startswith(MAY_TOUCH_HARDWARE)
        for line in offences(path, HARDWARE)
    ]
    assert not found, "belongs in triton_dist.runtime:\n" + "\n".join(found)


def test_kernels_ask_a_device_what_it_can_not_what_it_is() -> None:
    found = [
        f"{name(path)}:{line}: {code.strip()}"
        for path in modules()
        if name(path).startswith("kernels/")
        for line, code in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"device(\(\))?\.name\b", code)
    ]
    assert not found, "ask for interprets, has_nccl, …:\n" + "\n".join(found)


def test_no_module_is_too_long() -> None:
    counts = {name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in modules()}
    assert not {module: count for module, count in counts.items() if count > LONGEST}


@pytest.mark.parametrize(
    ("source", "forbidden"),
    [
        ("import os\nos.environ['A']", ENVIRONMENT),
        ("import os as system\nsystem.getenv('A')", ENVIRONMENT),
        ("from os import environ", ENVIRONMENT),
        ("import torch\ntorch.cuda.synchronize()", HARDWARE),
        ("import torch.distributed as dist", HARDWARE),
        ("from torch import distributed", HARDWARE),
        ("from torch.distributed import barrier", HARDWARE),
        ("from torch.distributed.tensor import DTensor", HARDWARE),
        ("def f():\n    import torch\n    return torch.cuda.is_available()", HARDWARE),
    ],
)
def test_the_checks_see_every_way_to_write_it(
    source: str, forbidden: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.architecture.source.PACKAGE", tmp_path)
    module = tmp_path / "module.py"
    module.write_text(source)
    assert offences(module, forbidden)


def test_type_checking_imports_are_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.architecture.source.PACKAGE", tmp_path)
    module = tmp_path / "module.py"
    module.write_text("if TYPE_CHECKING:\n    from torch.distributed import ProcessGroup\n")
    assert not offences(module, HARDWARE)
