"""Hugging Face's Llama, as transformers has it, splits into stages and knows nothing of it."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gt_pipeline.errors import NotSplittableError, TiedParametersError
from gt_pipeline.split import (
    HUGGING_FACE_NAMING,
    RemovalPolicy,
    SharedGroup,
    check_cover,
    check_splittable,
    find_naming,
    module_names_per_stage,
)

TOKENS = torch.arange(32).reshape(2, 16)
AS_TUPLES = {"return_dict": False}
IDENTITY = RemovalPolicy(attribute="identity")
NAMES = module_names_per_stage(6, num_stages=4, naming=HUGGING_FACE_NAMING)


def llama(*, tied: bool = False) -> torch.nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=6,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=64,
            use_cache=False,
            tie_word_embeddings=tied,
        )
    )


def test_its_names_are_known():
    assert find_naming(llama()) is HUGGING_FACE_NAMING


def test_its_stages_compute_what_it_does_with_identities_in_place_of_what_is_missing():
    check_splittable(llama(), NAMES, (TOKENS,), AS_TUPLES, policy=IDENTITY)


def test_its_forward_does_not_bear_none():
    with pytest.raises(NotSplittableError, match="'NoneType' object is not callable"):
        check_splittable(llama(), NAMES, (TOKENS,), AS_TUPLES)


def test_tied_embeddings_are_named_and_may_be_declared():
    model = llama(tied=True)
    with pytest.raises(TiedParametersError, match=r"'model\.embed_tokens\.weight' on stage 0"):
        check_cover(model, NAMES)
    groups = [SharedGroup(("model.embed_tokens.weight", "lm_head.weight"))]
    check_splittable(model, NAMES, (TOKENS,), AS_TUPLES, policy=IDENTITY, shared_groups=groups)
