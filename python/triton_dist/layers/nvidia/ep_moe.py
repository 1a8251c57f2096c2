"""Expert-parallel mixture-of-experts layer: each rank has some of the experts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad

from triton_dist.kernels.common.gemm.scales import BLOCK_ELEMENTS, num_scale_blocks
from triton_dist.layers.nvidia.expert_parallel import ep_experts, ep_experts_fp8
from triton_dist.layers.nvidia.fp8 import INPUT_SCALES, SCALES, is_silu, with_fp8_linears
from triton_dist.layers.nvidia.stock_weights import StockWeight
from triton_dist.layers.nvidia.tensor_parallel import Collectives, TensorParallel
from triton_dist.layers.nvidia.tp_moe import SHARED_EXPERT_NAMES, TP_MoE
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import Group


class EP_MoE(TP_MoE):
    """Experts of Qwen, Mixtral, DeepSeek-V3 and similar models, distributed over the ranks.

    ``TP_MoE`` describes parameters, routing and arguments. Rank r has the experts
    ``r * E / ranks`` to ``(r + 1) * E / ranks - 1``. E must be a multiple of the number of ranks.

    *Sequence-parallel* (default): each rank has different tokens. A token is sent to the ranks of
    its experts, and the token's weighted sum is sent back (``ep_dispatch``, ``ep_combine``).
    Ranks may have different numbers of tokens if ``forward`` is passed ``max_tokens``.
    *All-reduce*: all ranks have all tokens. Each rank runs its experts, and the results are summed
    over the ranks.

    With ``expert_tensor_parallel_size`` T > 1, T consecutive ranks share experts: each of them has
    1 / T of the intermediate size I of the same E * T / ranks experts. A token is sent to all T
    ranks of an expert, and their results are added. This serves models with fewer experts than
    ranks, and balances the load of ranks.

    Every rank has all shared experts, as a copy of the original module under its original name. On
    a GPU they run on a second stream during the exchange of tokens.

    With ``exact_sizes``, the host reads the number of received tokens and allocates memory for
    this number instead of the worst case. The call then cannot be captured in a CUDA graph.

    Attributes:
        gate_up_proj: [E * T / ranks, hidden, 2 * I / T].
        down_proj: [E * T / ranks, I / T, hidden].
    """

    def __init__(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        group: Group = None,
        autotune: bool = True,
        *,
        sequence_parallel: bool = True,
        exact_sizes: bool = False,
        expert_tensor_parallel_size: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(
            rank, world_size, group, autotune, sequence_parallel=sequence_parallel, **options
        )
        self._shared_expert_name, self.exact_sizes = "", exact_sizes
        size = self.num_column_shards = expert_tensor_parallel_size
        if size < 1 or self.world_size % size:
            expected = f"a divisor of the {self.world_size} ranks"
            raise self._invalid("expert_tensor_parallel_size", size, expected)

    def _init_parameters(self, module: torch.nn.Module, verbose: bool = False) -> None:
        """Copy this rank's experts of an MoE module, see ``TP_MoE``.

        Args:
            module: an MoE module that ``TP_MoE`` supports. It may also have ``shared_experts``, or
                ``shared_expert`` and ``shared_expert_gate``.
            verbose: print the shapes of the parameters.

        Raises:
            InvalidArgument: weights do not match or cannot be sharded, or the activation is not
                SiLU.
        """
        super()._init_parameters(module, verbose)
        if not is_silu(self.act_fn):
            raise self._invalid("experts.act_fn", self.act_fn, "SiLU")

    def _shard_sizes(self, num_experts: int, columns: int) -> tuple[int, int]:
        shards = self.num_column_shards
        # Each set of experts belongs to ``shards`` consecutive ranks, which share the columns.
        num_expert_sets = self.world_size // shards
        if num_experts % num_expert_sets:
            expected = f"a multiple of {num_expert_sets}, ranks / expert_tensor_parallel_size"
            raise self._invalid("number of experts", num_experts, expected)
        multiple = shards
        if self.scales is not None and self.scales.is_block:
            if shards > 1:
                multiple *= BLOCK_ELEMENTS
            elif columns % BLOCK_ELEMENTS:
                self.stock_columns = columns
                columns = num_scale_blocks(columns) * BLOCK_ELEMENTS
        if columns % multiple:
            raise self._invalid("columns of an expert", columns, f"a multiple of {multiple}")
        return num_experts // num_expert_sets, columns // shards

    def _stacked_weight(self, name: str, stacked: torch.Tensor) -> StockWeight:
        shards = self.num_column_shards
        if shards == 1:
            return StockWeight(f"experts.{name}", stacked, 0)
        weight = super()._stacked_weight(name, stacked)  # sharded in dimension 2
        return replace(weight, dim=0, replicas=shards, column_dim=weight.dim, column_shards=shards)

    def _weights_of_expert(
        self, name: str, stacked: torch.Tensor, number: int
    ) -> Iterator[StockWeight]:
        shards = self.num_column_shards
        expert_set, local = divmod(number, self._experts_per_rank())
        expert = stacked[local]
        if expert_set != self.rank // shards:
            expert = torch.empty(expert.shape, dtype=expert.dtype, device="meta")
        for weight in self._split_expert(name, expert, number, replicas=self.world_size):
            yield replace(
                weight, owner=expert_set * shards, column_shards=shards, column_dim=weight.dim
            )

    def _init_shared(self, source: Any) -> None:
        for name in (*SHARED_EXPERT_NAMES, "shared_expert_gate"):
            module = getattr(source, name, None)
            if module is None:
                continue
            module = copy.deepcopy(module).to(self.torch_collectives.device)
            setattr(self, name, with_fp8_linears(module))
            if name in SHARED_EXPERT_NAMES:
                self._shared_expert_name = name

    def forward(self, x: torch.Tensor, max_tokens: int | None = None) -> torch.Tensor:
        """Return [..., hidden] for x [..., hidden], in the layer's mode. Collective.

        Unless ``exact_sizes`` is set, the host does not wait, and a CUDA graph can capture the call
        after a call with equal sizes.

        Args:
            x: tokens of this rank; may be empty.
            max_tokens: largest number of tokens of any rank in this call; all ranks must pass the
                same value. Default: the number of tokens in x, which must then be equal on all
                ranks. The run time does not depend on ``max_tokens``.

        Raises:
            InvalidArgument: x has a wrong shape, dtype or device, or too many tokens.
            ContextFinalized: the contexts were finalized.
            RankDisagreement: ranks pass different ``max_tokens``.
        """
        if max_tokens is None:
            self._compare_input(x)
        return self._run(x, self._required_collectives(), self.sequence_parallel, max_tokens)

    def _run(
        self,
        x: torch.Tensor,
        collectives: Collectives,
        sequence_parallel: bool,
        max_tokens: int | None = None,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        max_tokens = len(rows) if max_tokens is None else max_tokens
        is_empty = max_tokens == 0 if sequence_parallel else not len(rows)
        if is_empty:
            return x.clone()
        ids, topk_weights = self._choose_experts(rows)
        shared: list[torch.Tensor] = []
        await_shared = self._start_shared(rows, shared)
        if sequence_parallel:
            y = self._run_with_dispatch(rows, ids, topk_weights, collectives, max_tokens)
        else:
            y = self._weighted_expert_sums(rows, ids, topk_weights, collectives, False)
        await_shared(*shared)
        return sum(shared, y).view(x.shape)

    def _run_with_dispatch(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        topk_weights: torch.Tensor,
        collectives: Collectives,
        max_tokens: int,
    ) -> torch.Tensor:
        """Send rows to the ranks of their experts; return the weighted sums [rows, hidden]."""
        if not isinstance(collectives, TensorParallel):  # torch's all-gather requires equal sizes
            padding = (0, 0, 0, max_tokens - len(rows))
            padded = pad(rows, padding), pad(ids, padding, value=-1), pad(topk_weights, padding)
            return self._weighted_expert_sums(*padded, collectives, True)[: len(rows)]
        ids, topk_weights = self._routes_of_shards(ids, topk_weights)
        if self.scales is None:
            return ep_experts(
                rows, ids, topk_weights, self.gate_up_proj, self.down_proj, collectives, max_tokens,
                keep_gathered=self.keep_gathered, exact_sizes=self.exact_sizes,
            )  # fmt: skip
        self._check_inference(rows)
        names = "gate_up_proj", "down_proj"
        weights = [getattr(self, name + end) for name in names for end in ("", SCALES)]
        static = [getattr(self, name + INPUT_SCALES, None) for name in names]
        return ep_experts_fp8(  # type: ignore[no-any-return]
            rows.contiguous(), ids, topk_weights, weights,
            [each for each in static if each is not None], self.scales.is_block, collectives.name,
            max_tokens,
            self.exact_sizes and not torch.compiler.is_compiling(),
        )  # fmt: skip

    def _experts_per_rank(self) -> int:
        """Return the number of experts of a rank, whole or as column shards."""
        return self.num_experts * self.num_column_shards // self.world_size

    def _local_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return ids - self.rank // self.num_column_shards * self._experts_per_rank()

    def _routes_of_shards(
        self, ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Replace the id of each expert by the ids of its column shards.

        To ``ep_dispatch`` each shard is an expert. With n = ``_experts_per_rank()``, rank r has the
        shards r * n to (r + 1) * n - 1. Shapes: [rows, topk] to [rows, topk * column shards].
        """
        shards = self.num_column_shards
        if shards == 1:
            return ids, topk_weights
        size = self._experts_per_rank()
        first = (ids // size) * shards * size + ids % size
        each = first[..., None] + torch.arange(shards, device=ids.device) * size
        return each.flatten(-2).to(ids.dtype), topk_weights.repeat_interleave(shards, -1)

    def _start_shared(self, rows: torch.Tensor, out: list[torch.Tensor]) -> Any:
        """Append the result of the shared experts to ``out``, on a second stream. Return a function
        that makes the current stream wait for the tensors passed to it."""

        def run() -> None:
            shared = getattr(self, self._shared_expert_name)(rows)
            gate = getattr(self, "shared_expert_gate", None)
            out.append(shared if gate is None else gate(rows).sigmoid() * shared)

        if not self._shared_expert_name:
            return lambda *tensors: None
        if torch.compiler.is_compiling():
            run()
            return lambda *tensors: None
        return current_device().fork(run, rows)

    def _init_ctx(self, max_M: int = 0, *unused: Any, M: int = 0, **also_unused: Any) -> None:
        """Create contexts for at most ``max_M / ranks`` tokens per rank. Collective.
        ``max_tokens_per_rank`` sets this number directly. ``M`` is an alias of ``max_M``."""
        super()._init_ctx(also_unused.pop("max_tokens_per_rank", 0) * self.world_size or max_M or M)

    @torch.no_grad()
    def torch_fwd(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result of ``forward``, computed by torch and the group's collectives."""
        return self._run(x, self.torch_collectives, self.sequence_parallel)
