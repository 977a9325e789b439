"""Training runs of small models, recorded, for comparison. Workers import this module by name."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import CrossEntropyLoss

from gt_config import ShapeChangePolicy
from gt_config.compile_config import FsdpBucketing
from gt_config.node_keys import EpExchangeAnnotation, EpRegionAnnotation
from gt_trace import phase_of, read_annotation
from gt_trainer.decoder.chunked_loss import GraphChunkedLoss
from gt_trainer.models.any_decoder import adapt_any
from gt_trainer.models.torchtitan_modules import python_module
from gt_trainer.quantization.quantization_options import QuantizationConfig
from gt_trainer.trainer import GraphTrainer

NUM_STEPS = 5
SEQ_LEN = 64
BATCH_SIZE = 2
NUM_UNSEEN_BATCHES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A debug configuration, made smaller, on the ranks of the workers."""

    module: str
    config: str
    parallelism: dict[str, int | str | None] = field(default_factory=dict)
    num_layers: int = 2
    expert_width: int | None = None
    """Of each expert's hidden layer; None as in the debug configuration."""
    batch_size: int = BATCH_SIZE
    seq_len: int = SEQ_LEN
    gradient_accumulation_steps: int = 1
    chunked_loss: bool = True
    param_dtype: str = "float32"
    on_shape_change: ShapeChangePolicy = "error"
    fsdp_bucketing: FsdpBucketing = "transformer_block"
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)

    def build(
        self,
        mode: str,
        folder: str,
        *,
        options: Mapping[str, Any] = MappingProxyType({}),
        **checkpoint: Any,
    ) -> GraphTrainer.Config:
        """The configuration of one run.

        Args:
            mode: of ``--compile.mode``.
            folder: its dump folder.
            options: further options of ``--compile``.
            checkpoint: options of ``--checkpoint``.
        """
        module = importlib.import_module(python_module(self.module))
        config = getattr(module, self.config)()
        if not isinstance(config, GraphTrainer.Config):
            config = adapt_any(config, is_debug=True)
        assert config.model_spec is not None
        model: Any = config.model_spec.model
        model.layers = model.layers[: self.num_layers]
        if self.expert_width is not None:
            for layer in model.layers:
                layer.moe.routed_experts.inner_experts.hidden_dim = self.expert_width
        config.parallelism = dataclasses.replace(config.parallelism, **self.parallelism)
        asked = {
            "mode": mode,
            "on_shape_change": self.on_shape_change,
            "fsdp_bucketing": self.fsdp_bucketing,
            **options,
        }
        config.compile = dataclasses.replace(config.compile, **asked)
        config.quantization = self.quantization
        training = config.training
        training.seq_len, training.local_batch_size = self.seq_len, self.batch_size
        training.steps = NUM_STEPS
        training.mixed_precision_param = self.param_dtype
        model_ranks = config.parallelism.tensor_parallel_degree
        model_ranks *= config.parallelism.context_parallel_degree
        data_ranks = dist.get_world_size() // model_ranks
        training.global_batch_size = self.batch_size * data_ranks * self.gradient_accumulation_steps
        assert isinstance(config.loss, GraphChunkedLoss.Config)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What one forward/backward left on this rank, as plain local tensors."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    """Accumulated so far, before clipping."""

    buffers: dict[str, torch.Tensor]
    """Before the optimizer step, which starts the experts' token counts anew."""


class RecordingTrainer(GraphTrainer):
    """Keeps what each pass computed."""

    def __init__(self, config: GraphTrainer.Config, *, stop_after: int | None = None) -> None:
        super().__init__(config)
        self.stop_after = stop_after
        self.passes: list[Pass] = []
        self.before_pass: Callable[[], None] = lambda: None
        """Called before each forward/backward."""
        self._batches: Iterator[Any] | None = None

    def forward_backward_step(self, **inputs: Any) -> torch.Tensor:
        self.before_pass()
        loss = super().forward_backward_step(**inputs)
        gradients = {
            name: local(parameter.grad)
            for name, parameter in self.model_parts[0].named_parameters()
            if parameter.grad is not None
        }
        self.passes.append(Pass(loss=local(loss), gradients=gradients, buffers=self.buffers()))
        return loss

    def should_continue_training(self) -> bool:
        if self.stop_after is not None and self.step >= self.stop_after:
            return False
        return super().should_continue_training()

    def parameters(self) -> dict[str, torch.Tensor]:
        """Local tensors, as they are now."""
        return {n: local(p) for n, p in self.model_parts[0].named_parameters()}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Local tensors, as they are now."""
        return {n: local(b) for n, b in self.model_parts[0].named_buffers()}

    def take_step(self) -> None:
        """One optimizer step, without the loop around it."""
        if self._batches is None:
            self._batches = self.batch_generator(self.dataloader)
        self.step += 1
        self.train_step(self._batches)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of this rank's part."""
    detached = tensor.detach()
    plain = detached.to_local() if isinstance(detached, DTensor) else detached
    return plain.clone()


def trainer_of(
    case: Case,
    mode: str,
    folder: str,
    *,
    stop_after: int | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    **checkpoint: Any,
) -> RecordingTrainer:
    """A trainer in this worker's process group."""
    use_this_group()
    config = case.build(mode, folder, options=options, **checkpoint)
    return RecordingTrainer(config, stop_after=stop_after)


def use_this_group() -> None:
    """Let trainers find the worker's rank where launchers write it."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)


def close(*trainers: RecordingTrainer) -> None:
    """Let go of trainers; torchtitan has turned automatic collection off."""
    for trainer in trainers:
        trainer.close()
    gc.collect()


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], what: str) -> list[str]:
    """Names under which two records differ in any bit, or which only one of them has."""
    problems = [f"{what} {name}: in one run only" for name in sorted(a.keys() ^ b.keys())]
    problems += [
        f"{what} {name}" for name in sorted(a.keys() & b.keys()) if not same(a[name], b[name])
    ]
    return problems


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors agree in every bit, in the sign of a zero too."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(bits), b.view(bits))


def differing_passes(a: Pass, b: Pass, what: str) -> list[str]:
    """What differs between a forward/backward of one trainer and that of another."""
    differences = []
    if not same(a.loss, b.loss):
        differences.append(f"{what} loss: {a.loss.item()!r} and {b.loss.item()!r}")
    differences += differing(a.gradients, b.gradients, f"{what} gradient")
    differences += differing(a.buffers, b.buffers, f"{what} buffer")
    return differences


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a rank found. What it looked at is there too, so that no empty comparison passes."""

    differences: tuple[str, ...]
    losses: tuple[float, ...]
    """Of every pass, those on unseen batches last."""

    without_gradient: tuple[str, ...]
    """Parameters that had none in some pass."""

    num_idle_experts: tuple[int, ...]
    """For each layer with experts: those without a token of this rank in the last pass."""

    num_tied_parameters: int
    matmul_dtypes: frozenset[str]
    """Of the captured graph."""

    float8_dtypes: frozenset[str]
    """Of all values of the captured graph, those of 8 bits."""

    num_captures: int
    verified: bool


def compare_modes(
    case: Case,
    folder: str,
    mode: str = "aot_fx_trace",
    options: Mapping[str, Any] = MappingProxyType({}),
    both: Mapping[str, Any] = MappingProxyType({}),
) -> Comparison:
    """Train eagerly and captured, five optimizer steps each, and compare every bit.

    Step by step, so that no more than one step's gradients are in memory. ``options`` are of the
    captured run, ``both`` of the eager one too.
    """
    eager = trainer_of(case, "none", f"{folder}/eager", options=both)
    captured = trainer_of(case, mode, f"{folder}/captured", options={**both, **options})
    differences = differing(eager.parameters(), captured.parameters(), "initial parameter")
    names = {name for name, _ in captured.model_parts[0].named_parameters()}
    num_names = sum(1 for _ in captured.model_parts[0].named_parameters(remove_duplicate=False))
    losses: list[float] = []
    without_gradient: set[str] = set()

    def compare_passes(what: str) -> None:
        for a, b in zip(eager.passes, captured.passes, strict=True):
            differences.extend(differing_passes(a, b, what))
            losses.append(b.loss.item())
            without_gradient.update(names - b.gradients.keys())

    for step in range(1, NUM_STEPS + 1):
        eager.passes, captured.passes = [], []
        eager.take_step()
        captured.take_step()
        compare_passes(f"step {step}")
        differences += differing(eager.buffers(), captured.buffers(), f"after step {step} buffer")
    differences += differing(eager.parameters(), captured.parameters(), "final parameter")
    eager.passes, captured.passes = [], []
    take_unseen(eager, captured, length=case.seq_len)
    compare_passes("unseen batch")
    found = Comparison(
        differences=tuple(differences),
        losses=tuple(losses),
        without_gradient=tuple(sorted(without_gradient)),
        num_idle_experts=num_idle_experts(captured.passes[-2], captured.passes[-1]),
        num_tied_parameters=num_names - len(names),
        matmul_dtypes=matmul_dtypes(captured),
        float8_dtypes=float8_dtypes(captured),
        num_captures=len(captured.training_step.reports),
        verified=all(
            p.verified for report in captured.training_step.reports for p in report.passes
        ),
    )
    close(eager, captured)
    return found


def num_idle_experts(before: Pass, after: Pass) -> tuple[int, ...]:
    """For each layer with experts, those that got no token in the later of two passes."""
    return tuple(
        int((after.buffers[name] == before.buffers[name]).sum())
        for name in after.buffers
        if name.endswith("tokens_per_expert_E")
    )


def matmul_dtypes(captured: RecordingTrainer) -> frozenset[str]:
    """What the matrix products of the captured graphs compute in, those of experts among them."""
    found = (
        node.meta["val"].dtype
        for graph_module in captured.training_step.reports[0].graph_modules
        for node in graph_module.graph.nodes
        if node.target in (torch.ops.aten.mm.default, torch.ops.aten._grouped_mm.default)
    )
    return frozenset(str(dtype).removeprefix("torch.") for dtype in found)


def float8_dtypes(captured: RecordingTrainer) -> frozenset[str]:
    """Floating-point dtypes of 8 bits that values of the captured graphs have."""
    return frozenset(
        str(value.dtype).removeprefix("torch.")
        for graph_module in captured.training_step.reports[0].graph_modules
        for node in graph_module.graph.nodes
        if isinstance(value := node.meta.get("val"), torch.Tensor)
        and value.dtype.is_floating_point
        and value.dtype.itemsize == 1
    )


def unseen_batches(shape: tuple[int, int]) -> list[dict[str, Any]]:
    """Three batches unlike those of the data, the same on every rank.

    The first two differ in nothing but where documents begin, so their losses tell whether masks
    and positions matter. In the last there is one token only, so its experts are the same few:
    others idle.
    """
    tokens = torch.randint(2048, shape, generator=torch.Generator().manual_seed(11))
    one_document = torch.arange(shape[1]).repeat(shape[0], 1)
    documents = one_document.clone()
    documents[0, 1:] -= 1  # the first has one token
    documents[1, shape[1] // 2 :] -= shape[1] // 2
    one_token = torch.full(shape, 17)
    return [
        batch_of(tokens, documents, ignore_every=3),
        batch_of(tokens, one_document, ignore_every=3),
        batch_of(one_token, documents, ignore_every=4),
    ]


def batch_of(tokens: torch.Tensor, positions: torch.Tensor, *, ignore_every: int) -> dict[str, Any]:
    """Arguments of ``forward_backward_step``; some labels do not count."""
    labels = tokens.roll(-1, dims=1)
    labels[:, ::ignore_every] = -100
    return {
        "input_dict": {"input": tokens, "positions": positions},
        "labels": labels,
        "global_valid_tokens": (labels != -100).sum() * dist.get_world_size(),
    }


def take_unseen(*trainers: RecordingTrainer, length: int = SEQ_LEN) -> None:
    """A pass of each trainer on each batch whose like the capture has not seen."""
    for trainer in trainers:
        for batch in unseen_batches((BATCH_SIZE, length)):
            trainer.optimizers.zero_grad()
            trainer.forward_backward_step(**batch)


def compare_resumed(
    case: Case,
    folder: str,
    mode: str = "aot_fx_trace",
    options: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[list[str], int]:
    """Steps 4 and 5 of a run that stopped after 3, against one that never stopped."""
    every_three = {"enable": True, "interval": 3, "options": options}
    whole = trainer_of(case, mode, f"{folder}/whole", **every_three)
    whole.train()
    stopped = trainer_of(case, mode, f"{folder}/cut", stop_after=3, **every_three)
    stopped.train()
    resumed = trainer_of(case, mode, f"{folder}/cut", **every_three)
    differences = []
    if len(stopped.passes) != 3:
        differences.append(f"the run that stops took {len(stopped.passes)} steps")
    resumed.train()
    num_resumed = len(resumed.passes)
    for step, again in enumerate(resumed.passes, start=4):
        differences += differing_passes(whole.passes[step - 1], again, f"step {step}")
    differences += differing(whole.parameters(), resumed.parameters(), "final parameter")
    close(whole, stopped, resumed)
    return differences, num_resumed


def recaptured(case: Case, folder: str, mode: str = "aot_fx_trace") -> tuple[list[str], int]:
    """Another shape, then the first again, against eager; and how many captures that took."""
    eager = trainer_of(case, "none", f"{folder}/eager")
    captured = trainer_of(case, mode, f"{folder}/captured")
    take_unseen(eager, captured)
    take_unseen(eager, captured, length=SEQ_LEN // 2)
    take_unseen(eager, captured)
    differences = []
    for index, (a, b) in enumerate(zip(eager.passes, captured.passes, strict=True)):
        differences += differing_passes(a, b, f"pass {index}")
    count = len(captured.training_step.reports)
    close(eager, captured)
    return differences, count


def expert_regions(captured: RecordingTrainer) -> frozenset[tuple[str | None, ...]]:
    """Of the captured graphs, the phase, region and exchange of nodes in routed experts."""
    found: set[tuple[str | None, ...]] = set()
    for graph_module in captured.training_step.reports[0].graph_modules:
        for node in graph_module.graph.nodes:
            region = read_annotation(node, EpRegionAnnotation)
            if region is None:
                continue
            exchange = read_annotation(node, EpExchangeAnnotation)
            kind = None if exchange is None else exchange.kind
            found.add((phase_of(node), region.kind, kind))
    return frozenset(found)


def message_of_another_shape(case: Case, folder: str) -> str:
    """The error of a captured step that is given half of a sequence."""
    captured = trainer_of(case, "aot_fx_trace", folder)
    captured.forward_backward_step(**unseen_batches((BATCH_SIZE, SEQ_LEN))[0])
    try:
        captured.forward_backward_step(**unseen_batches((BATCH_SIZE, SEQ_LEN // 2))[0])
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
