"""Small models of transformers that are no plain decoders, and batches for them.

Encoders, sequence-to-sequence models, images, sound, time series, state spaces and linear
attention: for the second table of ``hugging_face_families.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY, BATCH, LENGTH = 96, 2, 24

Inputs = dict[str, Any]
"""Keyword arguments of a forward."""

_ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_DECODER = {
    **_ENCODER,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 3,
}
_SEQUENCE_TO_SEQUENCE = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
_SERIES = {
    "num_input_channels": 3,
    "context_length": 32,
    "prediction_length": 8,
    "patch_length": 8,
    "patch_stride": 8,
    "d_model": 16,
}


def _tokens(generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length), generator=generator)


def _text(generator: torch.Generator) -> Inputs:
    tokens = _tokens(generator)
    mask = torch.ones_like(tokens)
    mask[-1, -5:] = 0
    return {
        "input_ids": tokens * mask,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100),
    }


def _text_without_mask(generator: torch.Generator) -> Inputs:
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens}


def _classified_text(generator: torch.Generator) -> Inputs:
    return {"input_ids": _tokens(generator), "labels": torch.tensor([0, 2])}


def _two_texts(generator: torch.Generator) -> Inputs:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator, 10)}


def _images(generator: torch.Generator) -> Inputs:
    pixels = torch.randn(BATCH, 3, 32, 32, generator=generator)
    return {"pixel_values": pixels, "labels": torch.tensor([0, 2])}


def _images_and_text(generator: torch.Generator) -> Inputs:
    pixels = torch.randn(BATCH, 3, 32, 32, generator=generator)
    return {"input_ids": _tokens(generator), "pixel_values": pixels, "return_loss": True}


def _videos(generator: torch.Generator) -> Inputs:
    pixels = torch.randn(BATCH, 4, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.tensor([0, 2])}


def _waves(generator: torch.Generator) -> Inputs:
    values = torch.randn(BATCH, 400, generator=generator)
    return {"input_values": values, "labels": torch.tensor([0, 1])}


def _spectra_and_text(generator: torch.Generator) -> Inputs:
    features = torch.randn(BATCH, 8, 40, generator=generator)
    return {"input_features": features, "labels": _tokens(generator, 10)}


def _time_series(generator: torch.Generator) -> Inputs:
    return {
        "past_values": torch.randn(BATCH, 32, 3, generator=generator),
        "future_values": torch.randn(BATCH, 8, 3, generator=generator),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKind:
    """A small model and its batches."""

    head: str
    """Class of transformers, without the name of the family in front."""

    kind: str
    """Its kind, for people."""

    inputs: Callable[[torch.Generator], Inputs]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of its configuration."""

    refused_because: str | None = None
    """Part of the refusal, for a model that cannot be captured; None for one that can."""

    def small_model(self, family: str) -> nn.Module:
        """Return the model with random weights, in training mode.

        Args:
            family: name of the class of the configuration, without ``Config``.
        """
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**self.options)
        model: nn.Module = getattr(transformers, f"{family}{self.head}")(config)
        return model.train()


OTHER_KINDS: Mapping[str, ModelKind] = {
    "Bert": ModelKind(head="ForMaskedLM", kind="encoder", inputs=_text, options=_ENCODER),
    "DebertaV2": ModelKind(
        head="ForSequenceClassification",
        kind="encoder",
        inputs=_classified_text,
        options={**_ENCODER, "num_labels": 3},
        refused_because="the step needs the value of a tensor",
    ),
    "FNet": ModelKind(
        head="ForMaskedLM",
        kind="encoder by Fourier transforms",
        inputs=_text_without_mask,
        options={**_ENCODER, "tpu_short_seq_length": LENGTH},
    ),
    "T5": ModelKind(
        head="ForConditionalGeneration",
        kind="text to text",
        inputs=_two_texts,
        options={
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "Bart": ModelKind(
        head="ForConditionalGeneration",
        kind="text to text",
        inputs=_two_texts,
        options={**_SEQUENCE_TO_SEQUENCE, "max_position_embeddings": 64},
    ),
    "Whisper": ModelKind(
        head="ForConditionalGeneration",
        kind="sound to text",
        inputs=_spectra_and_text,
        options={
            **_SEQUENCE_TO_SEQUENCE,
            "num_mel_bins": 8,
            "max_source_positions": 20,
            "max_target_positions": 20,
            "decoder_start_token_id": 1,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
    "Wav2Vec2": ModelKind(
        head="ForSequenceClassification",
        kind="sound",
        inputs=_waves,
        options={
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "conv_dim": [16, 16],
            "conv_kernel": [10, 3],
            "conv_stride": [5, 2],
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "num_feat_extract_layers": 2,
            "classifier_proj_size": 8,
            "num_labels": 2,
            "mask_time_prob": 0.3,
            "mask_time_length": 2,
            "layerdrop": 0.0,
        },
        refused_because="NumPy",
    ),
    "ViT": ModelKind(head="ForImageClassification", kind="images", inputs=_images, options=_VISION),
    "Swin": ModelKind(
        head="ForImageClassification",
        kind="images",
        inputs=_images,
        options={
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": 3,
        },
    ),
    "ConvNext": ModelKind(
        head="ForImageClassification",
        kind="images, convolutions",
        inputs=_images,
        options={
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_stages": 2,
            "num_labels": 3,
            "drop_path_rate": 0.2,
        },
    ),
    "ResNet": ModelKind(
        head="ForImageClassification",
        kind="images, batch norm",
        inputs=_images,
        options={"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3},
    ),
    "VideoMAE": ModelKind(
        head="ForVideoClassification",
        kind="video",
        inputs=_videos,
        options={
            **_VISION,
            "num_hidden_layers": 1,
            "image_size": 16,
            "num_frames": 4,
            "tubelet_size": 2,
        },
        refused_because="would be frozen into the graph",
    ),
    "CLIP": ModelKind(
        head="Model",
        kind="images and text",
        inputs=_images_and_text,
        options={
            "text_config": {**_ENCODER, "projection_dim": 16, "eos_token_id": 2},
            "vision_config": {**_VISION, "projection_dim": 16},
            "projection_dim": 16,
        },
    ),
    "PatchTST": ModelKind(
        head="ForPrediction",
        kind="time series",
        inputs=_time_series,
        options={
            **_SERIES,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "ffn_dim": 32,
            "loss": "mse",
        },
    ),
    "PatchTSMixer": ModelKind(
        head="ForPrediction",
        kind="time series",
        inputs=_time_series,
        options={**_SERIES, "num_layers": 2},
    ),
    "Mamba2": ModelKind(
        head="ForCausalLM",
        kind="state space",
        inputs=_text,
        options={
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
            "num_heads": 4,
            "head_dim": 16,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    "RecurrentGemma": ModelKind(
        head="ForCausalLM",
        kind="recurrent and local attention",
        inputs=_text,
        options={
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "lru_width": 32,
        },
        refused_because="the step changes Python objects",
    ),
    "Qwen3Next": ModelKind(
        head="ForCausalLM",
        kind="linear attention, experts",
        inputs=_text,
        options={
            **_DECODER,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "Doge": ModelKind(
        head="ForCausalLM", kind="dynamic attention masks", inputs=_text, options=_DECODER
    ),
}
"""By the name of the family."""
