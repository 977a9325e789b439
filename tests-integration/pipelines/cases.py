"""What the workers of ``test_pipelined_training.py`` run: one batch in stages, and without."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from chunks.recorded_routing import Load, follow_record, write_record
from flex_attention.cases import own_flex_attention
from pipelines.exchanges import Exchanges, exchanges_of
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from training_cases import Case, differing, local

from gt_config import EpOverlapConfig
from gt_pipeline.schedules import build_pipeline_schedule
from gt_pipeline.split import stage_modules
from gt_trainer.decoder.eager_chunks import chunked_for_capture
from gt_trainer.decoder.initialization import _part
from gt_trainer.metrics.metrics_history import read_metrics
from gt_trainer.pipelines.pipeline_plan import PipelinePlan, pipeline_plan
from gt_trainer.trainer import GraphTrainer

NUM_BATCHES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCase:
    """A debug model on two pipeline ranks times two others, or four."""

    model: Case
    schedule: str
    num_microbatches: int = 4
    microbatch_size: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of ``--compile``."""

    overlap: EpOverlapConfig = field(default_factory=EpOverlapConfig)
    """Of the captured stages. What they are compared with runs eagerly in chunks of the same."""

    load: Load | None = None
    """Where tokens are sent, by records that all routers follow; None: where the model sends them.
    """

    def build(self, mode: str, folder: str, **checkpoint: Any) -> GraphTrainer.Config:
        options = {**self.options, "ep_overlap": self.overlap}
        config = self.model.build(mode, folder, options=options, **checkpoint)
        config.training.local_batch_size = self.num_microbatches * self.microbatch_size
        config.training.global_batch_size = -1
        config.parallelism = dataclasses.replace(
            config.parallelism,
            pipeline_parallel_degree=2,
            pipeline_parallel_schedule=self.schedule,
            pipeline_parallel_microbatch_size=self.microbatch_size,
        )
        return config

    def trainer(self, mode: str, folder: str, **checkpoint: Any) -> GraphTrainer:
        """In this worker's process group."""
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)
        return GraphTrainer(self.build(mode, folder, **checkpoint))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a rank saw."""

    differences: tuple[str, ...]
    num_gradients: int
    losses: tuple[float, ...]
    """On ranks of the last stage: of each microbatch, train and evaluation."""

    actions: tuple[str, ...]
    """Kinds of action whose graphs compute something, of all stages of the rank."""

    exchanges: tuple[Exchanges, ...]
    """Of each graph with chunks, those of pairs included."""


Gradients = dict[str, torch.Tensor]
Microbatch = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]


def compare_pipelines(case: PipelineCase, folder: str) -> Found:
    """One optimizer step after another: captured stages, the whole model, and PyTorch's runtime."""
    trainer = case.trainer("aot_fx_trace", folder)
    for part in trainer.model_parts:
        set_weights(part)
    plan = plan_of(trainer)
    whole = new_model(trainer, lambda model: model)
    runtime = TorchRuntime(trainer, plan, case.overlap)
    if case.load is not None:
        follow_load(case, trainer.model_parts, chunked=case.overlap.strategy == "eager")
        follow_load(case, [whole, *runtime.parts], chunked=True)
    loss_of_whole = new_loss(trainer, whole)
    optimizers = [LocalAdamW(each) for each in (trainer.model_parts, [whole], runtime.parts)]
    before = local_parameters(trainer.model_parts)
    differences: list[str] = []
    losses: list[float] = []
    num_gradients = 0
    for batch in range(NUM_BATCHES):
        found_eval = evaluate(trainer, microbatches(trainer, batch))
        found = captured_losses(trainer, batch)
        expected_eval, expected, expected_gradients = whole_batch(
            trainer, whole, loss_of_whole, batch, case.overlap
        )
        torch_losses, torch_gradients = runtime.step(batch)
        gradients = taken_gradients(trainer.model_parts)
        expected_here = {name: expected_gradients[name] for name in gradients}
        like = {n: p for part in trainer.model_parts for n, p in part.named_parameters()}
        for title, reference in (("whole", expected_here), ("runtime", torch_gradients)):
            reduced = reduced_as(like, reference, trainer)
            differences += differing(gradients, reduced, f"batch {batch}, {title}: gradient")
        if trainer.pp_has_last_stage:
            differences += unequal(f"batch {batch}, whole", found, expected)
            differences += unequal(f"batch {batch}, runtime", found, torch_losses)
            differences += unequal(f"batch {batch}, evaluation", found_eval, expected_eval)
            losses += [loss.item() for loss in (*found, *found_eval)]
        num_gradients += len(gradients)
        of_whole = reduced_as(dict(whole.named_parameters()), expected_gradients, trainer)
        stages = {n: p for part in runtime.parts for n, p in part.named_parameters()}
        of_runtime = reduced_as(stages, torch_gradients, trainer)
        steps = zip(optimizers, (gradients, of_whole, of_runtime), strict=True)
        for optimizer, reduced in steps:
            optimizer.step(reduced)
    after = local_parameters(trainer.model_parts)
    unmoved = [name for name, parameter in after.items() if torch.equal(parameter, before[name])]
    differences += [f"{name} was not trained" for name in unmoved]
    actions = {
        graph.kind
        for stage in trainer.pp_schedule.stages.values()
        for graph in stage.graphs
        if not graph.is_empty
    }
    exchanges = tuple(
        found for stage in trainer.pp_schedule.stages.values() for found in exchanges_of(stage)
    )
    trainer.close()
    return Found(
        differences=tuple(differences),
        num_gradients=num_gradients,
        losses=tuple(losses),
        actions=tuple(sorted(actions)),
        exchanges=exchanges,
    )


def compare_pipelines_of_flex_attention(case: PipelineCase, folder: str) -> Found:
    """The same of models that keep torchtitan's attention."""
    with own_flex_attention():
        return compare_pipelines(case, folder)


def plan_of(trainer: GraphTrainer) -> PipelinePlan:
    config = trainer.config
    return pipeline_plan(
        config.parallelism,
        num_layers=len(trainer.model_config.layers),
        local_batch_size=config.training.local_batch_size,
    )


# ---- the same batch, three ways ------------------------------------------------------------------


def captured_losses(trainer: GraphTrainer, batch: int) -> list[torch.Tensor]:
    """Losses of the microbatches; gradients are left in the parameters."""
    arguments: dict[str, Any] = {"losses": [] if trainer.pp_has_last_stage else None}
    found = microbatches(trainer, batch)
    trainer.pp_schedule.step(
        **schedule_inputs(trainer, found),
        loss_kwargs={"global_valid_tokens": num_tokens()},
        return_outputs=False,
        **arguments,
    )
    return [local(loss) for loss in arguments["losses"] or []]


def evaluate(trainer: GraphTrainer, found: list[Microbatch]) -> list[torch.Tensor]:
    losses: list[torch.Tensor] = []
    trainer.pp_schedule.eval(
        **schedule_inputs(trainer, found), losses=losses if trainer.pp_has_last_stage else None
    )
    return losses


def whole_batch(
    trainer: GraphTrainer,
    model: nn.Module,
    loss_fn: Any,
    batch: int,
    overlap: EpOverlapConfig | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor], Gradients]:
    """Without a pipeline: losses of evaluation and training, gradients before reduction."""
    evaluated, losses = [], []
    for inputs, labels, kwargs in microbatches(trainer, batch):
        with torch.no_grad(), counts_kept(model):
            evaluated.append(loss_fn(model(inputs, **kwargs), labels, None)[0])
    with in_chunks([model], overlap or EpOverlapConfig()):
        for inputs, labels, kwargs in microbatches(trainer, batch):
            loss, _ = loss_fn(model(inputs, **kwargs), labels, num_tokens())
            loss.backward()
            losses.append(local(loss))
    return evaluated, losses, taken_gradients([model], whole=True)


class TorchRuntime:
    """PyTorch's own schedule over the same stages, run by autograd."""

    def __init__(self, trainer: GraphTrainer, plan: PipelinePlan, overlap: EpOverlapConfig) -> None:
        self._trainer = trainer
        self._overlap = overlap
        mesh = trainer.parallel_dims.get_mesh("pp")
        indices = plan.schedule.stages_of_rank(mesh.get_local_rank())
        self.parts = [
            new_model(
                trainer, lambda model, i=i: stage_modules(model, plan.names_per_stage, [i])[i]
            )
            for i in indices
        ]
        stages = [
            PipelineStage(
                part,
                i,
                plan.schedule.num_stages,
                torch.device("cpu"),
                group=mesh.get_group(),
                get_mesh=lambda axes, _: trainer.parallel_dims.get_mesh(list(axes)),
            )
            for i, part in zip(indices, self.parts, strict=True)
        ]
        loss_fn = new_loss(trainer, self.parts[-1])
        self._schedule = build_pipeline_schedule(
            stages,
            num_microbatches=plan.schedule.num_microbatches,
            name=plan.schedule.name,
            loss_fn=lambda *args, **kwargs: loss_fn(*args, **kwargs)[0],
        )

    def step(self, batch: int) -> tuple[list[torch.Tensor], Gradients]:
        losses: list[torch.Tensor] | None = [] if self._trainer.pp_has_last_stage else None
        found = microbatches(self._trainer, batch)
        with in_chunks(self.parts, self._overlap):
            self._schedule.step(
                **schedule_inputs(self._trainer, found),
                losses=losses,
                loss_kwargs={"global_valid_tokens": num_tokens()},
                return_outputs=False,
            )
        return [local(loss) for loss in losses or []], taken_gradients(self.parts, whole=True)


# ---- chunks -------------------------------------------------------------------------------------


@contextmanager
def in_chunks(parts: Sequence[nn.Module], overlap: EpOverlapConfig) -> Iterator[None]:
    """Modules run eagerly in the chunks that ``overlap`` asks for, whoever is to make them."""
    eagerly = dataclasses.replace(overlap, strategy="eager", disable_early_grad_accumulation=False)
    with ExitStack() as wrapped:
        for part in parts:
            wrapped.enter_context(chunked_for_capture(part, eagerly, is_stage=True))
        yield


def follow_load(case: PipelineCase, parts: Sequence[nn.Module], *, chunked: bool) -> None:
    """Let routers follow records of one load; ``chunked``: that see chunks in training."""
    assert case.load is not None
    for part in parts:
        shape = {"batch_size": case.microbatch_size, "seq_len": case.model.seq_len}
        num_chunks = case.overlap.num_chunks if case.overlap.enabled and chunked else 1
        follow_record(part, **shape, num_chunks=num_chunks)
        write_record(part, case.load, num_ranks=case.model.parallelism["expert_parallel_degree"])


# ---- models, batches, gradients -------------------------------------------------------------------


def new_model(trainer: GraphTrainer, part_of: Callable[[Any], nn.Module]) -> Any:
    """The model, or a stage of it, with tensor and expert parallelism and no data parallelism."""
    with torch.device("meta"):
        model: Any = part_of(trainer.model_config.build())
    if trainer.parallel_dims.ep_enabled or trainer.parallel_dims.tp_enabled:
        model.parallelize(trainer.parallel_dims)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    set_weights(model)
    return model.train()


def new_loss(trainer: GraphTrainer, model: Any) -> Any:
    loss_fn = trainer.config.loss.build(compile_config=trainer.config.compile)
    if hasattr(loss_fn, "set_lm_head") and model.lm_head is not None:
        loss_fn.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    return loss_fn


def set_weights(model: nn.Module) -> None:
    """Values that depend on nothing but a parameter's name and shape."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            whole = 0.02 * torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                whole += 1
            part = _part(whole, parameter) if isinstance(parameter, DTensor) else whole
            local_part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local_part.copy_(part)


def microbatches(trainer: GraphTrainer, batch: int) -> list[Microbatch]:
    """Of this data rank; every pipeline rank of it gets the same."""
    config = trainer.config
    data = trainer.parallel_dims.get_optional_mesh("batch")
    data_rank = 0 if data is None else data.get_local_rank()
    size, length = config.parallelism.pipeline_parallel_microbatch_size, config.training.seq_len
    generator = torch.Generator().manual_seed(100 * batch + data_rank)
    found = []
    for _ in range(config.training.local_batch_size // size):
        tokens = torch.randint(2048, (size, length), generator=generator)
        positions = torch.arange(length).repeat(size, 1)
        positions[:, length // 3 :] -= length // 3
        labels = tokens.roll(-1, dims=1)
        labels[:, ::5] = -100
        found.append(
            trainer.post_dataloading_process({"input": tokens, "positions": positions}, labels)
        )
    return found


def num_tokens() -> torch.Tensor:
    return torch.tensor(777)


def schedule_inputs(trainer: GraphTrainer, found: list[Microbatch]) -> dict[str, Any]:
    return {
        "arg_mbs": [(inputs,) for inputs, _, _ in found] if trainer.pp_has_first_stage else None,
        "kwarg_mbs": [kwargs for _, _, kwargs in found],
        "target_mbs": [labels for _, labels, _ in found] if trainer.pp_has_last_stage else None,
    }


def taken_gradients(parts: list[nn.Module], *, whole: bool = False) -> Gradients:
    """Gradients by name, placed as the parameters, which lose them.

    Local ones, or, where ``whole``, over all tensor-parallel ranks; experts stay local.
    """
    found = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            if isinstance(gradient, DTensor):
                assert isinstance(parameter, DTensor)
                # Parts of tensor-parallel ranks are summed here, after all microbatches.
                gradient = gradient.redistribute(placements=parameter.placements)
                if whole and "ep" not in (gradient.device_mesh.mesh_dim_names or ()):
                    gradient = gradient.full_tensor()
            found[name] = local(gradient)
            parameter.grad = None
    return found


def reduced_as(
    like: Mapping[str, nn.Parameter], gradients: Gradients, trainer: GraphTrainer
) -> Gradients:
    """Sums over data ranks, cut as ``like`` is. Two terms have one sum, in whatever order."""
    meshes = (trainer.parallel_dims.get_optional_mesh(axis) for axis in ("fsdp", "dp_replicate"))
    groups = [mesh.get_group() for mesh in meshes if mesh is not None]
    found = {}
    for name, gradient in gradients.items():
        parameter = like[name]
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        if mesh is not None and "ep" in (mesh.mesh_dim_names or ()):
            found[name] = gradient  # an expert's, which lives on this rank alone
            continue
        total = gradient.clone()
        for group in groups:
            dist.all_reduce(total, group=group)
        found[name] = _part(total, parameter) if isinstance(parameter, DTensor) else total
    return found


def local_parameters(parts: list[nn.Module]) -> dict[str, torch.Tensor]:
    return {name: local(parameter) for part in parts for name, parameter in part.named_parameters()}


class LocalAdamW:
    """Updates this rank's parts of parameters, element by element, however they are placed."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self._parameters = {
            name: nn.Parameter(
                parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.data
            )
            for part in parts
            for name, parameter in part.named_parameters()
        }
        self._optimizer = torch.optim.AdamW(self._parameters.values(), lr=1e-3, foreach=False)

    def step(self, gradients: Gradients) -> None:
        for name, gradient in gradients.items():
            self._parameters[name].grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad()


def unequal(what: str, a: list[torch.Tensor], b: list[torch.Tensor]) -> Iterator[str]:
    if len(a) != len(b):
        yield f"{what}: {len(a)} losses and {len(b)}"
    for number, (one, other) in enumerate(zip(a, b, strict=False)):
        if not torch.equal(one.reshape(()), other.reshape(())):
            yield f"{what}: loss {number} is {one.item()!r} and {other.item()!r}"


class counts_kept:  # noqa: N801  # used as a function
    """Evaluation leaves the experts' counts of tokens as they were, for the comparison."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = dict(model.named_buffers())
        self._before = MappingProxyType({n: b.clone() for n, b in self._buffers.items()})

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        for name, buffer in self._buffers.items():
            buffer.copy_(self._before[name])


# ---- training ------------------------------------------------------------------------------------


def trained_losses(case: PipelineCase, mode: str, folder: str) -> list[float]:
    """Train for two steps; the losses of metrics.jsonl, on rank 0."""
    trainer = case.trainer(mode, folder)
    trainer.config.training.steps = 2
    trainer.train()
    trainer.close()
    dist.barrier()
    if dist.get_rank() != 0:
        return []
    return [record["loss"] for record in read_metrics(Path(folder, "metrics.jsonl"))]


# ---- checkpoints --------------------------------------------------------------------------------


def resumed_state(case: PipelineCase, other: Mapping[str, int], folder: str) -> tuple[str, ...]:
    """Train, save, and load under other parallel degrees; what differs between the two states."""
    options = {
        "enable": True,
        "interval": 2,
        "last_save_model_only": False,
        "async_mode": "disabled",
    }
    saved = case.trainer("aot_fx_trace", folder, **options)
    saved.config.training.steps = 2
    saved.train()
    before = digests(saved)
    saved.close()
    config = case.build("aot_fx_trace", folder, **options)
    config.parallelism = dataclasses.replace(config.parallelism, **other)
    resumed = GraphTrainer(config)
    resumed.checkpointer.load(step=2)
    after = digests(resumed)
    step = resumed.step
    resumed.config.training.steps = 3
    resumed.train()  # and it goes on
    finished = resumed.step
    resumed.close()
    differences = [
        f"{name}: {before.get(name)} and {after.get(name)}"
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name)
    ]
    if not before:
        differences.append("nothing was saved")
    if (step, finished) != (2, 3):
        differences.append(f"resumed at step {step}, and ended at {finished}")
    return tuple(sorted(differences))


def digests(trainer: GraphTrainer) -> dict[str, str]:
    """Of every parameter and its optimizer state, whole, wherever they are; the same on all ranks."""
    found: dict[str, str] = {}
    for part, optimizer in zip(trainer.model_parts, trainer.optimizers, strict=True):
        for name, parameter in part.named_parameters():
            found[name] = digest(parameter)
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name}.{key}"] = digest(optimizer.state[parameter][key])
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    return {name: value for each in everywhere for name, value in each.items()}


def digest(tensor: torch.Tensor) -> str:
    whole = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    return hashlib.sha256(whole.contiguous().numpy().tobytes()).hexdigest()[:16]
