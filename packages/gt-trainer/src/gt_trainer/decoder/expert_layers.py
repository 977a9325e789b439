"""What a decoder's configuration says of routed experts."""

from __future__ import annotations

from typing import Any

from torchtitan.models.common.decoder import Decoder


def expert_layers(model: Decoder.Config) -> list[Any]:
    """The configuration of each layer of routed experts; none of a dense model."""
    return [layer.moe for layer in model.layers if getattr(layer, "moe", None) is not None]
