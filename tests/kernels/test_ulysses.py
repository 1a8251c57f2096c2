"""Device memory that the Ulysses ops keep for later calls with the same lengths."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from triton_dist.kernels.nvidia import create_ulysses_context
from triton_dist.kernels.nvidia.ulysses.algorithms import Push, pre_attn_call


def test_launches_and_graphs_read_lengths_that_the_context_keeps(monkeypatch):
    with create_ulysses_context(0, 1, 1, 8, 1, 1, 8, torch.float32) as ctx:
        monkeypatch.setattr(ctx._lengths, "max_entries", 1, raising=False)
        launches = []
        launcher = SimpleNamespace(
            run=lambda key, launch, tensors: launches.append((key, tensors["lengths_ptr"]))
        )

        def launch(tokens):
            x = torch.zeros(1, tokens, 1, 8)
            call = pre_attn_call(x, None, None, ctx, [tokens])
            Push().repeat(launcher, call, call.outputs())
            return launches[-1]

        key, lengths = launch(3)
        assert lengths is ctx.lengths((3,))
        launch(4)  # the context forgets the lengths
        assert launch(3)[0] == key
        assert launches[-1][1] is ctx.lengths((3,))
        assert launches[-1][1] is not lengths
        with monkeypatch.context() as patch:
            patch.setattr(ctx.device, "is_capturing", lambda: True)
            captured = ctx.lengths((3,))
        ctx.lengths((4,))
        ctx.lengths((5,))
        assert ctx.lengths((3,)) is captured
