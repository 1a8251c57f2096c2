"""``import triton_dist`` works anywhere and does nothing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import triton_dist
from tests.architecture.source import ROOT
from triton_dist.errors import TritonDistWarning

PROGRAM = """
import os, pickle, sys

def forget():
    for name in [name for name in sys.modules if name.split(".")[0] in ("triton_dist", "kernels")]:
        del sys.modules[name]

import triton_dist
assert not {"torch", "triton", "numpy"} & set(sys.modules)

def check_jit(kind):
    import kernels, triton_dist, triton_dist.jit as three
    from triton_dist import jit as four
    assert one is two is three is four is triton_dist.jit is pickle.loads(pickle.dumps(one))
    assert type(kernels.kernel).__name__ == kind

one = triton_dist.jit
from triton_dist.jit import jit as two
check_jit("JITFunction")
import triton_dist.kernels.nvidia
assert {"triton_dist.tune", "triton_dist.language"} <= set(sys.modules)
import torch, triton
assert not torch.cuda.is_initialized()
assert not torch.distributed.is_initialized()
assert triton.runtime.driver._active is None
forget()
os.environ["TRITON_INTERPRET"] = "1"
from triton_dist.jit import jit as one
import triton_dist
two = triton_dist.jit
check_jit("InterpretedFunction")
"""


def test_importing_touches_no_device_no_group_and_no_file(tmp_path: Path) -> None:
    """``import triton_dist`` needs neither torch nor triton. ``triton_dist.jit`` is one object, the
    decorator and the module, whichever import comes first."""
    kernel = "from triton_dist.jit import jit\n\n@jit\ndef kernel(x_ptr):\n    pass\n"
    (tmp_path / "kernels.py").write_text(kernel)
    path = f"{ROOT / 'python'}:{tmp_path}"
    home = tmp_path / "home"
    home.mkdir()
    result = subprocess.run(
        [sys.executable, "-B", "-W", "error", "-c", PROGRAM], cwd=home, capture_output=True,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "CUDA_VISIBLE_DEVICES": "",
             "PYTHONPATH": path},
        text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert list(home.iterdir()) == []


def test_a_second_distribution_in_the_folder_is_a_warning(tmp_path: Path) -> None:
    package = tmp_path / "triton_dist"
    package.mkdir()
    shutil.copy(triton_dist.__file__, package)
    spec = importlib.util.spec_from_file_location("copied", package / "__init__.py")
    (tmp_path / "triton_dist_tuner-0.1.0.dist-info").mkdir()
    spec.loader.exec_module(importlib.util.module_from_spec(spec))  # warnings are errors
    (tmp_path / "triton_dist-3.4.0.dist-info").mkdir()
    with pytest.warns(TritonDistWarning, match=r"another distribution, triton_dist 3\.4\.0"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
