"""Training runs of small models, recorded, for comparison. Workers import this module by name."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import CrossEntropyLoss

from gt_config import ShapeChangePolicy
from gt_trainer.trainer import GraphTrainer

NUM_STEPS = 5
SEQ_LEN = 64
BATCH_SIZE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A debug configuration, made smaller, on the ranks of the workers."""

    module: str
    config: str
    parallelism: dict[str, int] = field(default_factory=dict)
    num_layers: int = 2
    gradient_accumulation_steps: int = 1
    chunked_loss: bool = True
    param_dtype: str = "float32"
    on_shape_change: ShapeChangePolicy = "error"

    def build(self, mode: str, folder: str, **checkpoint: Any) -> GraphTrainer.Config:
        """The configuration of one run."""
        module = importlib.import_module(f"gt_trainer.models.{self.module}")
        config: GraphTrainer.Config = getattr(module, self.config)()
        assert config.model_spec is not None
        model: Any = config.model_spec.model
        model.layers = model.layers[: self.num_layers]
        config.parallelism = dataclasses.replace(config.parallelism, **self.parallelism)
        config.compile = dataclasses.replace(
            config.compile, mode=mode, on_shape_change=self.on_shape_change
        )
        training = config.training
        training.seq_len, training.local_batch_size = SEQ_LEN, BATCH_SIZE
        training.steps = NUM_STEPS
        training.mixed_precision_param = self.param_dtype
        model_ranks = config.parallelism.tensor_parallel_degree
        training.global_batch_size = (
            BATCH_SIZE * (dist.get_world_size() // model_ranks) * self.gradient_accumulation_steps
        )
        if not self.chunked_loss:
            config.loss = CrossEntropyLoss.Config()
        config.debug.seed, config.debug.deterministic = 7, True
        config.dump_folder = folder
        config.metrics.display = "off"
        config.metrics.log_freq = 1
        config.checkpoint = dataclasses.replace(
            config.checkpoint, **{"enable": False, **checkpoint}
        )
        return config


class RecordingTrainer(GraphTrainer):
    """Keeps what each step computed, as plain local tensors."""

    def __init__(self, config: GraphTrainer.Config, *, stop_after: int | None = None) -> None:
        super().__init__(config)
        self.stop_after = stop_after
        self.losses: list[torch.Tensor] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        """After each forward/backward, before clipping, accumulated so far."""

        self.buffers: list[dict[str, torch.Tensor]] = []

    def forward_backward_step(self, **inputs: Any) -> torch.Tensor:
        loss = super().forward_backward_step(**inputs)
        self.losses.append(loss.detach().clone())
        self.gradients.append(
            {
                name: local(parameter.grad)
                for name, parameter in self.model_parts[0].named_parameters()
                if parameter.grad is not None
            }
        )
        return loss

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        self.buffers.append({n: local(b) for n, b in self.model_parts[0].named_buffers()})

    def should_continue_training(self) -> bool:
        if self.stop_after is not None and self.step >= self.stop_after:
            return False
        return super().should_continue_training()

    def parameters(self) -> dict[str, torch.Tensor]:
        """Local tensors, as they are now."""
        return {n: local(p) for n, p in self.model_parts[0].named_parameters()}

    def take_steps(self, num_steps: int) -> None:
        """Train, without the loop around it."""
        batches = self.batch_generator(self.dataloader)
        for _ in range(num_steps):
            self.step += 1
            self.train_step(batches)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of this rank's part."""
    detached = tensor.detach()
    plain = detached.to_local() if isinstance(detached, DTensor) else detached
    return plain.clone()


def trainer_of(
    case: Case, mode: str, folder: str, *, stop_after: int | None = None, **checkpoint: Any
) -> RecordingTrainer:
    """A trainer in this worker's process group."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)
    return RecordingTrainer(case.build(mode, folder, **checkpoint), stop_after=stop_after)


def close(*trainers: RecordingTrainer) -> None:
    """Let go of trainers; torchtitan has turned automatic collection off."""
    for trainer in trainers:
        trainer.close()
    gc.collect()


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], what: str) -> list[str]:
    """Names under which two records differ in any bit, or which only one of them has."""
    problems = [f"{what} {name}: in one run only" for name in sorted(a.keys() ^ b.keys())]
    problems += [
        f"{what} {name}" for name in a.keys() & b.keys() if not torch.equal(a[name], b[name])
    ]
    return problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a rank found. Counts are there so that an empty comparison cannot pass."""

    differences: tuple[str, ...]
    losses: tuple[float, ...]
    num_gradients: int
    num_captures: int
    verified: bool


def compare_modes(case: Case, folder: str) -> Comparison:
    """Train eagerly and captured, five optimizer steps each, and compare every bit."""
    eager = trainer_of(case, "none", f"{folder}/eager")
    captured = trainer_of(case, "aot_fx_trace", f"{folder}/captured")
    differences = differing(eager.parameters(), captured.parameters(), "initial parameter")
    eager.take_steps(NUM_STEPS)
    captured.take_steps(NUM_STEPS)
    for step, (a, b) in enumerate(zip(eager.losses, captured.losses, strict=True)):
        if not torch.equal(a, b):
            differences.append(f"loss of pass {step}: {a.item()!r} and {b.item()!r}")
    for step, (mine, theirs) in enumerate(zip(eager.gradients, captured.gradients, strict=True)):
        differences += differing(mine, theirs, f"pass {step} gradient")
    for step, (mine, theirs) in enumerate(zip(eager.buffers, captured.buffers, strict=True)):
        differences += differing(mine, theirs, f"step {step} buffer")
    differences += differing(eager.parameters(), captured.parameters(), "final parameter")
    differences += probe(eager, captured)
    found = Comparison(
        differences=tuple(differences),
        losses=tuple(loss.item() for loss in captured.losses),
        num_gradients=min(len(g) for g in captured.gradients),
        num_captures=len(captured.captures),
        verified=all(report.passes.verified for report in captured.captures),
    )
    close(eager, captured)
    return found


def odd_batch(shape: tuple[int, int]) -> dict[str, Any]:
    """A batch unlike those of the data: one token everywhere, so that most experts get none; a
    document of one token, and labels that do not count."""
    tokens = torch.full(shape, 17)
    positions = torch.arange(shape[1]).repeat(shape[0], 1)
    positions[0, 1:] -= 1
    positions[1, shape[1] // 2 :] -= shape[1] // 2
    labels = tokens.clone()
    labels[:, ::3] = -100
    return {
        "input_dict": {"input": tokens, "positions": positions},
        "labels": labels,
        "global_valid_tokens": (labels != -100).sum() * dist.get_world_size(),
    }


def probe(
    eager: RecordingTrainer, captured: RecordingTrainer, shape: tuple[int, int] | None = None
) -> list[str]:
    """Both on a batch whose documents, expert loads and token count the capture has not seen."""
    for trainer in (eager, captured):
        trainer.optimizers.zero_grad()
        trainer.forward_backward_step(**odd_batch(shape or (BATCH_SIZE, SEQ_LEN)))
    differences = differing(eager.gradients[-1], captured.gradients[-1], "odd batch gradient")
    if not torch.equal(eager.losses[-1], captured.losses[-1]):
        differences.append("odd batch loss")
    return differences


def compare_resumed(case: Case, folder: str) -> tuple[list[str], int]:
    """Steps 4 and 5 of a run that stopped after 3, against one that never stopped."""
    every_three = {"enable": True, "interval": 3}
    whole = trainer_of(case, "aot_fx_trace", f"{folder}/whole", **every_three)
    whole.train()
    stopped = trainer_of(case, "aot_fx_trace", f"{folder}/cut", stop_after=3, **every_three)
    stopped.train()
    resumed = trainer_of(case, "aot_fx_trace", f"{folder}/cut", **every_three)
    differences = []
    if len(stopped.losses) != 3:
        differences.append(f"the run that stops took {len(stopped.losses)} steps")
    resumed.train()
    num_resumed = len(resumed.losses)
    for offset in range(num_resumed):
        if not torch.equal(whole.losses[3 + offset], resumed.losses[offset]):
            differences.append(f"loss of step {4 + offset}")
        differences += differing(
            whole.gradients[3 + offset], resumed.gradients[offset], f"step {4 + offset} gradient"
        )
    differences += differing(whole.parameters(), resumed.parameters(), "final parameter")
    close(whole, stopped, resumed)
    return differences, num_resumed


def recaptured(case: Case, folder: str) -> tuple[list[str], int]:
    """Another shape, then the first again, against eager; and how many captures that took."""
    eager = trainer_of(case, "none", f"{folder}/eager")
    captured = trainer_of(case, "aot_fx_trace", f"{folder}/captured")
    differences = probe(eager, captured)
    differences += probe(eager, captured, (BATCH_SIZE, SEQ_LEN // 2))
    differences += probe(eager, captured)
    count = len(captured.captures)
    close(eager, captured)
    return differences, count


def message_of_another_shape(case: Case, folder: str) -> str:
    """The error of a captured step that is given half of a sequence."""
    captured = trainer_of(case, "aot_fx_trace", folder)
    captured.forward_backward_step(**odd_batch((BATCH_SIZE, SEQ_LEN)))
    try:
        captured.forward_backward_step(**odd_batch((BATCH_SIZE, SEQ_LEN // 2)))
    except ValueError as error:
        return str(error)
    finally:
        close(captured)
    return "no error"


def histories(case: Case, mode: str, folder: str) -> tuple[str, str]:
    """Train with validation; what metrics.jsonl says of loss and gradient, and validation.jsonl."""
    import json

    config = case.build(mode, folder)
    config.validator = dataclasses.replace(config.validator, enable=True, freq=2, steps=2)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    trainer = GraphTrainer(config)
    trainer.train()
    trainer.close()
    gc.collect()
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    steps = [(m["step"], m["loss"], m["grad_norm"]) for m in map(json.loads, lines)]
    return str(steps), Path(folder, "validation.jsonl").read_text()
