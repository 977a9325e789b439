"""What a folder of Hugging Face's needs beside the weights: config.json, and the tokenizer.

torchtitan writes weights alone, and transformers builds a model from config.json. It is made here
from the configuration that was trained, in the names that transformers has had since its version 4.
What a model has and transformers' class of it has not is a reason to write none.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.rope import RoPE

CONFIG = "config.json"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_OF_PUBLISHER = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Of a published config.json in the assets, what the configuration of a model does not say."""


class NoHuggingFaceConfigError(ValueError):
    """transformers has no model like this one, or none that is known here."""


def complete_folder(folder: Path, model: object, assets: Path | None) -> str | None:
    """Write config.json and copy the tokenizer beside exported weights.

    Args:
        folder: Has the weights.
        model: The configuration of the model that was trained.
        assets: The run's ``hf_assets_path``; None if it has none.

    Returns:
        Why there is no config.json; None if it was written.
    """
    for name in _TOKENIZER:
        if assets is not None and (assets / name).is_file():
            shutil.copyfile(assets / name, folder / name)
    own: str | None = getattr(model, "config_json", None)
    if own is not None:  # a model of transformers' own
        (folder / CONFIG).write_text(own, encoding="utf-8")
        return None
    try:
        made = hugging_face_config(model)
    except NoHuggingFaceConfigError as error:
        return str(error)
    published = {}
    if assets is not None and (assets / CONFIG).is_file():
        published = json.loads((assets / CONFIG).read_text(encoding="utf-8"))
    made.update({name: published[name] for name in _OF_PUBLISHER if name in published})
    (folder / CONFIG).write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    return None


def hugging_face_config(model: object) -> dict[str, Any]:
    """The contents of config.json for a decoder of torchtitan's.

    Args:
        model: Its configuration.

    Raises:
        NoHuggingFaceConfigError: With the reason.
    """
    family = type(model).__module__.rpartition(".models.")[2].partition(".")[0]
    if not isinstance(model, Decoder.Config) or family not in _FAMILIES:
        raise NoHuggingFaceConfigError(
            f"no class of transformers is known for {type(model).__qualname__}; known are those of "
            f"{', '.join(_FAMILIES)}"
        )
    return _common(model) | _FAMILIES[family](model)


def _common(model: Any) -> dict[str, Any]:
    first = model.layers[0]
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": first.attention.n_heads,
        "rms_norm_eps": _equal("norm eps", *_norm_eps(model)),
        "max_position_embeddings": model.max_seq_len,
        "rope_theta": first.attention.rope.theta,
        "tie_word_embeddings": model.enable_weight_tying,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_cache": True,
    }


def _norm_eps(model: Any) -> list[float]:
    layers = [each for layer in model.layers for each in (layer.attention_norm, layer.ffn_norm)]
    return [each.eps for each in (model.norm, *layers)]


def _grouped_attention(model: Any) -> dict[str, Any]:
    attention = model.layers[0].attention
    return {
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "head_dim": attention.head_dim or model.dim // attention.n_heads,
    }


def _llama(model: Any) -> dict[str, Any]:
    rope: RoPE.Config = model.layers[0].attention.rope
    if rope.scaling == "yarn":
        raise NoHuggingFaceConfigError("its rotary embeddings are scaled by yarn, Llama's are not")
    scaled = rope.scaling == "llama"
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": _feed_forward_width(model),
        "mlp_bias": False,
        "rope_scaling": _llama_scaling(rope) if scaled else None,
        **_grouped_attention(model),
    }


def _llama_scaling(rope: RoPE.Config) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": rope.scaling_factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }


def _qwen3(model: Any) -> dict[str, Any]:
    if model.layers[0].attention.rope.scaling != "none":
        raise NoHuggingFaceConfigError("its rotary embeddings are scaled, and Qwen3's are not")
    moes = [layer.moe for layer in model.layers if layer.moe is not None]
    if not moes:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "intermediate_size": _feed_forward_width(model),
            **_grouped_attention(model),
        }
    dense = [index for index, layer in enumerate(model.layers) if layer.moe is None]
    router = moes[0].router
    if moes[0].load_balance_coeff is not None:
        raise NoHuggingFaceConfigError(
            "its router has a bias that balances the load (load_balance_coeff), Qwen3's has none"
        )
    if router.score_func != "softmax" or router.route_scale != 1.0:
        raise NoHuggingFaceConfigError("its router scores otherwise than by an unscaled softmax")
    width = moes[0].routed_experts.inner_experts.hidden_dim
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "intermediate_size": _feed_forward_width(model) if dense else width,
        "moe_intermediate_size": width,
        "num_experts": moes[0].num_experts,
        "num_experts_per_tok": router.top_k,
        "norm_topk_prob": router.route_norm,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        **_grouped_attention(model),
    }


def _deepseek_v3(model: Any) -> dict[str, Any]:
    attention = model.layers[0].attention
    moes = [layer.moe for layer in model.layers if layer.moe is not None]
    if not moes or moes[0].router.score_func != "sigmoid":
        raise NoHuggingFaceConfigError(
            "its router scores by softmax, and that of DeepSeek-V3 in transformers by sigmoid alone"
        )
    num_dense = len(model.layers) - len(moes)
    if any(layer.moe is not None for layer in model.layers[:num_dense]):
        raise NoHuggingFaceConfigError("its dense layers are not the first, as DeepSeek-V3's are")
    router, width = moes[0].router, moes[0].routed_experts.inner_experts.hidden_dim
    shared = moes[0].shared_experts.w1.out_features if moes[0].shared_experts is not None else 0
    groups = router.num_expert_groups or 1
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": attention.n_heads,
        "intermediate_size": _feed_forward_width(model) if num_dense else width,
        "moe_intermediate_size": width,
        "first_k_dense_replace": num_dense,
        "n_routed_experts": moes[0].num_experts,
        "n_shared_experts": shared // width,
        "num_experts_per_tok": router.top_k,
        "n_group": groups,
        "topk_group": router.num_limited_groups or groups,
        "norm_topk_prob": router.route_norm,
        "routed_scaling_factor": router.route_scale,
        "q_lora_rank": attention.q_lora_rank or None,
        "kv_lora_rank": attention.kv_lora_rank,
        "qk_nope_head_dim": attention.qk_nope_head_dim,
        "qk_rope_head_dim": attention.qk_rope_head_dim,
        "v_head_dim": attention.v_head_dim,
        "rope_interleave": True,
        "rope_scaling": _yarn(attention),
    }


def _yarn(attention: Any) -> dict[str, Any] | None:
    rope: RoPE.Config = attention.rope
    if rope.scaling == "none":
        return None
    if rope.scaling != "yarn":
        raise NoHuggingFaceConfigError("its rotary embeddings are scaled, and not by yarn")
    return {
        "rope_type": "yarn",
        "factor": rope.rope_factor,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": attention.mscale,
        "mscale_all_dim": attention.mscale,
        "original_max_position_embeddings": rope.original_seq_len,
    }


def _feed_forward_width(model: Any) -> int:
    found = [layer.feed_forward for layer in model.layers if layer.feed_forward is not None]
    return int(_equal("feed-forward width", *(each.w1.out_features for each in found)))


def _equal(what: str, *values: float) -> float:
    if len({*values}) != 1:
        raise NoHuggingFaceConfigError(f"its layers differ in {what}, and transformers has one")
    return values[0]


_FAMILIES: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "llama3": _llama,
    "qwen3": _qwen3,
    "deepseek_v3": _deepseek_v3,
}
"""By the folder of torchtitan's model."""
