"""``import triton_dist`` works anywhere and does nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

PACKAGES = ("triton_dist", "triton_dist.tune", "triton_dist.language", "triton_dist.kernels.nvidia")
"""The last imports the others."""


def run(code: str, home: Path) -> str:
    """What ``code`` prints in a fresh Python with an empty home, without variables or GPU."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "CUDA_VISIBLE_DEVICES": ""}
    prologue = f"import sys; sys.path.insert(0, {str(ROOT / 'python')!r})"
    result = subprocess.run(
        [sys.executable, "-B", "-W", "error", "-c", f"{prologue}\n{code}"],
        env=environment,
        cwd=home,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("package", [PACKAGES[0], PACKAGES[-1]])
def test_importing_touches_no_device_no_group_and_no_file(package: str, tmp_path: Path) -> None:
    assert (
        run(
            f"import {package}\n"
            f"assert {package == PACKAGES[0]} or {set(PACKAGES)} <= set(sys.modules)\n"
            "torch = sys.modules.get('torch')\n"
            "if torch is not None:\n"
            "    assert not torch.cuda.is_initialized()\n"
            "    assert not torch.distributed.is_initialized()\n"
            "triton = sys.modules.get('triton')\n"
            "if triton is not None:\n"
            "    assert triton.runtime.driver._active is None\n"
            "print('done')",
            tmp_path,
        )
        == "done\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_the_porch_imports_neither_torch_nor_triton(tmp_path: Path) -> None:
    loaded = run("import triton_dist; print(*sys.modules)", tmp_path).split()
    assert not {"torch", "triton", "numpy"} & set(loaded)


@pytest.mark.parametrize(
    ("interpreted", "first", "second"),
    [
        (
            False,
            "import triton_dist; one = triton_dist.jit",
            "from triton_dist.jit import jit as two",
        ),
        (
            True,
            "from triton_dist.jit import jit as one",
            "import triton_dist; two = triton_dist.jit",
        ),
    ],
)
def test_jit_is_the_decorator_and_a_module(
    interpreted: bool, first: str, second: str, tmp_path: Path
) -> None:
    """Whichever is imported first; one object, which is pickled by its name."""
    kernel = "from triton_dist.jit import jit\n\n@jit\ndef kernel(x_ptr):\n    pass\n"
    (tmp_path / "kernels.py").write_text(kernel)
    code = f"""
import os, pickle
if {interpreted}: os.environ["TRITON_INTERPRET"] = "1"
{first}
{second}
import triton_dist.jit as three
from triton_dist import jit as four
assert one is two is three is four is triton_dist.jit is pickle.loads(pickle.dumps(one))
import kernels
print(type(kernels.kernel).__name__)
"""
    kind = "InterpretedFunction" if interpreted else "JITFunction"
    assert run(code, tmp_path) == f"{kind}\n"
