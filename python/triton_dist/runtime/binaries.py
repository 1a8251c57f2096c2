"""Resources and machine code of a cubin, by the programs of CUDA that come with Triton."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile

import triton


@functools.lru_cache(maxsize=256)
def resource_usage(cubin: bytes) -> tuple[int, int]:
    """(registers per thread, bytes of local memory per thread) of the one kernel in ``cubin``.

    About 5 ms.
    """
    report = _cuobjdump("-res-usage", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    if found is None:
        raise RuntimeError(f"cuobjdump -res-usage printed no register count, but:\n{report}")
    return int(found[1]), int(found[2])


@functools.lru_cache(maxsize=16)
def sass(cubin: bytes) -> str:
    """The machine code in ``cubin``, as text. About 0.3 s."""
    return _cuobjdump("-sass", cubin)


def _cuobjdump(option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
