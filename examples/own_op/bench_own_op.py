"""Time the tuned op next to its baselines: torchrun --nproc-per-node=2 bench_own_op.py

Without a GPU (TRITON_INTERPRET=1), small shapes run in the interpreter; times are not meaningful.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from own_op.opinfo import SHARDED_RMS_NORM as INFO
from triton_dist.testing.timing import capture_graph, time_interleaved
from triton_dist.utils import dist_print, finalize_distributed, initialize_distributed, is_cuda


def main() -> None:
    initialize_distributed()
    num_ranks = dist.get_world_size()
    for shape in INFO.shapes:
        shape = shape if is_cuda() else INFO.smaller(shape, 128, num_ranks)
        dtype = torch.bfloat16 if is_cuda() else torch.float32
        with INFO.context(shape, dtype) as ctx:
            operands = INFO.operands(shape, dtype, num_ranks)
            args, kwargs = INFO.arguments(operands, ctx)
            INFO.op(*args, **kwargs)  # tune before the capture
            calls = {INFO.name: lambda: INFO.op(*args, **kwargs)}  # noqa: B023  # called here
            calls |= {name: each.call for name, each in INFO.baselines(operands, ctx).items()}
            samples = time_interleaved({name: capture_graph(call) for name, call in calls.items()})
        times = ", ".join(f"{name} {each.median:.3f} ms" for name, each in samples.items())
        dist_print(f"{shape}: {times}", allowed_ranks=[0])
    finalize_distributed()


if __name__ == "__main__":
    main()
