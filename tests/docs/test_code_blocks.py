"""Every code block of the documentation is executed.

``python`` blocks of a page run in order in one namespace and a process of their own; ``python
script`` is a program of its own; ``python ranks=2`` a program that is launched on so many ranks;
``python gpu`` needs a GPU, and elsewhere only has to compile. What a ``text output`` block after
one shows is what it prints, ``...`` standing for anything.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, Block, all_blocks, blocks, name, pages
from tests.docs.run_blocks import check_output, run_page


def parts(page: Path) -> list[Block]:
    """The blocks of the page's one program."""
    python = [block for block in blocks(page) if block.language == "python"]
    return [block for block in python if not block.is_program and "gpu" not in block.words]


PROGRAMS = [page for page in pages() if parts(page)]
FOR_GPUS_TOO = [page for page in PROGRAMS if any("is_cuda" in part.text for part in parts(page))]


def run(page: Path, spawn_ranks, folder: Path, device: str) -> None:
    program = [(block.line, block.text) for block in parts(page)]
    path = str(folder / f"{page.stem}.py")
    options = {"init": False, "poison_empty": False, "device": device}
    (printed,) = spawn_ranks(1, run_page, path, program, **options)
    for block, output in zip(parts(page), printed, strict=True):
        check_output(block, output)


@pytest.mark.parametrize("page", PROGRAMS, ids=name)
def test_page(page: Path, spawn_ranks, tmp_path: Path) -> None:
    run(page, spawn_ranks, tmp_path, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("page", FOR_GPUS_TOO, ids=name)
def test_page_on_a_gpu(page: Path, spawn_ranks, tmp_path: Path) -> None:
    run(page, spawn_ranks, tmp_path, "cuda")


@pytest.mark.parametrize("block", all_blocks("bash"), ids=lambda block: block.id)
def test_commands_name_what_exists(block: Block) -> None:
    paths = re.findall(r"(?<![\w/.])(?:scripts|tests|examples|python|docs)/[\w./-]+", block.text)
    scripts = re.findall(r"launch\.sh (?:--\S+ )*(test_\w+\.py)", block.text)
    paths += [f"python/triton_dist/test/nvidia/{script}" for script in scripts]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = " ".join(re.findall(r"^make (.*)$", block.text, re.MULTILINE)).split()
    assert {word for word in named if "=" not in word} <= targets


def test_blocks_are_of_known_kinds() -> None:
    known = {"python", "bash", "text", "json", "console"}
    assert {block.language for page in pages() for block in blocks(page)} <= known
    python = all_blocks("python")
    words = {word for block in python for word in block.words if not block.ranks}
    assert words <= {"script", "gpu", "compiled"}
