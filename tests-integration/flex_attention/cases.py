"""torchtitan's own FlexAttention on a CPU, trained eagerly and captured.

On a CPU gt-trainer replaces it, for FlexAttention refuses CPU tensors that need a gradient, and
Inductor has no backward of it for CPUs. Neither is so of its operator, whose dense implementation is
for all devices. Here models keep their FlexAttention, and what they compile by Inductor is compiled
without it: captured graph and eager model then run the same kernels. What Inductor would make of it
on a GPU is not seen.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import pytest
import torch
from capture.cases import VariantResult, compare_variants
from chunks.cases import SteppedTraining, train_in_chunks
from stamping.cases import MESHES, MODELS, with_layers
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torchtitan.models.common import attention
from torchtitan.models.common.attention import FlexAttention
from training_cases import (
    Case,
    Comparison,
    compare_modes,
    histories,
    message_of_another_shape,
    recaptured,
)

from gt_config import EpOverlapConfig
from gt_passes import DescribeOnly
from gt_passes.analysis.outlined_region import region_of
from gt_trace import flex_attention_on_cpu
from gt_trainer.decoder import attention as attention_of_trainer
from gt_trainer.dry_run.fake_step import fake_step
from gt_trainer.models import adapt
from gt_trainer.startup import StartupClock
from gt_trainer.steps.captured_step import WholeStepProgram, whole_step
from gt_trainer.steps.program import CaptureReport, TracingOptions, capture_program
from gt_trainer.steps.recipe import Recipe

_compiled = torch.compile(flex_attention, backend="eager")


def _attend(q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The compiled FlexAttention where a graph is captured, and else what it was compiled from."""
    if isinstance(q, FakeTensor | FunctionalTensor):  # the latter in joint graphs
        return _compiled(q, *args, **kwargs)
    with torch.compiler.set_stance("force_eager"):
        return flex_attention(q, *args, **kwargs)


@contextmanager
def own_flex_attention() -> Iterator[None]:
    """Inside, configurations keep their FlexAttention, and it trains on a CPU."""
    with flex_attention_on_cpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapt, "replace_inner_attention", lambda model: ())
        # Not ``_compiled_flex_attn``, which torchtitan makes anew for deterministic runs.
        patch.setattr(FlexAttention, "compiled_flex_attn", staticmethod(_attend))
        patch.setattr(attention, "_compiled_create_block_mask", create_block_mask)
        yield


def compare(
    case: Case, folder: str, options: Mapping[str, Any] = MappingProxyType({})
) -> Comparison:
    """Every layer is traced: what layers are stamped from is tested elsewhere."""
    with own_flex_attention():
        return compare_modes(case, folder, options={"capture_layers": "full", **options})


def compare_stamped(case: Case, folder: str) -> VariantResult:
    """Most layers are stamped."""
    with own_flex_attention():
        return compare_variants(case, folder, {"stamped": {"capture_layers": "stamped"}})["stamped"]


def in_chunks(case: Case, folder: str, runs: Mapping[str, EpOverlapConfig]) -> SteppedTraining:
    """What ``train_in_chunks`` says, every layer traced."""
    with own_flex_attention():
        return train_in_chunks(case, folder, runs, {"capture_layers": "full"})


def with_validation(case: Case, folder: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """What ``histories`` says of an eager run and of a captured one."""
    with own_flex_attention():
        return histories(case, "none", f"{folder}/eager"), histories(
            case, "aot_fx_trace", f"{folder}/captured"
        )


def with_other_lengths(case: Case, folder: str) -> tuple[list[str], int]:
    """What ``recaptured`` says."""
    with own_flex_attention():
        return recaptured(case, folder)


def refusal_of_another_length(case: Case, folder: str) -> str:
    """The error of a captured step that is given half of a sequence."""
    with own_flex_attention():
        return message_of_another_shape(case, folder)


def fake_capture(
    model: str, mesh: str, options: Mapping[str, Any], **recipe: Any
) -> CaptureReport[WholeStepProgram]:
    """Two layers of a model on a mesh that does not exist, with the passes of a run on GPUs.

    Regions are made, and nothing is compiled.

    Args:
        model: of ``stamped_cells.MODELS``.
        mesh: of ``stamped_cells.MESHES``.
        options: of ``--compile``.
        recipe: further arguments of ``Recipe``.
    """
    module, name = MODELS[model]
    world_size, degrees = MESHES[mesh]
    with own_flex_attention(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_of_trainer, "intended_device_type", lambda: "cuda")
        config = getattr(importlib.import_module(f"gt_trainer.models.{module}"), name)()
        with_layers(config, 2)
        for degree, value in degrees.items():
            setattr(config.parallelism, degree, value)
        config.compile = dataclasses.replace(config.compile, **options)
        with fake_step(config, world_size) as step:
            return capture_program(
                whole_step(
                    step.model,
                    step.loss_fn,
                    *step.inputs,
                    options=TracingOptions(
                        ep_overlap=config.compile.ep_overlap,
                        capture_layers="full",
                        meta_device=step.meta_device,
                    ),
                ),
                recipe=Recipe(options=config.compile, compiler=DescribeOnly(), **recipe),
                clock=StartupClock(),
            )


def compiled_operators(report: CaptureReport[WholeStepProgram]) -> dict[str, int]:
    """What stands in regions, and FlexAttention's operators wherever they stand, counted."""
    (graph_module,) = report.graph_modules
    bare = [str(node.target) for node in graph_module.graph.nodes]
    regions = filter(None, map(region_of, graph_module.graph.nodes))
    inside = [
        str(node.target)
        for region in regions
        for node in region.body.graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
    ]
    return dict(collections.Counter(inside)) | {
        f"bare {name}": bare.count(name) for name in bare if name.startswith("flex_attention")
    }
