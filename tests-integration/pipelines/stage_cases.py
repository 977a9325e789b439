"""Stages of torchtitan's models as captured graphs. Workers import this module by name."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools import utils as titan_utils
from training_cases import Case

from gt_pipeline.graph import GraphPipelineStage, exposed_collectives
from gt_pipeline.graph.overlapped_actions import concatenate_actions
from gt_pipeline.graph.stage_cut import recompose
from gt_pipeline.graph.stage_inputs import StageState
from gt_pipeline.runner import MicrobatchInputs
from gt_pipeline.split import split_module
from gt_trainer.decoder.attention import attention_mask_for
from gt_trainer.decoder.expert_regions import annotate_expert_regions

NUM_STAGES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What one rank saw; lists of names, empty where all is well."""

    not_recomposed: tuple[str, ...]
    """Results of joint graphs that the actions' graphs do not give to the bit."""

    not_as_eager: tuple[str, ...]
    """Losses and gradients of one microbatch that differ from autograd's."""

    not_as_alone: tuple[str, ...]
    """Results of overlapped actions that differ from the same actions run by themselves."""

    exposed: tuple[str, ...]
    """Collectives of overlapped actions that nothing hides."""

    num_exposed_in_sequence: int
    """The same, where the actions only stand one behind the other."""

    num_collectives: tuple[tuple[str, int], ...]
    """By action, over both stages."""


def examine_stages(case: Case, folder: str) -> Findings:
    """Two stages of a model, both on this rank."""
    modules, microbatches, dims = _placed_stages(case, folder)
    stages = _captured(modules, microbatches[0], dims)
    return Findings(
        not_recomposed=tuple(_not_recomposed(stages, modules, microbatches[0])),
        not_as_eager=tuple(_not_as_eager(stages, modules, microbatches[0])),
        not_as_alone=tuple(_not_as_alone(stages, microbatches)),
        exposed=tuple(_exposed(stages)),
        num_exposed_in_sequence=_num_exposed_in_sequence(stages),
        num_collectives=tuple(sorted(_collectives(stages).items())),
    )


def _placed_stages(
    case: Case, folder: str
) -> tuple[list[nn.Module], list[MicrobatchInputs], ParallelDims]:
    config = case.build("aot_fx_trace", str(Path(folder)))
    dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
    dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
    spec: Any = config.model_spec
    spec.model.update_from_config(config=config)
    dtype = TORCH_DTYPE_MAP[config.training.dtype]
    with torch.device("meta"), titan_utils.set_default_dtype(dtype):
        model = spec.model.build()
    half = -(-case.num_layers // NUM_STAGES)
    layers = [f"layers.{index}" for index in range(case.num_layers)]
    names = [["tok_embeddings", *layers[:half]], [*layers[half:], "norm", "lm_head"]]
    modules: list[nn.Module] = []
    for kept in names:
        stage: Any = spec.parallelize_fn(
            split_module(model, kept),
            parallel_dims=dims,
            training=config.training,
            parallelism=config.parallelism,
            compile_config=config.compile,
            ac_config=None,
            dump_folder=folder,
        )
        stage.to_empty(device="cpu")
        torch.manual_seed(5)
        with torch.no_grad():
            stage.init_weights(buffer_device=None)
        modules.append(stage.train())
    torch.manual_seed(dist.get_rank() // (dims.tp if dims.tp_enabled else 1))
    shape = (config.training.local_batch_size, config.training.seq_len)
    microbatches = []
    for _ in range(2):
        tokens = torch.randint(0, 256, shape)
        positions = torch.arange(shape[1]).expand(shape).contiguous()
        kwargs: dict[str, Any] = {"positions": positions}
        mask = attention_mask_for(model, positions)
        if mask is not None:
            kwargs["attention_masks"] = mask
        target = torch.randint(0, 256, shape)
        microbatches.append(MicrobatchInputs(args=(tokens,), kwargs=kwargs, target=target))
    return modules, microbatches, dims


def _loss(prediction: Tensor, target: Tensor) -> Tensor:
    whole = prediction.full_tensor() if isinstance(prediction, DTensor) else prediction
    return nn.functional.cross_entropy(whole.flatten(0, 1).float(), target.flatten())


def _captured(
    modules: list[nn.Module], inputs: MicrobatchInputs, dims: ParallelDims
) -> list[GraphPipelineStage]:
    stages: list[GraphPipelineStage] = []
    for index, module in enumerate(modules):
        last = stages[-1] if stages else None
        with annotate_expert_regions(module):
            stage = GraphPipelineStage(
                module,
                stage_index=index,
                num_stages=NUM_STAGES,
                activations=() if last is None else _activations(last, dims),
                inputs=inputs,
                loss_fn=_loss if index == NUM_STAGES - 1 else None,
                fake_mode=None if last is None else last.fake_mode,
            )
        stages.append(stage)
    return stages


def _activations(stage: GraphPipelineStage, dims: ParallelDims) -> list[Any]:
    """What the stage after is captured with."""
    capture = stage.capture
    return [
        signature
        if placement is None
        else placement.example(signature, dims.get_mesh(list(placement.mesh_axes)))
        for signature, placement in zip(
            capture.output_signature, capture.output_placements, strict=True
        )
    ]


def _not_recomposed(
    stages: list[GraphPipelineStage], modules: list[nn.Module], inputs: MicrobatchInputs
) -> list[str]:
    found = []
    activations: tuple[Tensor, ...] = ()
    for stage, module in zip(stages, modules, strict=True):
        state = StageState(stage.capture, module).sample()
        arguments = iter([*activations, *stage._reader.read(inputs)])
        values = [
            state[slot]
            if slot in state
            else next(arguments)
            if slot.kind == "argument"
            else torch.randn(fake.shape, dtype=fake.dtype)
            for slot, fake in zip(
                stage.capture.inputs, stage.capture.traced.example_inputs, strict=True
            )
        ]
        runs = []
        for graph_module in (
            stage.capture.traced.graph_module,
            recompose(stage.graphs),
            recompose(stage.graphs, split_backward=True),
        ):
            with torch.no_grad():
                copies = [value.clone() for value in values]
                runs.append([*graph_module(*copies), *copies])
        names = [*map(str, stage.capture.results), *map(str, stage.capture.inputs)]
        for run in runs[1:]:
            found += [
                f"stage {stage.stage_index}: {name}"
                for name, a, b in zip(names, runs[0], run, strict=True)
                if a is not None and not torch.equal(a, b)
            ]
        num_outputs = len(stage.output_signature)
        activations = tuple(runs[0][:num_outputs])
    return found


def _not_as_eager(
    stages: list[GraphPipelineStage], modules: list[nn.Module], inputs: MicrobatchInputs
) -> list[str]:
    loss, gradients = _step(stages, [inputs])
    x: Any = inputs.args[0]
    for module in modules:
        x = module(x, **inputs.kwargs)
    expected = _loss(x, inputs.target)
    expected.backward()
    found = [] if torch.equal(loss[0], expected) else ["loss"]
    for index, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            ours = gradients.get(f"{index}.{name}")
            theirs = parameter.grad
            parameter.grad = None
            if (ours is None) != (theirs is None) or (
                ours is not None and not torch.equal(_local(ours), _local(theirs))
            ):
                found.append(name)
    return found


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _step(
    stages: list[GraphPipelineStage], microbatches: list[MicrobatchInputs]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses, and gradients by stage and name, of a step without overlap."""
    losses = []
    for stage in stages:
        stage.unshard()
    for number, inputs in enumerate(microbatches):
        activations: tuple[Tensor, ...] = ()
        for stage in stages:
            activations = stage.forward(number, activations, inputs)
        losses += activations
    for number in range(len(microbatches)):
        gradients: tuple[Tensor, ...] = (torch.ones(()),)
        for stage in reversed(stages):
            gradients = stage.full_backward(number, gradients)
    return losses, _gradients(stages)


def _gradients(stages: list[GraphPipelineStage]) -> dict[str, Tensor]:
    found = {}
    for stage in stages:
        stage.reduce_gradients()
        found |= {f"{stage.stage_index}.{n}": g for n, g in stage.gradients().items()}
        stage.discard()
    return found


def _not_as_alone(
    stages: list[GraphPipelineStage], microbatches: list[MicrobatchInputs]
) -> list[str]:
    """The first stage's second forward overlaps with the last one's backward, and both with I."""
    losses, expected = _step(stages, microbatches)
    found = []
    for kind in ("FULL_BACKWARD", "BACKWARD_INPUT"):
        first, last = stages
        for stage in stages:
            stage.unshard()
        activations = first.forward(0, (), microbatches[0])
        (loss,) = last.forward(0, activations, microbatches[0])
        activations, gradients = first.overlap(
            1,
            (),
            microbatches[1],
            backward_stage=last,
            backward_kind=kind,
            backward_microbatch=0,
            output_gradients=(torch.ones(()),),
        )
        (second,), gradients = last.overlap(
            1,
            activations,
            microbatches[1],
            backward_stage=first,
            backward_kind=kind,
            backward_microbatch=0,
            output_gradients=gradients,
        )
        if kind == "BACKWARD_INPUT":
            for stage in stages:
                stage.backward_weight(0)
        (gradient,) = last.full_backward(1, (torch.ones(()),))
        first.full_backward(1, (gradient,))
        got = _gradients(stages)
        found += [
            f"{kind} loss"
            for a, b in zip(losses, (loss, second), strict=True)
            if not torch.equal(a, b)
        ]
        found += [
            f"{kind} {name}"
            for name in expected
            if not torch.equal(_local(expected[name]), _local(got[name]))
        ]
    return found


def _pairs(stages: list[GraphPipelineStage]) -> list[Any]:
    first, last = stages
    return [
        first.prepare_overlap(last, "FULL_BACKWARD"),
        first.prepare_overlap(last, "BACKWARD_INPUT"),
        last.prepare_overlap(first, "FULL_BACKWARD"),
    ]


def _exposed(stages: list[GraphPipelineStage]) -> list[str]:
    return [
        str(each)
        for pair in _pairs(stages)
        for each in exposed_collectives(pair.action.graph_module)
    ]


def _num_exposed_in_sequence(stages: list[GraphPipelineStage]) -> int:
    return sum(
        len(
            exposed_collectives(
                concatenate_actions(pair.forward, pair.backward).action.graph_module
            )
        )
        for pair in _pairs(stages)
    )


def _collectives(stages: list[GraphPipelineStage]) -> dict[str, int]:
    found: dict[str, int] = {}
    for stage in stages:
        for action in stage.graphs:
            launches = [
                node
                for node in action.graph_module.graph.nodes
                if "_c10d_functional" in str(node.target) and "wait" not in str(node.target)
            ]
            found[action.kind] = found.get(action.kind, 0) + len(launches)
    return found


def with_layers(case: Case, num_layers: int, **parallelism: int) -> Case:
    """The case with other degrees."""
    return dataclasses.replace(case, num_layers=num_layers, parallelism=parallelism)
