"""Masks that a model makes for its layers, written out for attention on CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.gpt_oss import config_registry as gpt_oss
from torchtitan.models.gpt_oss.model import GptOssModel
from torchtitan.models.muse_glimmer import config_registry as muse_glimmer

from gt_trainer.decoder.attention import attention_mask_for, document_causal_mask
from gt_trainer.decoder.own_masks import OwnMasksError, makes_own_masks, own_masks
from gt_trainer.models import llama3
from gt_trainer.models.any_decoder import adapt_any

LENGTH, SPLIT, WINDOW = 12, 5, 4
POSITIONS = torch.tensor([[*range(LENGTH)], [*range(SPLIT), *range(LENGTH - SPLIT)]])


def windowed(mask, window):
    """Of a mask of documents, what lies at most so many tokens back, the token itself included."""
    token = torch.arange(mask.shape[-1])
    return mask & (token.unsqueeze(1) - token.unsqueeze(0) < window)


def small(published):
    """Its model with two layers, the windows of which have four tokens, on meta."""
    config = adapt_any(published, is_debug=True).model_spec.model
    config.layers = config.layers[:2]
    for layer in config.layers:
        for name in ("sliding_window_size", "window_size"):
            if name in type(layer.attention).__dataclass_fields__ and getattr(
                layer.attention, name
            ):
                setattr(layer.attention, name, WINDOW)
    with torch.device("meta"):
        return config.build()


def test_only_models_that_make_masks_are_asked():
    assert not makes_own_masks(llama3.llama3_debugmodel().model_spec.model)
    assert not makes_own_masks(object())
    assert makes_own_masks(gpt_oss.gpt_oss_debugmodel().model_spec.model)
    assert makes_own_masks(muse_glimmer.muse_glimmer_debugmodel().model_spec.model)


@pytest.mark.parametrize(
    ("published", "all_tokens", "in_window"),
    [
        (gpt_oss.gpt_oss_debugmodel, "basic_mask", "sliding_window_mask"),
        (gpt_oss.gpt_oss_debugmodel_flex, "basic_mask", "sliding_window_mask"),
        (muse_glimmer.muse_glimmer_debugmodel, "global", f"swa_{WINDOW}"),
    ],
)
def test_masks_are_those_of_the_model_by_its_names(published, all_tokens, in_window):
    masks = attention_mask_for(small(published()), POSITIONS)
    documents = document_causal_mask(POSITIONS)
    assert masks.keys() == {all_tokens, in_window}
    assert torch.equal(masks[all_tokens], documents)
    assert torch.equal(masks[in_window], windowed(documents, WINDOW))
    assert not torch.equal(masks[in_window], documents)


def test_a_mask_of_another_kind_is_refused():
    class Offsets(GptOssModel):
        def get_attention_masks(self, positions):
            return {"deltanet": SimpleNamespace()}

    model = object.__new__(Offsets)
    object.__setattr__(model, "config", gpt_oss.gpt_oss_debugmodel().model_spec.model)
    with pytest.raises(OwnMasksError) as refused:
        own_masks(model, POSITIONS)
    assert str(refused.value) == (
        "Offsets makes a mask of type SimpleNamespace; allowed: BlockMask, of which attention on cpu "
        "takes what it lets each token see"
    )
    assert issubclass(Offsets, Decoder)
