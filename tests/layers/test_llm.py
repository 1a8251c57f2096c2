"""Whole models: as scripts call them, and tuned ahead of serving."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.distributed.calls import with_few_samples
from tests.layers.functional_ranks import part
from triton_dist.cli.main import main
from triton_dist.errors import InvalidArgument, MissingExtra
from triton_dist.kernels.nvidia import ag_gemm, gemm_ar, gemm_rs
from triton_dist.models import LLM, AutoLLM, ModelConfig
from triton_dist.models.llama import LlamaConfig
from triton_dist.models.utils import init_model_cpu
from triton_dist.utils import finalize_distributed, initialize_distributed

BATCH, PROMPT = 2, 3
OPS = (ag_gemm, gemm_rs, gemm_ar)


def config_of(folder: str) -> ModelConfig:
    return ModelConfig(folder, 8, torch.float32, rank=dist.get_rank(), world_size=2)


def written(folder: Path, name: str) -> str:
    """A model's folder, which rank 0 writes."""
    path = folder / name
    if dist.get_rank() == 0:
        config = LlamaConfig.of(name)
        config.save(path)
        assert LlamaConfig.of(str(path)) == config
    dist.barrier()
    return str(path)


def as_scripts_call_it(folder: Path, name: str) -> tuple[str, int]:
    """Prefill and a step of decoding in each mode, against the same model on one rank."""
    path, count = written(folder, name), 0
    model = AutoLLM.from_pretrained(config_of(path), dist.group.WORLD)
    ids = torch.randint(60, (BATCH, PROMPT + 1), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(PROMPT + 1).expand(BATCH, -1)
    with torch.no_grad():
        golden = init_model_cpu(path, torch.float32)(input_ids=ids, position_ids=positions).logits
    for mode, create in (
        ("torch", lambda max_M: None),
        ("triton_dist", model.init_triton_dist_ctx),
        ("triton_dist_AR", lambda max_M: model.init_triton_dist_AR_ctx(max_M, ar_method=None)),
        ("triton_dist_gemm_ar", model.init_triton_dist_gemm_ar_ctx),
    ):
        create(max_M=BATCH * PROMPT)
        model.set_fwd(mode=mode)
        cache = model.new_cache(BATCH)
        for begin, end in ((0, PROMPT), (PROMPT, PROMPT + 1)):
            asked, wanted = ids[:, begin:end], golden[:, end - 1 : end]
            if mode == "triton_dist":
                asked, wanted = (
                    part(asked, model.collectives, 0),
                    part(wanted, model.collectives, 0),
                )
            found = model.inference(asked, positions[:, begin:end], cache)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
            cache.inc_offset(end - begin)
            count += 1
    hidden = model.inference(asked, positions[:, -1:], model.new_cache(BATCH), True)
    assert hidden.shape == (BATCH, 1, model.config.hidden_size)
    model.finalize()
    model.finalize()
    return model.model_type, count


def mistakes(folder: Path) -> list[str]:
    """Messages of what a caller can get wrong."""
    seen = []
    path = written(folder, "tiny")
    config = config_of(path)

    def refused(call: Callable[[], object], kind: type[Exception] = InvalidArgument) -> None:
        try:
            call()
        except kind as error:
            seen.append(str(error))

    refused(lambda: LLM(dataclasses.replace(config, rank=2)))
    refused(lambda: LLM(dataclasses.replace(config, world_size=3)))
    refused(lambda: LLM(dataclasses.replace(config, model_name="nobody/none")))
    model = LLM(config)
    refused(lambda: model.set_fwd("fast"))
    refused(lambda: model.init_triton_dist_ctx(0))
    ids, positions = torch.zeros(2, 3, dtype=torch.long), torch.arange(3).expand(2, -1)
    model.set_fwd("triton_dist_AR")
    refused(lambda: model.inference(ids, positions, model.new_cache(2)))
    model.init_triton_dist_ctx(4)
    refused(lambda: model.inference(ids, positions, model.new_cache(2)))
    refused(lambda: model.inference(ids, positions, model.new_cache(1)))
    refused(lambda: model.tune(2, [9], [2]))
    refused(lambda: model.tune(3, [4], [], "triton_dist"))
    model.finalize()
    if dist.get_rank() == 0:
        Path(path, "model.safetensors").touch()
    dist.barrier()
    with mock.patch.dict("sys.modules", transformers=None):  # whether it is installed or not
        refused(lambda: LLM(config), MissingExtra)
    return seen


def tunings() -> list[int]:
    return [op.num_tunings for op in OPS]


def few_configs() -> None:
    """Reduce each config space to the second config, since the first of gemm_ar is for all sizes,
    and its samples to two.

    The keys that are tuned do not depend on the number of configs.
    """
    for op in OPS:
        op.config_space = type(op.config_space)(op.config_space[1:2])
        op._components_for = with_few_samples(op._components_for)


def tuned_by_the_command() -> list[int]:
    """Tunings, by op, of a prefill with sequences spread over ranks and a step of decoding."""
    few_configs()
    shapes = ["--bsz", str(BATCH), "--seq_len", str(PROMPT), "--dtype", "float32"]
    assert main(["tune-model", "--model", "tiny", *shapes]) == 0
    return tunings()


def served() -> list[int]:
    """Tunings of a server of such calls."""
    few_configs()
    group = initialize_distributed()
    model = LLM(config_of("tiny"), group)
    model.init_triton_dist_ctx(BATCH * PROMPT)
    ids, positions = torch.ones(BATCH, PROMPT, dtype=torch.long), torch.arange(PROMPT + 1)
    positions, cache = positions.expand(BATCH, -1), model.new_cache(BATCH)
    model.set_fwd("triton_dist")
    model.inference(part(ids, model.collectives, 0), positions[:, :PROMPT], cache)
    cache.inc_offset(PROMPT)
    model.set_fwd("triton_dist_gemm_ar")
    model.inference(ids[:, :1], positions[:, PROMPT:], cache)
    model.finalize()
    finalize_distributed()
    return tunings()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("tiny", "dense"), pytest.param("tiny-moe", "moe", marks=pytest.mark.stress)],
)
def test_a_model_as_scripts_call_it(on_two_ranks, tmp_path, name, kind):
    assert on_two_ranks(as_scripts_call_it, tmp_path, name) == [(kind, 8)] * 2


def test_mistakes_are_said(on_two_ranks, tmp_path):
    starts = (
        "LLM: config.rank is 2, expected ",
        "LLM: config.world_size is 3, expected 2, as in the group",
        "LlamaConfig.of: model is 'nobody/none', expected a folder with a config.json, or one of ",
        "LLM.set_fwd: mode is 'fast', expected one of torch, triton_dist, triton_dist_AR, ",
        "TensorParallel: max_M is 0, expected at least 1",
        "TP_Attn: collectives is None, expected a TensorParallel; call ",
        "gemm_ar: M is 6, expected at most the context's max_M = 4",
        "TP_Attn: batch is 2, expected at most the cache's batch_size = 1",
        "LLM.tune: prompt_lengths is 9, expected at most max_length = 8",
        "LLM.tune: batch or decode_batches is 3, expected a multiple of the 2 ranks",
        "init_model_cpu('",
    )
    for seen in on_two_ranks(mistakes, tmp_path):
        for message, start in zip(seen, starts, strict=True):
            assert message.startswith(start)


def test_serving_starts_frozen(spawn_ranks, tmp_path):
    """What the command has tuned serves a process that must not tune."""
    env = {"TRITON_DIST_CACHE_DIR": str(tmp_path / "cache")}
    tuned = spawn_ranks(2, tuned_by_the_command, init=False, env=env)
    assert tuned == [[2, 2, 2]] * 2
    env["TRITON_DIST_AUTOTUNE_FROZEN"] = "1"
    assert spawn_ranks(2, served, init=False, env=env) == [[0, 0, 0]] * 2
