"""config.json says what the model is, and is not written for what transformers does not have."""

from __future__ import annotations

import json

import pytest
from torchtitan.models.gpt_oss import config_registry as gpt_oss

from gt_trainer.checkpoints.hugging_face_folder import (
    NoHuggingFaceConfigError,
    complete_folder,
    hugging_face_config,
)
from gt_trainer.data.shipped_tokenizer import shipped_tokenizer_path
from gt_trainer.models import deepseek_v3, llama3, qwen3


def model_of(make):
    return make().model_spec.model


def refusal(model):
    with pytest.raises(NoHuggingFaceConfigError) as refused:
        hugging_face_config(model)
    return str(refused.value)


def test_the_published_8b_is_described_as_its_publisher_does():
    config = hugging_face_config(model_of(llama3.llama3_8b))
    # meta-llama/Llama-3.1-8B, config.json
    assert (
        config.items()
        >= {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "rms_norm_eps": 1e-05,
            "rope_theta": 500000,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        }.items()
    )


def test_the_published_671b_is_described_as_its_publisher_does():
    config = hugging_face_config(model_of(deepseek_v3.deepseek_v3_671b))
    # deepseek-ai/DeepSeek-V3, config.json
    assert (
        config.items()
        >= {
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "n_shared_experts": 1,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        }.items()
    )


def test_what_transformers_does_not_have_is_refused_with_the_reason():
    assert refusal(model_of(deepseek_v3.deepseek_v3_debugmodel)) == (
        "its router scores by softmax, and that of DeepSeek-V3 in transformers by sigmoid alone"
    )
    assert refusal(model_of(qwen3.qwen3_moe_debugmodel)) == (
        "its router has a bias that balances the load (load_balance_coeff), Qwen3's has none"
    )
    assert refusal(gpt_oss.gpt_oss_debugmodel().model_spec.model) == (
        "no class of transformers is known for GptOssModel.Config; known are those of llama3, qwen3, "
        "deepseek_v3"
    )
    model = model_of(llama3.llama3_debugmodel)
    model.layers[1].ffn_norm.eps = 1e-3
    assert refusal(model) == "its layers differ in norm eps, and transformers has one"


def test_a_folder_gets_the_tokenizer_and_what_its_publisher_says_of_it(tmp_path):
    assets, folder = tmp_path / "assets", tmp_path / "folder"
    assets.mkdir()
    folder.mkdir()
    (assets / "tokenizer.json").write_text("{}")
    (assets / "config.json").write_text(
        '{"eos_token_id": 7, "hidden_size": 3, "max_position_embeddings": 5}'
    )
    model = model_of(llama3.llama3_debugmodel)
    assert complete_folder(folder, model, assets) is None
    written = json.loads((folder / "config.json").read_text())
    assert (written["eos_token_id"], written["hidden_size"]) == (7, 256)
    assert written["max_position_embeddings"] == model.max_seq_len
    assert (folder / "tokenizer.json").read_text() == "{}"


def test_a_folder_without_a_configuration_says_why(tmp_path):
    reason = complete_folder(
        tmp_path, model_of(deepseek_v3.deepseek_v3_debugmodel), shipped_tokenizer_path()
    )
    assert reason.startswith("its router scores by softmax")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
