"""How much of ``kernels/`` has to be understood for one op stays as little as it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, tree

# Files that an op reaches, and their lines of code: without blank lines, comments and docstrings.
MOST = {
    "allgather_gemm": (18, 4240),
    "gemm_reduce_scatter": (19, 4090),
    "gemm_allreduce": (21, 4590),
    "gemm": (11, 2710),
    "grouped_gemm": (18, 3020),
    "allgather_group_gemm": (27, 4690),
    "moe_reduce": (32, 5730),
    "shard_collectives": (13, 1990),
    "allreduce": (11, 1980),
    "expert_parallel": (18, 3770),
    "ep_group_gemm": (33, 6220),
    "sp_ag_attention": (13, 2020),
    "ulysses": (12, 2210),
    "ulysses_gemm": (20, 3960),
    "decode_attention": (14, 2680),
}
OWN_FILES = (
    "__init__", "op", "context", "algorithms", "backends", "kernel", "combine", "packets",
)  # fmt: skip


def reached(start: Path, package: Path) -> set[Path]:
    """Modules inside ``kernels`` that are imported, anywhere in a file, by ``start`` and by what it
    imports. A package's ``__init__``, which names are imported through, is followed, not counted.
    """
    seen, todo = set[Path](), [start]
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            todo += imported(path, package)
    return {path for path in seen if path.name != "__init__.py"}


def imported(path: Path, package: Path) -> Iterator[Path]:
    for node in ast.walk(tree(path)):
        module = getattr(node, "module", None) or ""
        if isinstance(node, ast.ImportFrom) and module.startswith("triton_dist.kernels"):
            for alias in node.names:
                yield file_of(package, f"{module}.{alias.name}", module)


def file_of(package: Path, *modules: str) -> Path:
    """File of the first of ``modules`` that is one."""
    stems = [package.joinpath(*module.split(".")[1:]) for module in modules]
    files = [file for stem in stems for file in (stem.with_suffix(".py"), stem / "__init__.py")]
    return next(file for file in files if file.exists())


def lines_of_code(path: Path) -> int:
    """Count the lines of statements; docstrings, comments and blank lines do not count."""
    texts = {
        line
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    return sum(
        number not in texts and line.strip() != "" and not line.lstrip().startswith("#")
        for number, line in lines
    )


@pytest.mark.parametrize("op", MOST)
def test_an_op_reaches_few_files(op: str) -> None:
    files = reached(PACKAGE / "kernels" / "nvidia" / op / "op.py", PACKAGE)
    lines = sum(lines_of_code(path) for path in files)
    most_files, most_lines = MOST[op]
    listed = "\n".join(sorted(path.relative_to(PACKAGE).as_posix() for path in files))
    assert len(files) <= most_files, listed
    assert lines <= most_lines, listed


def test_every_op_is_counted_and_has_the_files_of_an_op() -> None:
    folders = {path.parent for path in (PACKAGE / "kernels" / "nvidia").glob("*/op.py")}
    assert {folder.name for folder in folders} == set(MOST)
    assert {path.stem for folder in folders for path in folder.glob("*.py")} <= set(OWN_FILES)


def test_the_count_follows_names_packages_and_late_imports(tmp_path: Path) -> None:
    for name, text in {
        "op.py": "from triton_dist.kernels.kit import part\nfrom triton_dist.kernels.two import f",
        "kit/__init__.py": "",
        "kit/part.py": "def f():\n    from triton_dist.kernels.late import x",
        "late.py": "from triton_dist.runtime import device",
        "two/__init__.py": "from triton_dist.kernels.two.op import f",
        "two/op.py": "import torch",
        "unreached.py": "",
    }.items():
        path = tmp_path / "kernels" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = reached(tmp_path / "kernels" / "op.py", tmp_path)
    assert {path.relative_to(tmp_path / "kernels").as_posix() for path in found} == {
        "op.py", "kit/part.py", "late.py", "two/op.py",
    }  # fmt: skip
