"""Triton-distributed's autograd function of expert-parallel layers, computed by ``ep_experts``."""

from __future__ import annotations

import torch

from triton_dist.function.nvidia.common import current_tensor_parallel
from triton_dist.layers.nvidia.ep_a2a_layer import masked_ids
from triton_dist.layers.nvidia.expert_parallel import ep_experts
from triton_dist.runtime.ranks import Group


class TritonDistFusedEpMoeFunction:
    """Class whose ``apply`` is called like an autograd function's. The result is differentiable."""

    @staticmethod
    def apply(
        num_experts: int,
        routing_weights: torch.Tensor,
        selected_experts: torch.Tensor,
        hidden_states: torch.Tensor,
        fc1_1: torch.Tensor,
        fc1_2: torch.Tensor | None,
        fc2: torch.Tensor,
        ep_group: Group,
    ) -> torch.Tensor:
        """Return each token's weighted sum over its experts. Collective over ``ep_group``.

        Args:
            num_experts: number of experts over all ranks.
            routing_weights: fp32 [tokens, topk], weight of each chosen expert.
            selected_experts: [tokens, topk], ids of the chosen experts. An id outside 0 to
                ``num_experts - 1`` drops the choice.
            hidden_states: [tokens, hidden]; ranks may have different numbers of tokens.
            fc1_1: weights of gate [experts / ranks, I, hidden], or of gate and up [experts / ranks,
                2 * I, hidden].
            fc1_2: weights of up [experts / ranks, I, hidden], which each call concatenates with
                ``fc1_1``; ``None`` if ``fc1_1`` has both.
            fc2: weights of down [experts / ranks, hidden, I].
            ep_group: ignored; the group of ``init_triton_dist_ep_op`` is used.

        Raises:
            InvalidArgument: see ``ep_experts``.
            ContextFinalized: ``init_triton_dist_ep_op`` was not called.
        """
        ranks = current_tensor_parallel()
        ids = masked_ids(selected_experts, num_experts)
        gate_up = fc1_1 if fc1_2 is None else torch.cat([fc1_1, fc1_2], dim=1)
        return ep_experts(
            hidden_states, ids, routing_weights, gate_up.mT, fc2.mT, ranks, ranks.max_tokens
        )
