"""Functions that every rank runs in the tests of training and checkpoints."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from tests.layers.layer_ranks import loss_of, model, token_ids
from triton_dist.errors import InvalidArgument, RankDisagreement, TritonDistError, TritonDistWarning
from triton_dist.layers.nvidia import (
    TP_MLP,
    TrainingState,
    clip_grad_norm_,
    gather_state_dict,
    parallelize,
    sum_gradients,
)
from triton_dist.runtime.device import current_device


def _ids(seed: int, shape: tuple[int, int] = (2, 6)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(24, shape, generator=generator)
    return ids.to(current_device().torch_device)


def _sharded(module: Any, mesh: Any, wrapper: str, dtype: torch.dtype) -> Any:
    """Wrap the model for data parallelism."""
    if wrapper == "ddp":
        return torch.nn.parallel.DistributedDataParallel(module, process_group=mesh.get_group())
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in module.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(module, mesh=mesh, mp_policy=policy)


def _parallel(module: Any, group: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TritonDistWarning)  # kv heads are replicated
        return parallelize(module, group, max_M=16, **options)


def trained_like_one_process(
    wrapper: str,
    kv_heads: int,
    num_experts: int = 0,
    is_spread: bool = False,
    dtype: torch.dtype = torch.float32,
    steps: int = 2,
    norm_type: float = 2.0,
    shape: tuple[int, int] = (2, 2),
    expert_parallel: bool = False,
) -> list[float]:
    """Train on a mesh of data-parallel by tensor-parallel ranks, and alone.

    The first step accumulates two backwards. Each step recomputes the blocks' activations and clips
    gradients.

    Returns:
        The largest relative difference of the losses and of the norms.
    """
    mesh = init_device_mesh(current_device().torch_device.type, shape, mesh_dim_names=("dp", "tp"))
    replicas = shape[0]
    sizes = {"num_key_value_heads": kv_heads, "num_experts": num_experts}
    whole, module = model(**sizes), model(**sizes)
    options = {"sequence_parallel": is_spread, "expert_parallel": expert_parallel}
    group = _parallel(module, mesh["tp"], **options)
    for block in module.model.layers:
        forward = block.forward
        block.forward = lambda *a, forward=forward, **k: checkpoint(
            forward, *a, use_reentrant=False, **k
        )
    run = _sharded(module, mesh["dp"], wrapper, dtype)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (whole, module)]
    replica = mesh["dp"].get_local_rank()
    losses, norms = [0.0], [0.0]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = torch.zeros((), device=group.device)
        own = torch.zeros((), device=group.device)
        for part in range(2 if step == 0 else 1):
            batches = [_ids(100 * step + 10 * part + each) for each in range(replicas)]
            both = sum(loss_of(whole(ids), ids) for ids in batches) / replicas
            both.backward()
            expected += both.detach()
            ids = batches[replica]
            shard = (group.rank, group.num_ranks) if is_spread else (0, 1)
            output = run(ids, shard) if is_spread else run(ids)
            targets = ids.flatten().chunk(group.num_ranks)[group.rank] if is_spread else ids
            loss = loss_of(output, targets)
            loss.backward()
            own += loss.detach()
        sum_gradients(module)
        norm = clip_grad_norm_(module, 0.5, norm_type)
        golden = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5, norm_type)
        dist.all_reduce(own, group=mesh["dp"].get_group())
        if is_spread:
            dist.all_reduce(own, group=group.group)
        losses.append(abs(own.item() / replicas / expected.item() - 1))
        norms.append(abs(norm.item() / golden.item() - 1))
        everyones = [torch.zeros_like(norm) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, norm)
        assert all(each.item() == norm.item() for each in everyones), everyones
        for optimizer in optimizers:
            optimizer.step()
    group.finalize()
    return [max(losses), max(norms)]


def torch_clips_like_us() -> list[str]:
    """torch's own function, called by mistake, gives the same norm and warns once."""
    unfilled = TP_MLP()  # a layer without weights must not disturb the clipping of others
    module = model(num_key_value_heads=1)
    group = _parallel(module, None)
    loss_of(module(token_ids(2, 5)), token_ids(2, 5)).backward()
    sum_gradients(module)
    grads = [parameter.grad.clone() for parameter in module.parameters()]
    norms = []
    for norm_type in (2.0, math.inf):
        norms.append(clip_grad_norm_(module, 1e9, norm_type))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), 1e9, norm_type))
    assert norms[0] == norms[1]
    assert norms[2] == norms[3] < norms[0]
    for parameter, grad in zip(module.parameters(), grads, strict=True):
        assert torch.equal(parameter.grad, grad)  # far below the limit: unchanged
    copied = copy.deepcopy(module)
    for parameter, grad in zip(copied.parameters(), grads, strict=True):
        parameter.grad = grad
    assert clip_grad_norm_(copied, 1e9) == norms[0]
    try:
        parameter.grad.fill_(math.nan)
        clip_grad_norm_(copied, 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        seen.append(error)
    unfilled.finalize()
    group.finalize()
    return [str(getattr(each, "message", each)) for each in seen]


def an_infinity_in_one_shard() -> list[bool]:
    """Gradient scaling: all ranks skip the step, and the scale is halved on all."""
    module = model(num_key_value_heads=2)
    group = _parallel(module, None)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    scaler = ShardedGradScaler(device=group.device.type, init_scale=8.0)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    scaler.scale(loss_of(module(token_ids(2, 5)), token_ids(2, 5))).backward()
    sum_gradients(module)
    if group.rank == 1:
        module.model.layers[0].mlp.down_proj.grad[0, 0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    kept = [torch.equal(*pair) for pair in zip(module.parameters(), before, strict=True)]
    group.finalize()
    return [all(kept), scaler.get_scale() == 4.0]


def _stepped(module: Any, optimizer: Any, seed: int) -> float:
    """Make a training step and return the loss."""
    optimizer.zero_grad()
    loss = loss_of(module(_ids(seed)), _ids(seed))
    loss.backward()
    sum_gradients(module)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def resharded(folder: str, num_experts: int) -> list[float]:
    """Save on 2 tensor-parallel ranks with FSDP2, resume on 4, save, and resume on 2.

    Returns:
        The difference of each loss to the loss of one process that trains all the time.
    """
    mesh = init_device_mesh(current_device().torch_device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    sizes = {"num_key_value_heads": 2, "num_experts": num_experts, "num_attention_heads": 4}
    whole = model(**sizes)
    alone = torch.optim.AdamW(whole.parameters(), lr=0.01)
    differences = []
    for number, group in enumerate((mesh["tp"], None, mesh["tp"])):
        module = model(**sizes)
        if number:
            for parameter in module.parameters():
                torch.nn.init.constant_(parameter, number)
        # Checkpoints do not depend on how experts are distributed.
        ranks = _parallel(module, group, expert_parallel=number == 1)
        if number == 0:
            _sharded(module, mesh["dp"], "fsdp2", torch.float32)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01 if number == 0 else 0.5)
        state = {"app": TrainingState(module, optimizer)}
        if number:
            dcp.load(state, checkpoint_id=f"{folder}/{number - 1}")
        loss = _stepped(module, optimizer, number)
        differences.append(abs(loss - _stepped(whole, alone, number)))
        dcp.save(state, checkpoint_id=f"{folder}/{number}")
        weights = gather_state_dict(module)
        assert weights.keys() == whole.state_dict().keys()
        for name, weight in whole.state_dict().items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=1e-4)
        if number:  # stock weights into a parallelized model
            module.load_state_dict(whole.state_dict())
        ranks.finalize()
    return differences


def wrong_state_dicts(folder: str) -> list[str]:
    """Errors for wrong weights and wrong state of the optimiser, as texts."""
    module = model(num_key_value_heads=2)
    group = _parallel(module, None)
    name = "model.layers.0.mlp.down_proj.weight"
    torch.save(TrainingState(module).state_dict()["model"][name], f"{folder}/{group.rank}")
    dist.barrier()
    others = torch.load(f"{folder}/{1 - group.rank}", weights_only=False)
    stock = module.state_dict()
    layer = module.model.layers[0].mlp
    wrong = [
        {**stock, name: others},
        {**stock, "model.layers.0.mlp.gate_up_proj": layer.gate_up_proj},
        {key: value for key, value in stock.items() if key != name},
        {**stock, "model.layers.0.mlp.bias": stock[name]},
        {**stock, name: stock[name][:, :-2]},
        {**stock, name: stock[name][:, :1]},
        {**stock, name: distribute_tensor(stock[name], group.mesh, [Shard(0)])},
        {key: value for key, value in stock.items() if not key.endswith("mlp.gate_proj.weight")},
    ]
    texts = []
    try:
        torch.save(module, f"{folder}/model")
    except TypeError as error:
        texts.append(str(error))
    for each in wrong:
        try:
            module.load_state_dict(each)
        except RuntimeError as error:
            texts.append(str(error))
    state = TrainingState(module, torch.optim.AdamW(module.parameters()))
    plain = TrainingState(module, torch.optim.SGD(module.parameters())).state_dict()
    for given in (TrainingState(module).state_dict(), plain, None):
        try:
            state.load_state_dict(given) if given else state.state_dict()
        except InvalidArgument as error:
            texts.append(str(error))
        if given is plain:
            state.optimizer.state[layer.down_proj]["row"] = torch.zeros(3)
    group.finalize()
    return texts


def any_number_of_tokens() -> str:
    """Sequence-parallel calls of 15, 1 and no tokens, forward and backward, with and without
    experts. Then a call in which rank 1 has no tokens: return the error."""
    for num_experts in (4, 0):
        whole, module = (model(num_key_value_heads=2, num_experts=num_experts) for _ in range(2))
        group = _parallel(module, None, sequence_parallel=True)
        shard = (group.rank, group.num_ranks)
        for shape in ((3, 5), (1, 1), (1, 0)):
            ids = _ids(1, shape)
            for each in (whole, module):
                each.zero_grad()
            expected, output = whole(ids), module(ids, shard)
            rows = -(-ids.numel() // group.num_ranks)
            own = slice(group.rank * rows, (group.rank + 1) * rows)
            golden = expected.logits.flatten(0, 1)[own]
            torch.testing.assert_close(output.logits, golden, rtol=1e-4, atol=1e-5)
            loss_of(expected, ids).backward()
            loss_of(output, ids.flatten()[own]).backward()
            sum_gradients(module)
            for name in ("embed_tokens", "norm"):
                grads = [getattr(each.model, name).weight.grad for each in (module, whole)]
                torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)
    try:
        module.model.layers[0].mlp(torch.rand(3 - 3 * group.rank, 32, device=group.device))
    except TritonDistError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def inputs_that_differ() -> list[str]:
    """Under ``TRITON_DIST_DEBUG=agree``: other values, then another shape."""
    module = model(num_key_value_heads=2)
    group = _parallel(module, None)
    module(_ids(1))
    texts = []
    for ids in (_ids(group.rank), _ids(1)[:, group.rank :]):
        try:
            module(ids)
        except RankDisagreement as error:
            texts.append(str(error))
    group.finalize()
    return texts
