"""Compare decode attention over ranks with PyTorch's attention and NCCL, in CUDA graphs.

    bash scripts/launch.sh benchmarks/bench_decode_attn.py --quick
    bash scripts/launch.sh benchmarks/bench_decode_attn.py --rows 32768:96/12:1,8192:mla:8 --verbose

A row is tokens of a sequence per rank, heads / KV heads, and number of sequences. ``mla`` is 16
heads whose keys are a latent of 512 elements and 64 rotary elements. The limit is the time to read
a rank's keys and values at the measured read rate, plus 10 us for the launch and the exchange.
Calls are interleaved, with a cold L2 cache; a sample is the slowest rank's time. The result of
every config is compared with the first config's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from triton_dist.kernels.nvidia import create_sp_decode_context, sp_decode_attn
from triton_dist.kernels.nvidia.decode_attention.algorithms import ALGORITHMS, Call
from triton_dist.runtime.device import current_device
from triton_dist.testing.timing import capture_graph, time_interleaved
from triton_dist.utils import finalize_distributed, initialize_distributed, is_cuda

FIXED_US = 10.0
LIBRARY = ("library", "library_reduce_scatter")
HEADS = {"96/12": (96, 12, 128, 128), "32/8": (32, 8, 128, 128), "mla": (16, 1, 576, 512)}


@dataclass(frozen=True)
class Row:
    """A measurement: tokens of a sequence on each rank, key of ``HEADS``, and sequences."""

    tokens: int
    heads: str
    batch: int

    def __str__(self) -> str:
        return f"{self.tokens}:{self.heads}:{self.batch}"

    @property
    def kv_bytes(self) -> int:
        _, kv_heads, dim, v_dim = HEADS[self.heads]
        width = dim if self.heads == "mla" else dim + v_dim
        return self.batch * self.tokens * kv_heads * width * 2


def all_rows(most_bytes: int) -> Iterator[Row]:
    for heads in HEADS:
        for tokens in (8192, 32768, 131072):
            for batch in (1, 8, 64):
                row = Row(tokens, heads, batch)
                if row.kv_bytes <= most_bytes:
                    yield row


QUICK = [Row(8192, "96/12", 1), Row(32768, "96/12", 1), Row(8192, "32/8", 8), Row(8192, "mla", 8)]


def read_rate() -> float:
    """Return the measured rate of reading memory in bytes per us."""
    elements = 2**29 if is_cuda() else 2**16
    memory = torch.ones(elements, device=current_device().torch_device)
    samples = time_interleaved({"sum": capture_graph(lambda: memory.sum())}, 10 if is_cuda() else 1)
    return memory.nbytes / (samples["sum"].median * 1e3)


def random_cache(*shape: int) -> torch.Tensor:
    """Return random bf16 values, drawn in place because caches are large."""
    device = current_device().torch_device
    cache = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return cache.normal_() if is_cuda() else cache.uniform_()


class Measurement:
    """Operands and calls of a row."""

    def __init__(self, row: Row, page: int) -> None:
        heads, kv_heads, dim, v_dim = HEADS[row.heads]
        rank, size = dist.get_rank(), dist.get_world_size()
        device = current_device().torch_device
        self.row, self.heads = row, heads
        self.ctx = create_sp_decode_context(
            rank, size, size, row.batch, heads, dim, torch.bfloat16, v_head_dim=v_dim
        )
        generator = torch.Generator(device).manual_seed(0)
        q = torch.randn(row.batch, heads, dim, device=device, generator=generator)
        blocks, table = (row.batch, row.tokens), None
        if page:
            pages = row.tokens // page
            blocks = (row.batch * pages, page)
            table = torch.randperm(row.batch * pages, device=device).int().view(row.batch, pages)
        k = random_cache(*blocks, kv_heads, dim)
        v = None if row.heads == "mla" else random_cache(*blocks, kv_heads, v_dim)
        lens = torch.full((size, row.batch), row.tokens, dtype=torch.int32, device=device)
        self.args = (q.bfloat16(), k, v, lens, self.ctx, table)

    def call(self, **config: Any) -> torch.Tensor:
        return sp_decode_attn.fn(*self.args, **config)[0]

    def configs(self, quick: bool) -> Iterator[dict[str, Any]]:
        key = Call(*self.args).key
        for config in ALGORITHMS.config_space():
            if config["algorithm"] == "reduce_scatter" and quick:
                continue
            if ALGORITHMS[config["algorithm"]].fits(config, key):
                yield config

    def run(self, options: argparse.Namespace, rate: float) -> dict[str, Any]:
        """Check, capture and time all configs."""
        reference, calls = None, dict[str, Callable[[], Any]]()
        begin = time.monotonic()
        seen: dict[str, int] = {}
        for config in self.configs(options.quick):
            name = " ".join(map(str, config.values()))
            algorithm = config["algorithm"]
            if options.best and seen.get(algorithm, 0) >= options.best:
                continue
            if value_of_rank_0(time.monotonic() - begin) > options.limit:
                break
            try:
                found = self.call(**config).float()
                failed = ""
            except Exception as error:
                failed = f"{type(error).__name__}: {error}"
            if any(gather_from_all_ranks(failed)):
                log(f"  {name}: {failed}")
                continue
            seen[algorithm] = seen.get(algorithm, 0) + 1
            reference = found if reference is None else reference
            error = float((found - reference).abs().max() / reference.abs().max())
            if max(gather_from_all_ranks(error)) > 0.02 or error != error:
                log(f"  WRONG {name}: {error:.3g}")
                continue
            calls[name] = capture_graph(lambda c=config: self.call(**c))
        samples = time_interleaved(calls, options.rounds)
        self.ctx.check()
        times = {name: sample.median * 1e3 for name, sample in samples.items()}
        ours = {name: t for name, t in times.items() if name.split()[0] not in LIBRARY}
        theirs = {name: t for name, t in times.items() if name not in ours}
        best = min(ours, key=ours.__getitem__)
        limit = self.row.kv_bytes / rate + FIXED_US
        library = min(theirs.values(), default=float("nan"))
        log(
            f"{self.row!s:16} {times[best]:8.1f} us ({best}); limit {limit:.1f}, "
            f"{times[best] / limit:.2f} x; library {library:.1f}, {library / times[best]:.2f} x"
        )
        shown = sorted(times.items(), key=lambda item: item[1])
        for name, each in shown[: len(shown) if options.verbose else 0]:
            log(f"      {each:8.1f} {name}")
        self.ctx.finalize()
        return {"row": asdict(self.row), "limit": limit, "times": times, "best": best}


def log(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def gather_from_all_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def value_of_rank_0(value: Any) -> Any:
    return gather_from_all_ranks(value)[0]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", help="tokens:heads:batch, separated by commas; default: all")
    parser.add_argument("--quick", action="store_true", help="four rows, without reduce_scatter")
    parser.add_argument("--page", type=int, default=0, help="tokens of a page; 0: no pages")
    parser.add_argument(
        "--best", type=int, default=0, help="number of configs of each algorithm; 0: all"
    )
    parser.add_argument(
        "--limit", type=float, default=60.0, help="seconds per row for checking configs"
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="start no row after this time")
    parser.add_argument("--most", type=float, default=55.0, help="GB of keys and values of a row")
    parser.add_argument("--rounds", type=int, default=15 if is_cuda() else 1)
    parser.add_argument("--verbose", action="store_true", help="list every config")
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser.parse_args(arguments)


def rows_of(options: argparse.Namespace) -> list[Row]:
    if options.rows:
        fields = [text.split(":") for text in options.rows.split(",")]
        return [Row(int(tokens), heads, int(batch)) for tokens, heads, batch in fields]
    return QUICK if options.quick else list(all_rows(int(options.most * 1e9)))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    initialize_distributed()
    begin, results = time.monotonic(), []
    rate = value_of_rank_0(read_rate())
    log(f"read rate {rate * 1e-3:.0f} GB/s")
    for row in rows_of(options):
        if value_of_rank_0(time.monotonic() - begin) > options.minutes * 60:
            break
        results.append(Measurement(row, options.page).run(options, rate))
        if options.json and dist.get_rank() == 0:
            options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    finalize_distributed()


if __name__ == "__main__":
    main()
