"""Base classes of the tensor-parallel layers: ranks, modes, weight shards and clean-up."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.agreement import check_equal_on_ranks, must_compare_calls
from triton_dist.kernels.common.context import is_differentiated
from triton_dist.kernels.common.gemm.scales import BLOCK_ELEMENTS, num_scale_blocks
from triton_dist.layers.nvidia import experts, functional
from triton_dist.layers.nvidia.fp8 import INPUT_SCALES, SCALES, WeightScales, fp8_product, quantise
from triton_dist.layers.nvidia.stock_weights import (
    E4M3,
    StockWeight,
    distributed_like,
    local_part,
    saves_shards,
    undistributed,
)
from triton_dist.layers.nvidia.tensor_parallel import Collectives, TensorParallel, check_operand
from triton_dist.runtime.ranks import Group, group_for

_LINEAR_FORWARD = torch.nn.Linear.forward
_layers: weakref.WeakSet[TensorParallelLayer] = weakref.WeakSet()


def owners_of_shards() -> dict[int, TensorParallelLayer]:
    """Return the layer of each sharded parameter of this process, by the parameter's ``id``.

    The parameters are looked up at each call, because FSDP2 replaces them.
    """
    # A layer has no parameters before ``_init_parameters``.
    parameters = (
        (layer, getattr(layer, name, None)) for layer in _layers for name in layer.sharded_names
    )
    return {id(each): layer for layer, each in parameters if each is not None}


class TensorParallelLayer(torch.nn.Module, ABC):
    """A model layer whose weights are sharded over the ranks.

    There are two modes. *Sequence-parallel*: each rank has consecutive rows of the tokens, [tokens
    / ranks, hidden], and returns the result for these rows (AllGather-GEMM, then
    GEMM-ReduceScatter). All ranks must have the same number of rows; ``functional.shard_rows`` pads
    them. *All-reduce*: all ranks have all tokens (GEMM, then GEMM-AllReduce).

    ``forward`` is differentiable and works in ``torch.compile``. Existing inference scripts call
    other methods: ``dist_triton_fwd`` (sequence-parallel), ``dist_triton_AR_fwd`` and
    ``dist_triton_gemm_ar_fwd`` (all-reduce), and ``torch_fwd`` (all-reduce with torch's GEMM and
    the group's collective).

    Args:
        rank: this rank in the group; checked if given.
        world_size: number of ranks in the group; checked if given.
        group: process group; ``None``: the world, or this process alone without
            ``torch.distributed``.
        collectives: ``TensorParallel`` (ops of this package) or ``Collectives`` (torch's libraries)
            that several layers share. ``None``: ``_init_ctx`` creates a ``TensorParallel``.
        sequence_parallel: use the sequence-parallel mode in ``forward``, else all-reduce.
        keep_gathered: keep the tokens that the forward pass gathers. Otherwise the backward pass
            gathers them again.

    Raises:
        InvalidArgument: ``rank`` or ``world_size`` does not match the group.
    """

    sharded_names: ClassVar[tuple[str, ...]]
    """Names of the sharded parameters. Their gradients are sharded too."""
    scales: WeightScales | None = None
    """Layout of the scales of fp8 weights; ``None`` for other weights. Each fp8 parameter has a
    second parameter with its scales, and a third one if the checkpoint has static input scales."""
    stock_columns: int | None = None
    """Columns of the replaced module's weight if the layer pads it with zeros, else ``None``."""

    def __init__(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        group: Group = None,
        *,
        collectives: Collectives | None = None,
        sequence_parallel: bool = False,
        keep_gathered: bool = False,
    ) -> None:
        super().__init__()
        _layers.add(self)
        self.torch_collectives = Collectives(group if collectives is None else collectives.group)
        self.collectives, self._owns_collectives = collectives, False
        self.rank, self.world_size = self.torch_collectives.rank, self.torch_collectives.num_ranks
        self.sequence_parallel, self.keep_gathered = sequence_parallel, keep_gathered
        self._compares_inputs = must_compare_calls()
        if rank not in (None, self.rank):
            raise self._invalid("rank", rank, f"{self.rank}, this process's rank in the group")
        if world_size not in (None, self.world_size):
            expected = f"{self.world_size}, the size of the group"
            raise self._invalid("world_size", world_size, expected)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; ``None`` without ``torch.distributed``."""
        return self.torch_collectives.group  # an attribute could not be copied with the layer

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _layers.add(self)

    @abstractmethod
    def _init_parameters(self, module: torch.nn.Module, verbose: bool = False) -> None:
        """Copy this rank's shard of the weights of ``module``."""

    @abstractmethod
    def _weights_of(self, name: str, tensor: torch.Tensor) -> list[StockWeight]:
        """Return the stock weights whose shards parameter ``name`` holds, as views of ``tensor``.
        Stock weights are the weights of the module that the layer replaces. ``tensor`` has the
        shape of the parameter or of its scales."""

    def _stock_weights(self, name: str, tensor: torch.Tensor) -> list[StockWeight]:
        """Return the stock weights of any parameter, also of a parameter that holds scales."""
        scales, scaled_name = self.scales, name.removesuffix(SCALES).removesuffix("_input")
        if scales is None or scaled_name == name:
            return self._weights_of(name, tensor)
        stock = []
        is_input = name.endswith(INPUT_SCALES)
        for number, weight in enumerate(
            self._weights_of(scaled_name, getattr(self, scaled_name) if is_input else tensor)
        ):
            prefix = weight.name.removesuffix("weight")
            if is_input:
                shard, shape = tensor[number : number + 1], scales.input_shape
                stock.append(StockWeight(f"{prefix}input_scale", shard, None, scalar_shape=shape))
                continue
            is_sharded = scales.scalar_shape is None and (scales.is_block or weight.dim == 0)
            stock.append(
                replace(
                    weight, name=prefix + scales.name, dim=weight.dim if is_sharded else None,
                    column_dim=weight.column_dim if is_sharded else None,
                    unpadded_size=weight.unpadded_size and num_scale_blocks(weight.unpadded_size),
                    scalar_shape=scales.scalar_shape,
                )
            )  # fmt: skip
        return stock

    def _parameters_and_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.named_parameters(recurse=False)
        yield from self.named_buffers(recurse=False)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Save weights under the names of the stock module. Collective. Each weight is gathered and
        moved to the CPU, because the whole model may exceed a GPU's memory. While ``saves_shards``
        is set, weights are saved as ``DTensor`` instead."""
        phase = f"state_dict of {prefix}{type(self).__name__}, which all ranks must call"
        group_for(self.group).channel().first_all_gather(phase, None)
        is_sharded = saves_shards.get()
        for name, parameter in self._parameters_and_buffers():
            for weight in self._stock_weights(name, undistributed(parameter)):
                destination[prefix + weight.name] = (
                    weight.distributed(self.torch_collectives, self.torch_collectives.mesh)
                    if is_sharded
                    else weight.gathered(self.torch_collectives).cpu()
                )

    @torch.no_grad()
    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Copy this rank's shards of the weights that ``_save_to_state_dict`` saved."""
        known_names = {*self._modules}
        for name, parameter in self._parameters_and_buffers():
            filled = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            weights = {prefix + each.name: each for each in self._stock_weights(name, filled)}
            known_names.update(each.name for each in weights.values())
            missing = [each for each in weights if each not in state_dict]
            missing_keys += missing
            try:
                for where, weight in () if missing else weights.items():
                    weight.fill(state_dict[where], self.torch_collectives, where)
                if not missing:
                    local_part(parameter).copy_(local_part(distributed_like(filled, parameter)))
            except InvalidArgument as error:
                error_msgs.append(str(error))
            if prefix + name in state_dict and name not in known_names:
                error_msgs.append(
                    f"{prefix + name} is the shard of one rank; expected the stock module's "
                    "weights. Save model.state_dict(), which all ranks must call."
                )
                known_names.add(name)
        if strict:
            for key in state_dict:
                name = key.removeprefix(prefix)
                if key.startswith(prefix) and not {name, name.partition(".")[0]} & known_names:
                    unexpected_keys.append(key)

    def _init_ctx(self, max_M: int = 0, *unused: Any, M: int = 0, **also_unused: Any) -> None:
        """Create contexts (memory of the ops) for ``max_M`` tokens over all ranks. Collective.

        ``M`` is an alias of ``max_M``. Other arguments of existing scripts are ignored.

        Raises:
            InvalidArgument, RankDisagreement, SymmetricMemoryFull: see the ops' contexts.
        """
        self.finalize()
        self.collectives, self._owns_collectives = TensorParallel(max_M or M, self.group), True

    _init_AR_ctx = _init_ctx
    _init_gemm_ar_ctx = _init_ctx

    def finalize(self) -> None:
        """Free the contexts of ``_init_ctx``; idempotent. Collective.

        Contexts passed as ``collectives`` are not freed.
        """
        collectives = self.collectives
        if self._owns_collectives and collectives is not None:
            self.collectives, self._owns_collectives = None, False
            collectives.finalize()

    def _two_gemms(
        self,
        x: torch.Tensor,
        first_weight: str,
        activation: Callable[[torch.Tensor], torch.Tensor] | None,
        last_weight: str,
        collectives: Collectives,
        sequence_parallel: bool,
    ) -> torch.Tensor:
        """Return ``activation(x @ first_weight.T) @ last_weight.T``, summed over ranks.

        Args:
            first_weight: name of a parameter [columns of this rank, hidden].
            activation: function of the first product; ``None`` (fp8 weights only): silu(left half)
                * right half.
            last_weight: name of a parameter [hidden, columns of this rank].
            sequence_parallel: use the sequence-parallel mode, else the all-reduce mode.
        """
        rows = x.reshape(-1, x.shape[-1])
        collectives = self._collectives_for(rows, collectives, sequence_parallel)
        function = "ag_gemm" if sequence_parallel else "gemm"
        rows = self._product(function, rows, first_weight, collectives)
        if activation is not None:
            rows = activation(rows)
        function = "gemm_rs" if sequence_parallel else "gemm_ar"
        return self._product(function, rows, last_weight, collectives, silu_mul=activation is None)

    def _product(
        self,
        function: str,
        x: torch.Tensor,
        name: str,
        collectives: Collectives,
        *routing: torch.Tensor,
        silu_mul: bool = False,
    ) -> torch.Tensor:
        """Return x times parameter ``name``, by a function of ``functional`` or ``experts``.

        Args:
            function: name of the function.
            name: name of a parameter. Matrices are transposed; stacked experts are not.
            routing: for ``experts``: expert ids [M, topk]; functions that sum over a token's
                experts also take their weights [M, topk].
            silu_mul: replace x by silu(left half of x) * right half of x. For fp8 weights only.
        """
        weight: torch.Tensor = getattr(self, name)
        weight = weight.T if weight.ndim == 2 else weight
        if self.scales is None:
            options = {"keep_gathered": self.keep_gathered} if function == "ag_gemm" else {}
            multiply = getattr(experts if routing else functional, function)
            return multiply(x, weight, *routing, collectives, **options)  # type: ignore[no-any-return]
        self._check_inference(x)
        if not silu_mul:
            matrix = weight[0] if weight.ndim == 3 else weight
            check_operand(type(self).__name__, "x", x, matrix, collectives)
        static_scale = getattr(self, name + INPUT_SCALES, None)
        A, A_scale = quantise(x, self.scales.is_block, silu_mul, static_scale)
        operands = [A, A_scale, weight, getattr(self, name + SCALES)]
        product: torch.Tensor = fp8_product(
            function, operands, list(routing), x.dtype, collectives.name
        )
        return product

    def _check_inference(self, x: torch.Tensor) -> None:
        if is_differentiated(x):
            expected = "False: fp8 weights have no backward; call under torch.no_grad()"
            raise self._invalid("x.requires_grad", True, expected)

    def _collectives_for(
        self, rows: torch.Tensor, collectives: Collectives, sequence_parallel: bool
    ) -> Collectives:
        """Return ``collectives``, or torch's collectives if ``rows`` is empty.

        Raises:
            RankTimeout: ``rows`` of a sequence-parallel layer is empty here, but not on all ranks.
        """
        if rows.shape[0]:
            return collectives
        if sequence_parallel and not torch.compiler.is_compiling():
            group_for(self.group).barrier("a call without tokens, which all ranks must make")
        return self.torch_collectives

    def _compare_input(self, x: torch.Tensor) -> None:
        """With ``TRITON_DIST_DEBUG=agree``, compare the input of ``forward`` over ranks.

        Raises:
            RankDisagreement: shapes differ, or in the all-reduce mode, values differ.
        """
        if self._compares_inputs and not torch.compiler.is_compiling():
            own = x.new_empty(x.shape, device="meta") if self.sequence_parallel else x
            check_equal_on_ranks(type(self).__name__, "input", own, self.group)

    def _required_collectives(self) -> Collectives:
        if self.collectives is None:
            raise self._invalid(
                "collectives", None, "a TensorParallel; call _init_ctx(max_M) first"
            )
        return self.collectives

    def _invalid(self, argument: str, value: object, expected: str) -> InvalidArgument:
        return InvalidArgument(type(self).__name__, argument, value, expected)

    def _check_members(self, name: str, module: torch.nn.Module, *members: str) -> None:
        if not all(hasattr(module, member) for member in members):
            raise self._invalid(name, type(module), f"a module with {', '.join(members)}")

    def _checked_weight(
        self,
        name: str,
        linear: torch.nn.Module,
        shape: tuple[int | None, int | None],
        allows_router: bool = False,
        like: tuple[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return the weight of a linear layer after checks of its shape, dtype and device.

        Args:
            name: name of ``linear`` in errors.
            shape: expected shape; ``None`` accepts any size of the dimension.
            allows_router: accept any module with a ``weight``, such as a router, if it is not a
                ``torch.nn.Linear``.
            like: name and weight of another layer, whose dtype ``linear`` must have.
        """
        weight = getattr(linear, "weight", None)
        is_fp8 = WeightScales.of(linear) is not None
        is_trusted = is_fp8 or (allows_router and not isinstance(linear, torch.nn.Linear))
        if type(linear).forward is not _LINEAR_FORWARD and not is_trusted:
            expected = "a torch.nn.Linear that does not override forward"
            raise self._invalid(name, type(linear), expected)
        if not isinstance(weight, torch.Tensor) or weight.ndim != 2:
            shown = None if weight is None else tuple(weight.shape)
            raise self._invalid(f"{name}.weight", shown, "a matrix [outputs, inputs]")
        if not is_fp8:
            self.torch_collectives.check_dtype(
                type(self).__name__, f"{name}.weight.dtype", weight.dtype
            )
        if weight.is_meta:
            raise self._invalid(f"{name}.weight.device", "meta", "a tensor with values")
        found = tuple(weight.shape)
        if any(size not in (None, have) for size, have in zip(shape, found, strict=True)):
            wanted = tuple("any" if size is None else size for size in shape)
            raise self._invalid(f"{name}.weight.shape", found, f"[outputs, inputs] = {wanted}")
        if like is not None and weight.dtype != like[1].dtype:
            expected = f"the dtype of {like[0]}, {like[1].dtype}"
            raise self._invalid(f"{name}.weight.dtype", weight.dtype, expected)
        return weight

    def _check_split(self, name: str, size: int) -> None:
        if size % self.world_size:
            raise self._invalid(name, size, f"a multiple of the {self.world_size} ranks")

    def _set_scales(self, modules: Iterable[torch.nn.Module]) -> None:
        """Set ``scales`` to the layout of all ``modules``."""
        layouts = {WeightScales.of(module) for module in modules}
        if len(layouts) > 1:
            raise self._invalid("scales of weights", layouts, "equal names and shapes of scales")
        (self.scales,) = layouts

    def _split_columns(self, name: str, columns: int) -> int:
        """Return this rank's number of the ``columns`` of a weight. Columns with block scales are
        padded with zeros, so that each rank has whole blocks."""
        if self.scales is None or not self.scales.is_block:
            self._check_split(name, columns)
            return columns // self.world_size
        own_columns = -(-num_scale_blocks(columns) // self.world_size) * BLOCK_ELEMENTS
        self.stock_columns = None if own_columns * self.world_size == columns else columns
        return own_columns

    def _init_scales(self, module: torch.nn.Module, *names: str) -> None:
        """Copy this rank's scales of fp8 parameters, and the static input scales if present."""
        if self.scales is None:
            return
        for name in names:
            parameter: torch.Tensor = getattr(self, name)
            *num_experts, rows, columns = parameter.shape
            if self.scales.is_block:
                rows, columns = num_scale_blocks(rows), num_scale_blocks(columns)
            elif num_experts:  # [E, K, N]
                rows = 1
            else:
                columns = 1
            scales = self._parameter(name + SCALES, module, *num_experts, rows, columns)
            setattr(self, name + SCALES, scales)
            if self.scales.input_shape is not None:
                number = len(self._weights_of(name, parameter))
                input_scales = self._parameter(name + INPUT_SCALES, module, number)
                setattr(self, name + INPUT_SCALES, input_scales)

    @torch.no_grad()
    def _parameter(self, name: str, module: torch.nn.Module, *shape: int) -> torch.nn.Parameter:
        """Return parameter ``name`` with this rank's shards of the weights of ``module``. Scales
        are fp32; other parameters have the dtype of their first stock weight. The parameter
        requires a gradient if this stock weight does, unless it is fp8 or holds scales."""
        weights = self._stock_weights(name, torch.empty(shape, device="meta"))
        stock = [attrgetter(each.name)(module) for each in weights]
        is_scale = name.endswith(SCALES)
        dtype = torch.float32 if is_scale else stock[0].dtype
        filled = torch.empty(shape, dtype=dtype, device=self.torch_collectives.device)
        if len(shape) == 3 and (is_scale or dtype is E4M3):  # K-major, as fp8 grouped GEMMs require
            filled = filled.mT.contiguous().mT
        for weight, whole in zip(self._stock_weights(name, filled), stock, strict=True):
            weight.fill(whole, self.torch_collectives, weight.name)
        is_trained = stock[0].requires_grad and dtype is not E4M3 and not is_scale
        return torch.nn.Parameter(filled, is_trained)

    def _print_shapes(self, verbose: bool) -> None:
        if verbose:
            shapes = ", ".join(f"{name} {tuple(p.shape)}" for name, p in self.named_parameters())
            print(f"[rank {self.rank}] {type(self).__name__}: {shapes}")


class TokenLayer(TensorParallelLayer):
    """A layer whose result for a token depends only on this token."""

    @abstractmethod
    def _run(
        self, x: torch.Tensor, collectives: Collectives, sequence_parallel: bool
    ) -> torch.Tensor:
        """Return the result for x [..., hidden] in the given mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., hidden] for x [..., hidden], in the layer's mode.

        The first call with a shape tunes the ops.

        Raises:
            InvalidArgument: x has a wrong shape, dtype or device.
            ContextFinalized: the contexts were finalized.
            RankDisagreement: ranks of an MoE layer chose different experts in a shape's first call.
        """
        self._compare_input(x)
        return self._run(x, self._required_collectives(), self.sequence_parallel)

    @torch.no_grad()
    def torch_fwd(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, self.torch_collectives, False)

    @torch.no_grad()
    def dist_triton_fwd(self, x: torch.Tensor, *unused: Any, **also_unused: Any) -> torch.Tensor:
        return self._run(x, self._required_collectives(), True)

    @torch.no_grad()
    def dist_triton_AR_fwd(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, self._required_collectives(), False)

    dist_triton_gemm_ar_fwd = dist_triton_AR_fwd
