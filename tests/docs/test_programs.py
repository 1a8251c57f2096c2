"""Code blocks that are programs of their own; see ``test_code_blocks``.

A file of its own, so that two workers share the work.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.conftest import environment_of_scripts_python
from tests.docs.markdown import ROOT, Block, all_blocks, name, prose
from tests.docs.run_blocks import check_output, run_program
from triton_dist.testing.rank_pool import RankPool

PYTHON = all_blocks("python")
PROGRAMS = [block for block in PYTHON if block.is_program and "gpu" not in block.words]
ON_RANKS = [block for block in PROGRAMS if block.ranks]
ALONE = [block for block in PROGRAMS if "compiled" in block.words]
IN_A_RANK = [block for block in PROGRAMS if not block.ranks and block not in ALONE]
GPU = [block for block in PYTHON if "gpu" in block.words]


def file_of(block: Block, folder: Path) -> str:
    path = folder / "program.py"
    path.write_text("\n" * (block.line - 1) + block.text, encoding="utf-8")
    return str(path)


def environment_of(block: Block) -> dict[str, str]:
    """Of a block that is marked so, with the first config of what would be tuned in many keys."""
    return {"TRITON_DIST_AUTOTUNE": "0"} if "untuned" in block.words else {}


def run_alone(block: Block, folder: Path, environment: dict[str, str]) -> str:
    """What a terminal shows of the block as a program of its own; fails with that too."""
    command = [sys.executable, "-u", file_of(block, folder)]
    environment = environment | {"PYTHONPATH": str(ROOT / "python")}
    result = subprocess.run(
        command,
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=200, check=False,
    )  # fmt: skip
    if result.returncode:
        pytest.fail(f"{block.id} ended with status {result.returncode}:\n{result.stdout}")
    return result.stdout


@pytest.mark.parametrize("block", ON_RANKS, ids=lambda block: block.id)
def test_program_on_ranks(block: Block, spawn_ranks, tmp_path: Path) -> None:
    program, env = file_of(block, tmp_path), environment_of(block)
    printed = spawn_ranks(block.ranks, run_program, program, init=False, env=env)
    check_output(block, "".join(printed))


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("block", ON_RANKS, ids=lambda block: block.id)
def test_program_on_gpus(block: Block, spawn_ranks, tmp_path: Path) -> None:
    program, env = file_of(block, tmp_path), environment_of(block)
    printed = spawn_ranks(block.ranks, run_program, program, init=False, device="cuda", env=env)
    check_output(block, "".join(printed))


@pytest.fixture(scope="module")
def process() -> Iterator[RankPool]:
    """One process for all programs that are interpreted and start no ranks."""
    with RankPool(1, init=False, poison_empty=False) as pool:
        yield pool


@pytest.mark.parametrize("block", IN_A_RANK, ids=lambda block: block.id)
def test_program(block: Block, process: RankPool, tmp_path: Path, monkeypatch) -> None:
    program = file_of(block, tmp_path)
    if "spawn_ranks(" in block.text:  # in this process, whose server forks ranks without imports
        monkeypatch.setattr(sys, "argv", [])
        monkeypatch.setattr(sys, "path", sys.path[:])
        check_output(block, run_program(program))
    else:
        check_output(block, *process.run(run_program, program, timeout=200))


@pytest.fixture(scope="module")
def compiling() -> Iterator[RankPool]:
    """Return the process of programs whose kernels are compiled."""
    env = {"TRITON_INTERPRET": "0"}
    with RankPool(1, env, init=False, poison_empty=False) as pool:
        yield pool


@pytest.mark.parametrize("block", ALONE, ids=lambda block: block.id)
def test_program_compiled(block: Block, compiling: RankPool, tmp_path: Path) -> None:
    program = file_of(block, tmp_path)
    check_output(block, *compiling.run(run_program, program, timeout=200))


def test_ranks_of_tests_have_the_environment_of_scripts_python(spawn_ranks, tmp_path: Path) -> None:
    """Blocks that are interpreted run in ranks, which start sooner."""
    printed = environment_of_scripts_python(tmp_path)
    (in_rank,) = spawn_ranks(1, environment)
    names = [name for name in printed if name.startswith(("TRITON_", "OMP_", "CUDA_"))]
    assert {name: in_rank.get(name) for name in names} == {name: printed[name] for name in names}
    extra = {name for name in in_rank.keys() - printed.keys() if name.startswith("TRITON_")}
    assert not extra


def environment() -> dict[str, str]:
    return dict(os.environ)


@pytest.mark.parametrize("page", sorted({block.page for block in ALONE}), ids=name)
def test_a_page_with_compiled_programs_names_the_command(page: Path) -> None:
    assert "TRITON_INTERPRET=0 scripts/python" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", sorted({block.page for block in GPU}), ids=name)
def test_a_page_with_programs_for_gpus_says_so(page: Path) -> None:
    assert re.search(r"needs (an NVIDIA GPU|NVIDIA GPUs)", prose(page))


@pytest.mark.gpu
@pytest.mark.parametrize("block", GPU, ids=lambda block: block.id)
def test_gpu_program(block: Block, tmp_path: Path) -> None:
    check_output(block, run_alone(block, tmp_path, dict(os.environ)))


@pytest.mark.parametrize("block", GPU, ids=lambda block: block.id)
def test_gpu_program_compiles(block: Block) -> None:
    compile(block.text, block.id, "exec")
