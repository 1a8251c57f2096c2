"""Tune a function: python examples/tune_a_function.py

Attention over a long sequence needs a [queries, keys] matrix of scores, which may not fit into
memory. So it is computed in blocks of queries; the best number of blocks depends on shape and
device. The program runs on a GPU or on the CPU. It has no Triton kernel, so nothing is interpreted.
"""

from __future__ import annotations

import argparse

import torch

from triton_dist.tune import autotune, bucket
from triton_dist.utils import is_cuda, rand_tensor


def key_fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[object, ...]:
    """Return the tuning key. Lengths that round up to the same power of two share a tuning."""
    return bucket(q.shape[0]), bucket(k.shape[0]), q.shape[1], q.dtype


def prune_fn(config: dict[str, int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Keep configs whose blocks have at least one query."""
    return config["blocks"] <= q.shape[0]


def check_fn(output: torch.Tensor, reference: torch.Tensor) -> bool:
    return torch.allclose(output, reference, rtol=1e-3, atol=1e-3)


@autotune(
    [{"blocks": blocks} for blocks in (1, 2, 4, 8, 16)],
    key_fn,
    prune_fn,
    check_fn=check_fn,
    max_seconds=30,
)
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return softmax(q @ k.T) @ v for q [queries, width], k and v [keys, width], in blocks of q."""
    return torch.cat([torch.softmax(part @ k.T, dim=1) @ v for part in q.chunk(blocks)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=1000)
    length = parser.parse_args().length
    device = "cuda" if is_cuda() else "cpu"
    q, k, v = (rand_tensor([length, 64], torch.float32, device) for _ in range(3))
    expected = torch.softmax(q @ k.T, dim=1) @ v
    output = attention(q, k, v, autotune_verbose=True)
    torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-3)
    print(f"{length} tokens on {device}: {attention.best_config(q, k, v)}")


if __name__ == "__main__":
    main()
