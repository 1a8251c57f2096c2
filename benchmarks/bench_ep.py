"""Compare expert-parallel dispatch and combine with NCCL, in CUDA graphs.

    bash scripts/launch.sh benchmarks/bench_ep.py --quick
    bash scripts/launch.sh benchmarks/bench_ep.py --rows decode --json ep.json
    bash scripts/launch.sh benchmarks/bench_ep.py --tokens 1,32,777 --routing zipf --topk 8
    bash scripts/launch.sh benchmarks/bench_ep.py --tokens-random 60 --best 4 --json random.json \
        --routing even,zipf,same_experts --minutes 9

A dispatch is timed from ``topk_ids`` to rows, sorted by expert, that a grouped GEMM can read. A
combine is timed from the experts' products to each token's sum. There are two baselines: NCCL's
all-gather and reduce-scatter, and NCCL's all-to-all. The row counts of the all-to-all are computed
before; in a program the host would have to wait for them. Both baselines include our launch that
computes the order of the rows (the layout).

The link time is the time for the bytes that rank 0 sends, or receives if these are more, at --link
GB/s. The memory time is the time for the bytes that rank 0 reads and writes, at --memory GB/s.
Every result is compared with the all-gather's. Calls are interleaved, with a cold L2 cache; a
sample is the slowest rank's time.

At the end, the worst and the mean speed relative to each baseline are printed. Each row is written
to --json immediately, and the same command resumes.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from overlap.any_m import random_sizes

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.nvidia import create_ep_context, ep_combine, ep_dispatch
from triton_dist.kernels.nvidia.expert_parallel import Received
from triton_dist.kernels.nvidia.expert_parallel.algorithms import (
    DISPATCH,
    DispatchCall,
)
from triton_dist.kernels.nvidia.expert_parallel.combine import COMBINE, CombineCall
from triton_dist.runtime.device import current_device
from triton_dist.testing.timing import Samples, capture_graph, time_interleaved
from triton_dist.utils import finalize_distributed, initialize_distributed, is_cuda

ALL_GATHER, ALL_TO_ALL = "all-gather", "all-to-all"


@dataclass(frozen=True)
class Row:
    """Sizes of a measurement; ``tokens`` is the number of tokens of each rank."""

    tokens: int
    hidden: int
    experts: int
    topk: int
    fp8: bool = False
    routing: str = "even"

    def __str__(self) -> str:
        kind = "fp8" if self.fp8 else "bf16"
        return f"{self.tokens}x{self.hidden} E{self.experts} top-{self.topk} {kind} {self.routing}"


ROWS = {
    "kraken": [Row(4096, 4096, 8, 1)],
    "prefill": [
        Row(4096, 7168, 256, topk, fp8) for topk in (2, 8) for fp8 in (False, True)
    ],
    "decode": [Row(tokens, 7168, 256, 8, True) for tokens in (1, 8, 32, 128)],
}  # fmt: skip


def draw_ids(row: Row, rank: int) -> torch.Tensor:
    """Return random ids [tokens, topk]; the experts of a token differ."""
    device = current_device().torch_device
    generator = torch.Generator(device).manual_seed(rank)
    if row.routing == "same_experts":
        return torch.arange(row.topk, device=device, dtype=torch.int32).repeat(row.tokens, 1)
    if row.topk == 1 and row.routing == "even":
        number = torch.randperm(row.tokens, device=device, generator=generator)
        return (number % row.experts).int()[:, None]
    weights = torch.ones(row.experts, device=device)
    if row.routing == "zipf":
        weights = torch.arange(1, row.experts + 1, device=device).float() ** -1.2
    drawn = torch.multinomial(weights.expand(row.tokens, -1), row.topk, generator=generator)
    return drawn.int()


def sent_and_received_tokens(received: Received) -> tuple[Any, Any, list[list[int]]]:
    """Return (peer, token) of each row that this rank sends and of each row that it
    receives, and the numbers of sent and received rows by peer."""
    num_ranks, tokens = received.ctx.num_ranks, received.tokens
    peers = torch.arange(num_ranks, device=received.destinations.device)[:, None]
    sends = (received.destinations[:tokens][None, :] >> peers) & 1
    arrives = (received.position_of_route >= 0).any(1).view(num_ranks, -1)
    splits = torch.stack([sends.sum(1), arrives.sum(1)]).tolist()
    return sends.nonzero(as_tuple=True), arrives.nonzero(as_tuple=True), splits


def configs(algorithms: Any, quick: bool, best: int) -> list[dict[str, Any]]:
    """Return the configs of our algorithms to measure."""
    space = [each for each in algorithms.config_space() if each["algorithm"] != "collective"]
    if quick:
        space = [each for each in space if each["block_bytes"] in (8192, 16384)]
        space = [each for each in space if each["num_ctas"] in (128, 160, 192, 256)]
    return space[:best] if best else space


def config_text(config: Mapping[str, Any]) -> str:
    return " ".join(str(value) for value in config.values())


class Measurement:
    """Operands, calls and bounds of a row."""

    def __init__(self, row: Row, options: argparse.Namespace) -> None:
        self.row, self.options = row, options
        rank, size = dist.get_rank(), dist.get_world_size()
        device = current_device().torch_device
        self.group = dist.group.WORLD
        self.ctx = create_ep_context(
            rank, size, size, row.tokens, row.hidden, row.experts, row.topk, torch.bfloat16
        )
        self.x = torch.randn(row.tokens, row.hidden, device=device, dtype=torch.bfloat16)
        self.ids = draw_ids(row, rank)
        self.weights = torch.rand(row.tokens, row.topk, device=device)
        self.kwargs = {"quantise": row.fp8, "max_tokens": row.tokens}
        self.received = self.dispatch(algorithm="collective")
        positions = self.received.num_positions()
        self.y = torch.randn(positions, row.hidden, device=device, dtype=torch.bfloat16)
        sends, arrives, self.splits = sent_and_received_tokens(self.received)
        self.send_order, self.recv_order = sends, arrives
        self.partial = CombineCall(self.y, self.received, self.ctx, algorithm="collective")
        self.out = torch.empty_like(self.x)

    def dispatch(self, **config: Any) -> Received:
        return ep_dispatch.fn(self.x, self.ids, self.ctx, self.weights, **self.kwargs, **config)

    def combine(self, **config: Any) -> torch.Tensor:
        return ep_combine.fn(self.y, self.received, self.ctx, **config)

    def bytes(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return this rank's link and memory bytes, in a dispatch and in a combine."""
        row, rank = self.row, dist.get_rank()
        wire = row.hidden + 4 * -(-row.hidden // 128) if row.fp8 else 2 * row.hidden
        sent, received = (
            sum(n for peer, n in enumerate(each) if peer != rank) for each in self.splits
        )
        remote, rows = max(sent, received), sum(self.splits[1])
        routes, tokens = len(self.y), row.tokens
        dispatch = {"link": remote * wire, "memory": tokens * row.hidden * 2 + rows * wire}
        combine = {
            "link": remote * row.hidden * 2,
            "memory": (routes + sent + received + tokens) * row.hidden * 2,
        }
        return dispatch, combine

    def all_to_all_dispatch(self) -> torch.Tensor:
        """Return rows by NCCL's all-to-all with known row counts; also launch our layout kernel."""
        rows = self.x[self.send_order[1]]
        if self.row.fp8:
            # NCCL sends as many bytes as for fp8. The time of quantising is not measured.
            rows = rows.view(torch.uint8)[:, : self.row.hidden]
            rows = rows.contiguous()
        arrived = rows.new_empty((sum(self.splits[1]), rows.shape[1]))
        dist.all_to_all_single(arrived, rows, self.splits[1], self.splits[0], group=self.group)
        self.compute_layout()
        return arrived

    def compute_layout(self) -> None:
        """Launch our kernel that exchanges ids and computes the layout, without sending rows."""
        call = DispatchCall(self.x, self.ids, self.ctx, self.weights, **self.kwargs)
        call.launch_kernel(self.received.layout, num_copy=0)

    def all_to_all_combine(self) -> torch.Tensor:
        """Return each token's sum by NCCL's all-to-all with known row counts."""
        (_, token), (origin, row) = self.send_order, self.recv_order
        sums = self.partial.partial_sums()[origin * self.row.tokens + row]
        arrived = sums.new_empty((len(token), sums.shape[1]))
        dist.all_to_all_single(arrived, sums, self.splits[0], self.splits[1], group=self.group)
        out = torch.zeros_like(self.x, dtype=torch.float32)
        return out.index_add_(0, token, arrived.float()).to(self.x.dtype)

    def run(self, log: Callable[[str], None]) -> dict[str, Any]:
        """Check, capture and time all calls."""
        options = self.options
        limits = dict(zip(("dispatch", "combine"), self.bytes(), strict=True))
        result: dict[str, Any] = {"row": asdict(self.row)}
        for name, algorithms, call in (
            ("dispatch", DISPATCH, self.dispatch), ("combine", COMBINE, self.combine),
        ):  # fmt: skip
            calls: dict[str, Callable[[], Any]] = {}
            reference = self.summary(call(algorithm="collective"))
            for config in configs(algorithms, options.quick, options.best):
                try:
                    found = self.summary(call(**config))
                except InvalidArgument:  # on every rank: the row is too large for the algorithm
                    continue
                error = self.error(found, reference)
                if error > 0.05:
                    log(f"  WRONG {name} {config_text(config)}: {error:.3g}")
                    continue
                calls[config_text(config)] = lambda c=call, k=config: c(**k)
            calls[ALL_GATHER] = lambda c=call: c(algorithm="collective")
            calls[ALL_TO_ALL] = (
                self.all_to_all_dispatch if name == "dispatch" else self.all_to_all_combine
            )
            graphs = {each: capture_graph(calls[each]) for each in calls}
            samples = time_interleaved(graphs, options.rounds)
            result[name] = self.report(name, samples, limits[name], log)
            del graphs
        self.ctx.check()
        return result

    def summary(self, found: Any) -> torch.Tensor:
        """Return values that must be equal for all algorithms: rows in sorted order, or sums."""
        if isinstance(found, torch.Tensor):
            return found.float()
        index = found.row_of_position[: found.num_positions()].long()
        rows = found.rows[index].float()
        if found.scales is not None:
            rows = rows * found.scales[index].repeat_interleave(128, 1)[:, : rows.shape[1]]
        return rows

    @staticmethod
    def error(found: torch.Tensor, reference: torch.Tensor) -> float:
        difference = (found - reference).abs().max() if found.numel() else found.new_zeros(())
        worst = difference / reference.abs().max().clamp(min=1e-6) if found.numel() else difference
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return float(worst.nan_to_num(nan=1e9))

    def report(
        self,
        name: str,
        samples: Mapping[str, Samples],
        nbytes: Mapping[str, float],
        log: Callable[[str], None],
    ) -> dict[str, Any]:
        bounds = {
            "link": nbytes["link"] / self.options.link / 1e3,
            "memory": nbytes["memory"] / self.options.memory / 1e3,
        }
        times = {each: sample.median * 1e3 for each, sample in samples.items()}
        ours = {each: t for each, t in times.items() if each not in (ALL_GATHER, ALL_TO_ALL)}
        best = min(ours, key=ours.__getitem__) if ours else ALL_GATHER
        least = max(bounds.values())
        log(
            f"  {name:8} {times[best]:7.1f} us ({best}); link {bounds['link']:.1f}, memory "
            f"{bounds['memory']:.1f}, {times[best] / max(least, 1e-3):.2f} x limit; "
            f"all-gather {times[ALL_GATHER]:.1f} ({times[ALL_GATHER] / times[best]:.2f} x), "
            f"all-to-all {times[ALL_TO_ALL]:.1f} ({times[ALL_TO_ALL] / times[best]:.2f} x)"
        )
        if self.options.verbose:
            for each, microseconds in sorted(times.items(), key=lambda item: item[1]):
                log(f"      {microseconds:7.1f} {each}")
        return {"bounds": bounds, "times": times, "best": best}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default=",".join(ROWS), help="some of: %(default)s")
    parser.add_argument("--tokens", help="measure these numbers of tokens instead, 1,32,777")
    parser.add_argument("--tokens-random", type=int, metavar="N", help="measure N random numbers")
    parser.add_argument("--most", type=int, default=4096, help="largest random number of tokens")
    parser.add_argument("--seed", type=int, default=0, help="seed of --tokens-random")
    parser.add_argument("--minutes", type=float, help="start no row after this time")
    parser.add_argument("--routing", default="even", help="some of even,zipf,same_experts")
    for_tokens = "with --tokens or --tokens-random: "
    parser.add_argument("--topk", type=int, default=8, help=f"{for_tokens}experts of a token")
    parser.add_argument("--fp8", action="store_true", help=f"{for_tokens}send tokens in fp8")
    parser.add_argument("--quick", action="store_true", help="few configs")
    parser.add_argument("--best", type=int, default=0, help="number of configs; 0: all")
    parser.add_argument("--rounds", type=int, default=25 if is_cuda() else 1)
    parser.add_argument(
        "--link", type=float, default=375.0, help="GB/s of a GPU's links in one direction"
    )
    parser.add_argument("--memory", type=float, default=3900.0, help="GB/s of a GPU's memory")
    parser.add_argument("--limit", type=int, default=300, help="seconds per row")
    parser.add_argument("--scale", type=int, default=1 if is_cuda() else 64, help="divide sizes")
    parser.add_argument("--verbose", action="store_true", help="list every config")
    parser.add_argument("--json", type=Path, help="file for the results; resumed")
    return parser.parse_args(arguments)


def rows_of(options: argparse.Namespace) -> list[Row]:
    """Return the rows to measure."""
    tokens = [int(text) for text in options.tokens.split(",")] if options.tokens else []
    if options.tokens_random:
        tokens += random_sizes(options.tokens_random, options.most, options.seed)
    if tokens:
        rows = [Row(number, 7168, 256, options.topk, options.fp8) for number in tokens]
    else:
        rows = [row for name in options.rows.split(",") for row in ROWS[name]]
    rows = [replace(row, routing=each) for row in rows for each in options.routing.split(",")]
    scale = options.scale
    return [
        replace(row, tokens=max(1, row.tokens // scale), hidden=row.hidden // min(scale, 16))
        for row in rows
    ]


def value_of_rank_0(value: Any) -> Any:
    """Return the value of rank 0."""
    values = [value]
    dist.broadcast_object_list(values, 0)
    return values[0]


def summary(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for dispatch and combine, and each baseline: speed relative to the baseline."""
    for name in ("dispatch", "combine"):
        for baseline in (ALL_GATHER, ALL_TO_ALL):
            ratios = {}
            for result in results:
                times, best = result[name]["times"], result[name]["best"]
                ratios[str(Row(**result["row"]))] = times[baseline] / times[best]
            worst = min(ratios, key=ratios.__getitem__)
            few = sum(ratio < 0.98 for ratio in ratios.values())
            yield (
                f"{name}, {baseline}: worst {ratios[worst]:.2f} x ({worst}), geometric mean "
                f"{statistics.geometric_mean(ratios.values()):.2f} x, {few} of {len(ratios)} below "
                "0.98 x"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    initialize_distributed()
    is_first, results, start = dist.get_rank() == 0, [], time.perf_counter()
    if options.json is not None and options.json.exists():
        results = json.loads(options.json.read_text(encoding="utf-8"))
    results = value_of_rank_0(results)

    def log(text: str) -> None:
        if is_first:
            print(text, flush=True)

    for row in rows_of(options):
        if asdict(row) in [result["row"] for result in results]:
            continue
        if value_of_rank_0(time.perf_counter() - start) > 60 * (options.minutes or math.inf):
            break
        # A rank that hangs prints its stacks and ends.
        faulthandler.dump_traceback_later(options.limit, exit=True, file=sys.__stderr__)
        begin = time.perf_counter()
        log(f"{row}, {dist.get_world_size()} ranks")
        measurement = Measurement(row, options)
        results.append(measurement.run(log))
        measurement.ctx.finalize()
        del measurement
        faulthandler.cancel_dump_traceback_later()
        log(f"  {time.perf_counter() - begin:.0f} s")
        if is_first and options.json is not None:
            options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for line in summary(results):
        log(line)
    finalize_distributed()


if __name__ == "__main__":
    main()
