"""Models of transformers that cannot be trained here are refused with every reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gt_trainer.models.hugging_face.causal_model import CausalModel
from gt_trainer.models.hugging_face.configuration import (
    UntrainableFolderError,
    hugging_face_configuration,
)

pytest.importorskip("transformers", reason="an extra of gt-trainer: hf")

SMALL = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}


def folder(path: Path, **changes: object) -> Path:
    (path / "config.json").write_text(json.dumps(SMALL | changes))
    return path


def test_a_run_has_the_models_vocabulary_and_positions(tmp_path: Path) -> None:
    config = hugging_face_configuration(folder(tmp_path))
    assert config.model_spec is not None
    model = config.model_spec.model
    assert isinstance(model, CausalModel.Config)
    assert (model.vocab_size, model.max_seq_len) == (2048, 128)
    assert config.training.seq_len == 128  # it has no more
    assert config.hf_assets_path == str(tmp_path)
    assert not config.checkpoint.initial_load_in_hf  # there are no weights


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"model_type": "mistral", "sliding_window": 64},
            (
                "MistralForCausalLM has windows of attention, which the mask of documents that it is "
                "given lacks"
            ),
        ),
        (
            {"model_type": "mixtral", "num_local_experts": 4},
            "MixtralForCausalLM has experts, whose loss that balances them is no part of the step",
        ),
        (
            {"rope_parameters": DYNAMIC},
            "LlamaForCausalLM has rotary embeddings (dynamic) that change with the positions",
        ),
        (
            {"model_type": "mistral", "sliding_window": 64, "rope_parameters": DYNAMIC},
            (
                "MistralForCausalLM has windows of attention, which the mask of documents that it is "
                "given lacks; MistralForCausalLM has rotary embeddings (dynamic) that change with the "
                "positions"
            ),
        ),
    ],
)
def test_what_the_mask_of_documents_or_the_step_lacks_is_refused(
    changes: dict[str, object], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UntrainableFolderError) as refused:
        hugging_face_configuration(folder(tmp_path, **changes))
    assert str(refused.value) == reason


@pytest.mark.parametrize("changes", [{"model_type": "mamba"}, {"num_attention_heads": 0}])
def test_what_transformers_does_not_build_is_refused_in_its_words(
    changes: dict[str, object], tmp_path: Path
) -> None:
    with pytest.raises(UntrainableFolderError, match=r"^transformers builds no model of it: \S"):
        hugging_face_configuration(folder(tmp_path, **changes))


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    header = json.dumps(
        {"lm_head.weight": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}}
    ).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(32)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(UntrainableFolderError) as refused:
        hugging_face_configuration(folder(tmp_path, num_hidden_layers=1))
    assert str(refused.value) == (
        "its weights are not the model's: "
        "model.embed_tokens.weight none (the model: (2048, 64)), "
        "model.layers.0.self_attn.q_proj.weight none (the model: (64, 64)), "
        "model.layers.0.self_attn.k_proj.weight none (the model: (32, 64)), "
        "model.layers.0.self_attn.v_proj.weight none (the model: (32, 64)), 8 more"
    )
