"""The mask of one sample is of the kind that the mask of a whole batch has."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils import _pytree as pytree
from torchtitan.models.common import attention
from torchtitan.models.llama3 import config_registry

from gt_trace import register_block_masks
from gt_trainer.models import llama3
from gt_trainer.placement.masks_of_parts import _MasksOfParts, make_masks_of_parts

LENGTH = 16


def decoder(config: Any) -> Any:
    model = config.model_spec.model
    model.layers = model.layers[:1]
    with torch.device("meta"):
        return model.build()


def test_a_sample_is_masked_as_it_is_within_its_batch(monkeypatch: Any) -> None:
    monkeypatch.setattr(attention, "_compiled_create_block_mask", create_block_mask)
    register_block_masks()
    model = decoder(config_registry.llama3_debugmodel())
    positions = torch.stack([torch.arange(LENGTH) % 5, torch.arange(LENGTH) % 7])
    whole, structure = pytree.tree_flatten(model.get_attention_masks(positions))
    alone = pytree.tree_structure(model.get_attention_masks(positions[1:]))
    assert alone != structure
    make_masks_of_parts(model)
    part, structure_of_part = pytree.tree_flatten(model.get_attention_masks(positions[1:]))
    assert structure_of_part == structure
    for leaf, of_whole in zip(part, whole, strict=True):
        if isinstance(leaf, torch.Tensor):
            assert torch.equal(leaf, of_whole[1:])


def test_masks_of_several_samples_and_other_attention_are_left_alone(monkeypatch: Any) -> None:
    monkeypatch.setattr(attention, "_compiled_create_block_mask", create_block_mask)
    model = decoder(config_registry.llama3_debugmodel())
    positions = torch.arange(LENGTH).expand(2, -1)
    wanted = model.get_attention_masks(positions)
    make_masks_of_parts(model)
    assert torch.equal(model.get_attention_masks(positions).kv_indices, wanted.kv_indices)
    replaced = decoder(llama3.llama3_debugmodel())
    make_masks_of_parts(replaced)
    assert "get_attention_masks" not in vars(replaced)


def test_only_what_grows_with_the_samples_is_cut() -> None:
    table = torch.arange(2)  # as many rows as samples are asked for

    def make(*, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, str]:
        return positions, table, "documents"

    masks = _MasksOfParts(make)
    positions = torch.arange(LENGTH)[None]
    for _ in range(2):
        documents, kept, name = masks(positions)
        assert torch.equal(documents, positions)
        assert kept is table
        assert name == "documents"
