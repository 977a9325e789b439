"""A causal language model of transformers' as a model that torchtitan's trainer builds.

The model is transformers' own, unmodified, inside of a module that takes what torchtitan gives a
decoder: tokens and their positions. Tokens attend to their own document alone, by a mask that is
made in the step, so that transformers makes none (which it does otherwise where it is traced).
Nothing is dropped out: the model computes as it does when it is evaluated.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from gt_trace.fsdp import MixedPrecision, shard
from gt_trainer.decoder.attention import document_causal_mask
from gt_trainer.decoder.initialization import copy_part
from gt_trainer.placement.parallelize import dense_placement

_INSIDE = "causal_lm."
"""Before the names that parameters have in transformers' model."""


class UncomputedBufferError(ValueError):
    """A buffer of a model has a value that only its constructor gives."""


class CausalModel(BaseModel):
    """transformers' model, from tokens to logits."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """What transformers builds the model from."""

        config_json: str
        """The contents of config.json."""

        vocab_size: int
        """Embeddings."""

        max_seq_len: int
        """Positions that the model has."""

        draws_weights: bool = True
        """Whether weights are drawn; they are not where a checkpoint's or the folder's are read."""

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """See whether weights will be read."""
            checkpoint = config.checkpoint
            self.draws_weights = not (checkpoint.enable and checkpoint.initial_load_in_hf)

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Parameters, and 6 operations a token for each that no embedding holds.

            Those of attention's scores are not counted.
            """
            num_parameters = sum(each.numel() for each in model.parameters())
            looked_up = sum(
                each.weight.numel() for each in model.modules() if isinstance(each, nn.Embedding)
            )
            tied = bool(tied_names(model))
            num_multiplied = num_parameters if tied else num_parameters - looked_up
            return num_parameters, 6 * num_multiplied

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.causal_lm = build(config.config_json)
        # A step does not generate, and what this keeps of itself is another number in each process.
        self.causal_lm.generation_config = None

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits (B, L, vocabulary).

        Args:
            tokens: (B, L) integers.
            positions: (B, L) integers, the position of each token in its document.
        """
        logits: torch.Tensor = self.causal_lm(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=document_causal_mask(positions),
            use_cache=False,
        ).logits
        return logits

    def train(self, mode: bool = True) -> CausalModel:
        """As ``nn.Module``'s, but transformers' model never drops anything out."""
        super().train(mode)
        self.causal_lm.eval()
        return self

    def verify_module_protocol(self) -> None:
        """Modules of transformers' are none of torchtitan's."""

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Draw the weights, the same for every number of ranks, and compute the buffers.

        Drawn weights are there in whole on each rank's host while they are drawn.

        Args:
            buffer_device: Of the buffers; None for that of the parameters.
        """
        _tie(self.causal_lm)
        if self.config.draws_weights:
            with torch.device("cpu"):
                drawn = build(self.config.config_json)
            whole = dict(drawn.named_parameters())
            for name, parameter in self.causal_lm.named_parameters():
                copy_part(whole[name], parameter)
        buffers = computed_buffers(build_on_meta(self.config.config_json))
        for name, buffer in list(self.causal_lm.named_buffers()):
            module_name, _, key = name.rpartition(".")
            device = buffer_device or buffer.device
            self.causal_lm.get_submodule(module_name)._buffers[key] = buffers[name].to(device)


class CausalModelAdapter(StateDictAdapter):
    """Names of transformers' parameters are kept, and tied weights are in files once."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state by the names that files have.

        Args:
            state_dict: By the names of ``CausalModel``.
        """
        twins = self._twins()
        renamed = {name.removeprefix(_INSIDE): value for name, value in state_dict.items()}
        return {name: value for name, value in renamed.items() if name not in twins}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state by the names of ``CausalModel``.

        Args:
            hf_state_dict: By the names that files have.
        """
        twins = {twin: hf_state_dict[name] for twin, name in self._twins().items()}
        return {f"{_INSIDE}{name}": each for name, each in (hf_state_dict | twins).items()}

    def _twins(self) -> dict[str, str]:
        return tied_names(build_on_meta(self.model_config.config_json))  # type: ignore[attr-defined]  # ours


def parallelize_causal_model(
    model: CausalModel, *, parallel_dims: Any, training: Any, **_: Any
) -> CausalModel:
    """Shard all parameters over the data-parallel ranks, in place; preflight refuses other axes.

    Args:
        model: On meta.
        parallel_dims: torchtitan's meshes.
        training: Gives the dtypes of mixed precision.
    """
    placement = dense_placement(parallel_dims)
    shard(
        model,
        placement.mesh,
        mode=placement.mode,
        mixed_precision=MixedPrecision(
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        ),
        reduction="sum",
    )
    return model


def tied_names(model: Any) -> dict[str, str]:
    """Names of parameters that are another one too, and the name of that one."""
    inner = getattr(model, "causal_lm", model)
    return dict(inner.all_tied_weights_keys)


def transformers_config(config_json: str) -> Any:
    """The configuration object of a config.json. Code that it names is not run."""
    from transformers import AutoConfig

    values = json.loads(config_json)
    # Saved weights may be in lower precision; what is trained is in the run's.
    for key in ("dtype", "torch_dtype"):
        values.pop(key, None)
    return AutoConfig.for_model(values.pop("model_type"), **values)


def build(config_json: str) -> Any:
    """The model with drawn weights, in PyTorch's default dtype, on its default device."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
        transformers_config(config_json),
        attn_implementation="sdpa",
        dtype=torch.get_default_dtype(),
        trust_remote_code=False,
    )


def build_on_meta(config_json: str) -> Any:
    """The same without memory."""
    with torch.device("meta"):
        return build(config_json)


def _tie(model: nn.Module) -> None:
    """Anew: memory was given to each name of a tied parameter."""
    for twin, name in tied_names(model).items():
        module_name, _, key = name.rpartition(".")
        owner, _, twin_key = twin.rpartition(".")
        parameter = model.get_submodule(module_name)._parameters[key]
        model.get_submodule(owner)._parameters[twin_key] = parameter


def computed_buffers(model: Any) -> dict[str, torch.Tensor]:
    """Compute the buffers of a model on meta as transformers does when it loads one, on the host.

    Args:
        model: Of transformers. Its parameters stay on meta; its buffers become the computed ones.

    Raises:
        UncomputedBufferError: transformers leaves one as it found it.
    """
    found: list[dict[str, torch.Tensor]] = []
    for value in (0, 1):
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = torch.full_like(buffer, value, device="cpu")
            if any(each is not None for each in module._buffers.values()):
                with torch.no_grad(), torch.device("cpu"):
                    model._init_weights(module)
        found.append({name: each.clone() for name, each in model.named_buffers()})
    left = [name for name, each in found[0].items() if not torch.equal(each, found[1][name])]
    if left:
        raise UncomputedBufferError(f"transformers does not compute {', '.join(left)} anew")
    return found[0]
