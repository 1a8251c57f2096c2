"""First results of a process: what is compiled and tuned for them, and how long each takes.

Prints one line of JSON. The clock of an op starts with its first call, after imports,
``initialize_distributed`` and the first tensor on the GPU.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

import triton_dist
from triton_dist import tune
from triton_dist._tuning import compose
from triton_dist.kernels.nvidia import ag_gemm, create_ag_gemm_context, matmul
from triton_dist.utils import finalize_distributed, initialize_distributed

M, N, K = 128, 1024, 1024


@triton_dist.jit
def scale(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


@tune.autotune([{"BLOCK": 256}, {"BLOCK": 1024}], key_fn=lambda x: x.numel(), version="1")
def scaled(x, BLOCK):
    y = torch.empty_like(x)
    scale[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK=BLOCK)
    return y


spent: Counter[str] = Counter()
"""Milliseconds by what took them, and numbers of kernels."""


def timed(name: str, call: Callable[[], Any]) -> Any:
    begin = time.perf_counter()
    try:
        return call()
    finally:
        spent[name] += 1e3 * (time.perf_counter() - begin)


def watch() -> None:
    """Count kernels, and time parts of the first calls."""
    cache, runtime = triton.runtime.cache, triton.knobs.runtime
    hashed, digested, begun = cache.triton_key, compose.sources_of, []
    cache.triton_key = lambda: timed("hash Triton's files", hashed)
    compose.sources_of = lambda *of: timed("digest sources", lambda: digested(*of))
    before = triton.knobs.compilation.listener

    def listen(*, cache_hit: bool, **details: Any) -> None:
        spent["found" if cache_hit else "compiled"] += 1
        if before is not None:
            before(cache_hit=cache_hit, **details)

    def loaded(*_: Any) -> None:
        spent["load"] += 1e3 * (time.perf_counter() - begun.pop())

    triton.knobs.compilation.listener = listen
    runtime.kernel_load_start_hook.add(lambda *_: begun.append(time.perf_counter()))
    runtime.kernel_load_end_hook.add(loaded)


def finished(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    result = call()
    torch.cuda.synchronize()
    return result


def main() -> None:
    initialize_distributed(1)
    torch.empty(1, device="cuda")
    A = torch.randn(M, K, dtype=torch.float16, device="cuda")
    B = torch.randn(K, N, dtype=torch.float16, device="cuda")
    x = torch.randn(1 << 16, device="cuda")
    expected = {"matmul": A @ B, "ag_gemm": A @ B, "scaled": 2 * x}
    torch.cuda.synchronize()
    watch()
    ops: dict[str, Any] = {}
    with create_ag_gemm_context(M, N, K, torch.float16, rank=0, num_ranks=1) as ctx:
        for op, arguments in ((ag_gemm, (A, B, ctx)), (matmul, (A, B)), (scaled, (x,))):
            spent.clear()
            name = op.__name__
            result = timed("first", lambda op=op, args=arguments: finished(lambda: op(*args)))
            timed("again", lambda op=op, args=arguments: finished(lambda: op(*args)))
            is_right = torch.allclose(result, expected[name], rtol=1e-2, atol=0.5)
            ops[name] = {**spent, "tunings": op.num_tunings, "is_right": is_right}
    print(json.dumps(ops))
    finalize_distributed()


if __name__ == "__main__":
    main()
