"""Folders of small models of transformers, and what the workers do with them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from training_cases import NUM_STEPS, RecordingTrainer, close, same, use_this_group
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

from gt_trainer.data.shipped_tokenizer import shipped_tokenizer_path
from gt_trainer.models.hugging_face.configuration import hugging_face_configuration
from gt_trainer.trainer import GraphTrainer

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_TOKENS = {"vocab_size": 2048, "bos_token_id": 0, "eos_token_id": 0}
CONFIGS = {
    "llama": lambda: LlamaConfig(**_SIZES, **_TOKENS),
    "qwen2": lambda: Qwen2Config(**_SIZES, **_TOKENS, tie_word_embeddings=True),
    "gpt2": lambda: GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=256, **_TOKENS),
}


def make_folder(parent: Path, family: str, *, max_shard_size: str = "5GB", **changes: Any) -> Path:
    """A folder as ``save_pretrained`` makes it, with the tokenizer that we ship.

    Args:
        parent: In which it is made.
        family: Of ``CONFIGS``.
        max_shard_size: Of a file of weights, as ``save_pretrained`` takes it.
        changes: Of config.json, afterwards.
    """
    folder = parent / family
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(CONFIGS[family]()).save_pretrained(
        folder, max_shard_size=max_shard_size
    )
    shutil.copy(shipped_tokenizer_path() / "tokenizer.json", folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderCase:
    """A folder's model on the ranks of the workers; built as ``training_cases.Case`` is."""

    folder: str
    parallelism: dict[str, int] = field(default_factory=dict)
    seq_len: int = 64

    def build(
        self,
        mode: str,
        folder: str,
        *,
        options: Mapping[str, Any] = MappingProxyType({}),
        **checkpoint: Any,
    ) -> GraphTrainer.Config:
        """The configuration of one run; without a checkpoint weights are drawn."""
        config = hugging_face_configuration(Path(self.folder))
        config.compile = dataclasses.replace(config.compile, mode=mode, **options)
        config.parallelism = dataclasses.replace(config.parallelism, **self.parallelism)
        config.training.seq_len, config.training.steps = self.seq_len, NUM_STEPS
        config.debug.seed, config.debug.deterministic = 7, True
        config.dump_folder, config.metrics.display = folder, "off"
        asked = {"enable": False, **checkpoint}
        config.checkpoint = dataclasses.replace(config.checkpoint, **asked)
        return config


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def read_and_export(case: FolderCase, folder: str) -> tuple[list[str], list[str], int]:
    """Load the folder, train, export; names that differ after loading, and in the export."""
    use_this_group()
    config = case.build(
        "aot_fx_trace", folder, enable=True, last_save_model_only=True, last_save_in_hf=True
    )
    trainer = RecordingTrainer(config)
    trainer.checkpointer.load()
    model: Any = trainer.model_parts[0].causal_lm
    loaded = {name: _whole(each).clone() for name, each in model.named_parameters()}
    theirs = AutoModelForCausalLM.from_pretrained(case.folder)
    misread = _differing(loaded, theirs)
    trainer.train()
    trained = {name: _whole(each) for name, each in model.named_parameters()}
    num_changed = sum(not same(loaded[name], each) for name, each in trained.items())
    exported = AutoModelForCausalLM.from_pretrained(Path(folder, "checkpoint", f"step-{NUM_STEPS}"))
    miswritten = _differing(trained, exported)
    close(trainer)
    return misread, miswritten, num_changed


def _differing(ours: dict[str, torch.Tensor], theirs: Any) -> list[str]:
    wanted = dict(theirs.named_parameters())
    assert ours.keys() == wanted.keys()
    return [name for name, each in ours.items() if not same(each, wanted[name].detach())]


def logits(case: FolderCase, folder: str) -> tuple[bool, bool]:
    """Whether logits are transformers' own, and those of a second document only its own."""
    use_this_group()
    trainer = RecordingTrainer(case.build("none", folder, enable=True))
    trainer.checkpointer.load()
    theirs = AutoModelForCausalLM.from_pretrained(case.folder, attn_implementation="sdpa").eval()
    tokens = torch.randint(0, 2048, (2, 48), generator=torch.Generator().manual_seed(3))
    whole = torch.arange(48).expand(2, -1)
    two = torch.cat([torch.arange(20), torch.arange(28)]).expand(2, -1)
    with torch.no_grad():
        alone = theirs(tokens).logits
        ours = trainer.model_parts[0](tokens, positions=whole)
        second = trainer.model_parts[0](tokens, positions=two)[:, 20:]
        second_alone = theirs(tokens[:, 20:]).logits
    close(trainer)
    return (
        torch.allclose(ours, alone, atol=1e-5),
        torch.allclose(second, second_alone, atol=1e-5)
        and not torch.allclose(second, alone[:, 20:], atol=1e-3),
    )
