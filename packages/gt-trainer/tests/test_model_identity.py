"""What tells one model from another beside its checkpoints."""

import copy

import pytest
from torchtitan.models.deepseek_v3 import model_registry as deepseek_registry
from torchtitan.models.llama3 import model_registry as llama_registry
from torchtitan.models.qwen3 import model_registry as qwen_registry

from gt_trainer.model_identity import (
    explain_difference,
    identity_of,
    read_identity,
    write_identity,
)
from gt_trainer.models import deepseek_v3, llama3, qwen3


def test_the_identity_of_the_main_model(tmp_path):
    identity = identity_of(llama3.llama3_debugmodel().model_spec)
    assert identity.name == "llama3 debugmodel"
    assert {name: text for name, text in identity.fields.items() if name.count(".") < 3} == {
        "class": "Llama3Model",
        "dim": "256",
        "vocab_size": "2048",
        "lm_head.in_features": "256",
        "lm_head.out_features": "2048",
        "lm_head.bias": "False",
        "tok_embeddings.num_embeddings": "2048",
        "tok_embeddings.embedding_dim": "256",
        "norm.normalized_shape": "256",
        "norm.eps": "1e-05",
        "norm.elementwise_affine": "True",
        "layers": "6",
        "enable_weight_tying": "False",
    }
    assert identity.fields["layers.*.attention.n_heads"] == "16"
    write_identity(tmp_path / "checkpoint", identity)
    assert read_identity(tmp_path / "checkpoint") == identity
    assert read_identity(tmp_path) is None


@pytest.mark.parametrize(
    ("function", "registry", "flavor"),
    [
        (llama3.llama3_debugmodel, llama_registry, "debugmodel"),
        (qwen3.qwen3_debugmodel, qwen_registry, "debugmodel"),
        (deepseek_v3.deepseek_v3_debugmodel, deepseek_registry, "debugmodel"),
    ],
)
def test_a_model_is_the_same_on_every_device_and_after_it_was_built(function, registry, flavor):
    config = function()
    identity = identity_of(config.model_spec)
    assert identity == identity_of(registry(flavor))
    assert not any(" at 0x" in text for text in identity.fields.values())
    config.training.seq_len = 512
    config.parallelism.expert_parallel_degree = 2
    config.model_spec.model.update_from_config(config=config)
    assert identity_of(config.model_spec) == identity


def test_differences_are_told_from_the_general_to_the_particular():
    llama = llama3.llama3_debugmodel().model_spec
    assert explain_difference(
        identity_of(llama), identity_of(deepseek_v3.deepseek_v3_debugmodel().model_spec)
    ) == (
        "class Llama3Model (here DeepSeekV3Model), mtp_layers none (here 0), "
        "layers.*.attention.q_lora_rank none (here 0), "
        "layers.*.attention.kv_lora_rank none (here 512), "
        "layers.*.attention.qk_nope_head_dim none (here 128), "
        "layers.*.attention.qk_rope_head_dim none (here 64), 60 more"
    )


def test_layers_that_differ_are_named():
    spec = llama3.llama3_debugmodel().model_spec
    changed = copy.deepcopy(spec)
    changed.model.layers = changed.model.layers[:5]
    changed.model.layers[3].attention.rope.theta = 10000
    assert explain_difference(identity_of(spec), identity_of(changed)) == (
        "layers 6 (here 5), layers.*.attention.rope.theta 500000 (here 0-2: 500000; "
        "3: 10000; 4: 500000)"
    )
    assert explain_difference(identity_of(spec), identity_of(spec)) is None
