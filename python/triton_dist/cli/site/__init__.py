"""A ``PYTHONPATH`` folder whose ``sitecustomize`` records what a program compiles and calls."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import triton_dist
from triton_dist import knobs


def run(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run ``command`` with this folder first in ``PYTHONPATH``. Return its exit status."""
    environment = knobs.environment()
    package = str(Path(triton_dist.__file__).parents[1])
    paths = [str(Path(__file__).parent), environment.get("PYTHONPATH", ""), package]
    path = {"PYTHONPATH": os.pathsep.join(each for each in paths if each)}
    return subprocess.run(command, env={**environment, **variables, **path}).returncode
