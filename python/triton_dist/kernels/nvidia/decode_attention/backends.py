"""Attention functions of libraries, which compute the partial output of a rank.

The functions read lengths on the device, so a captured graph can be replayed for other lengths. A
library whose interface was read but that was not run on a GPU here is marked.

==================  ==============================================  ===========  =================
backend             function                                        base of LSE  interface read at
==================  ==============================================  ===========  =================
``"torch"``         ``aten._flash_attention_forward``               e            torch 2.11
``"flash_attn_3"``  ``flash_attn_interface.flash_attn_with_         e            3.0.0; not run
                    kvcache`` on sm_90
``"flashinfer"``    ``flashinfer.decode.trtllm_batch_decode_with_   2            0.6.18; not run
                    kv_cache`` (TensorRT-LLM kernels) on sm_100
==================  ==============================================  ===========  =================

FlashInfer's functions for sm_90 either return no LSE or plan a call on the host from its lengths.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from triton_dist.kernels.nvidia.decode_attention.context import DecodeKey
from triton_dist.runtime.device import current_device

LOG2E = 1 / math.log(2)
_LATENT = 512
"""Elements of a value in multi-head latent attention."""
_WORKSPACE_BYTES = 128 << 20


class Backend(NamedTuple):
    """An attention function of a library."""

    module: str
    """Name of the module that must be installed."""
    capability: int
    """Major compute capability of the GPUs on which the function is a candidate; 0: all."""
    requires: str
    """Cases that the function supports, for errors."""
    supports: Callable[[DecodeKey], bool]
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """Function of q [batch, heads, head_dim], the caches, the block table or ``None``, the number
    of keys of each sequence and the scale. It returns the output [batch, heads, v_head_dim] and the
    base-2 LSE [batch, heads], which are arbitrary for sequences without keys."""

    def is_candidate(self) -> bool:
        """Return whether the library is installed and supports this device."""
        is_usable = current_device().has_nccl and is_installed(self.module)
        if is_usable and self.capability > 0:
            is_usable = torch.cuda.get_device_capability()[0] == self.capability
        return is_usable

    def fits(self, sizes: DecodeKey) -> bool:
        """Return whether the function supports calls of these sizes."""
        is_half = sizes.dtype != torch.float32 and sizes.kv_dtype == sizes.dtype
        return is_half and not sizes.has_mask and self.supports(sizes)


@functools.cache
def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that contains the module
        return False


def _has_equal_dims(sizes: DecodeKey) -> bool:
    return not sizes.shares_v and sizes.head_dim == sizes.v_head_dim <= 256


def _attend_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Any, lens: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    (batch, tokens), flash = k.shape[:2], torch.ops.aten._flash_attention_forward
    ends = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    out, lse, *_ = flash(
        q, k.flatten(0, 1), v.flatten(0, 1), ends, ends * tokens, 1, tokens, 0.0, False, False,
        scale=scale, seqused_k=lens,
    )  # fmt: skip
    return out, lse.T * LOG2E


def _attend_flash_attn_3(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, table: torch.Tensor | None,
    lens: torch.Tensor, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    q, q_v = q[:, None], None
    if v is None:  # The function adds the scores of q with k, and of qv with v.
        q, q_v, k, v = q[..., _LATENT:], q[..., :_LATENT], k[..., _LATENT:], k[..., :_LATENT]
    out, lse, *_ = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache(
        q, k, v, qv=q_v, cache_seqlens=lens, page_table=table, softmax_scale=scale,
        return_softmax_lse=True,
    )  # fmt: skip
    return out[:, 0], lse[..., 0] * LOG2E


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _attend_flashinfer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lens: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    decode = importlib.import_module("flashinfer.decode").trtllm_batch_decode_with_kv_cache
    out, lse = decode(
        q, (k, v), _workspace(q.device), table, lens, table.shape[1] * k.shape[1],
        bmm1_scale=scale, kv_layout="NHD", backend="trtllm-gen", return_lse=True,
    )  # fmt: skip
    return out, lse


BACKENDS = {
    "torch": Backend(
        "torch", 0, "GPUs, a dense contiguous cache of q's dtype (fp16 or bf16), and equal "
        "dimensions up to 256",
        lambda s: (
            not current_device().interprets
            and s.page_size == 0
            and s.is_contiguous
            and _has_equal_dims(s)
        ),
        _attend_torch,
    ),
    "flash_attn_3": Backend(
        "flash_attn_interface", 9, "a cache of q's dtype (fp16 or bf16) with equal dimensions up "
        "to 256, or latents with dimensions 576 and 512",
        lambda s: _has_equal_dims(s) or (s.shares_v and (s.head_dim, s.v_head_dim) == (576, 512)),
        _attend_flash_attn_3,
    ),
    "flashinfer": Backend(
        "flashinfer.decode", 10, "pages of 16, 32 or 64 tokens of q's dtype (fp16 or bf16), and "
        "equal dimensions of 64, 128 or 256",
        lambda s: (
            s.page_size in (16, 32, 64) and _has_equal_dims(s) and s.head_dim in (64, 128, 256)
        ),
        _attend_flashinfer,
    ),
}  # fmt: skip
"""Libraries by name. The first is the default of the argument ``backend``."""
