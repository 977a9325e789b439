"""What the workers of ``test_hugging_face_export.py`` run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from training_cases import Case, RecordingTrainer, close, use_this_group
from transformers import AutoModelForCausalLM, AutoTokenizer

from gt_trainer.decoder.attention import attention_mask_for


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What transformers makes of a folder."""

    largest_difference: float
    """Of its logits from those of the model that was trained, over the largest of these."""

    files: tuple[str, ...]
    model: str
    num_tokens: int
    """Of its tokenizer."""


def export(
    case: Case, folder: str, change: Callable[[Any], None] = lambda model: None
) -> Exported | None:
    """Train a step, save it for transformers, and compare what that computes, on rank 0.

    Args:
        case: What is trained.
        folder: Is written to.
        change: Of the model's configuration.
    """
    use_this_group()
    config = case.build(
        "aot_fx_trace", folder, enable=True, last_save_model_only=True, last_save_in_hf=True
    )
    change(config.model_spec.model)  # type: ignore[union-attr]  # it has one
    config.training.steps = 1
    trainer = RecordingTrainer(config)
    trainer.train()
    model: Any = trainer.model_parts[0]
    tokens = torch.randint(0, 2048, (2, 48), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(48).expand(2, -1).contiguous()
    model.eval()
    with torch.no_grad():
        hidden = model(
            tokens, positions=positions, attention_masks=attention_mask_for(model, positions)
        )
        ours = model.lm_head(hidden) if model._skip_lm_head else hidden
    ours = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
    rank = torch.distributed.get_rank()
    close(trainer)
    if rank:
        return None
    saved = Path(folder) / "checkpoint" / "step-1"
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()
    for name, module in loaded.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            # transformers 5.23 has 1e-6 in DeepSeek-V3's norms of latents, whatever config.json says.
            module.variance_epsilon = loaded.config.rms_norm_eps
    with torch.no_grad():
        theirs = loaded(tokens).logits
    return Exported(
        largest_difference=((ours - theirs).abs().max() / ours.abs().max()).item(),
        files=tuple(sorted(path.name for path in saved.iterdir())),
        model=type(loaded).__name__,
        num_tokens=len(AutoTokenizer.from_pretrained(saved)),
    )


def sigmoid_routing(model: Any) -> None:
    """Route as the published DeepSeek-V3 does."""
    for layer in model.layers:
        if layer.moe is not None:
            layer.moe.router.score_func = "sigmoid"
            layer.moe.router.route_norm = True
            layer.moe.router.route_scale = 2.5


def without_bias(model: Any) -> None:
    """Balance no load, as Qwen3's routers in transformers."""
    for layer in model.layers:
        layer.moe.load_balance_coeff = None
