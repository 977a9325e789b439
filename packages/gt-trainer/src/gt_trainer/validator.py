"""torchtitan's validator, with the attention masks of this package's attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.components.validate import Validator

from gt_config import ContextParallelStrategy
from gt_trainer.context_parallel.batch_of_rank import batch_of_rank
from gt_trainer.context_parallel.ring_masks import ring_masks
from gt_trainer.context_parallel.token_order import load_balancer_of
from gt_trainer.decoder.attention import attention_mask_for, has_document_mask


class GraphValidator(Validator):
    """Runs the model eagerly on validation data, and logs the mean loss over its tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        """The options of torchtitan's validator."""

    context_parallel: ContextParallelStrategy = "gather"
    """How the layers attend to other ranks' tokens; the trainer sets it."""

    def post_dataloading_process(
        self,
        input_dict: dict[str, torch.Tensor],
        labels: torch.Tensor,
        model_parts: list[nn.Module],
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """As torchtitan's, plus the mask of documents where the model's attention takes one.

        Args:
            input_dict: "input" (B, L) token ids and "positions" (B, L).
            labels: (B, L) token ids.
            model_parts: the model, in one part.
        """
        config = model_parts[0].config
        if self.parallel_dims.cp_enabled and has_document_mask(config):
            return batch_of_rank(
                input_dict,
                labels,
                self.parallel_dims.get_mesh("cp"),
                load_balancer=load_balancer_of(self.parallelism.context_parallel_load_balancer),
                strategy=self.context_parallel,
            )
        inputs, labels, extra_kwargs = super().post_dataloading_process(
            input_dict, labels, model_parts
        )
        mask = attention_mask_for(model_parts[0], extra_kwargs.get("positions"))
        if mask is not None:
            extra_kwargs["attention_masks"] = mask
        if self.parallel_dims.cp_enabled and self.context_parallel == "ring":
            mesh = self.parallel_dims.get_mesh("cp")
            extra_kwargs["attention_masks"] = ring_masks(
                extra_kwargs["attention_masks"], num_ranks=mesh.size(), rank=mesh.get_local_rank()
            )
        return inputs, labels, extra_kwargs
