"""What each rank runs: capture a step, run passes on its graph, execute, compare.

Three calls, so that ranks that disagree are seen before they meet in a collective. What they share
stays in this module.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist

# A graph names its groups; nothing public turns the name into the group.
from torch.distributed.distributed_c10d import _resolve_process_group as resolve_group
from torch.fx import GraphModule

# Names the outputs of a step as its author did; the public torch.utils.pytree has no paths yet.
from torch.utils import _pytree as pytree

from fuzz import custom_ops
from fuzz.case import PassSpec, StepSpec
from fuzz.pass_lists import build_passes
from fuzz.training_step import CapturedStep, capture_step
from gt_passes import PassContext, PassManager
from gt_passes.analysis.collectives import is_collective
from gt_passes.errors import VerificationError
from gt_passes.verifier.collective_order import collective_digest
from gt_trace.errors import CaptureError

__all__ = ["Prepared", "Transformed", "execute", "prepare", "transform"]

_RANDOM_SEED = 20_261_121


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A captured step."""

    num_ops: int
    num_collectives: int
    problem: str | None
    """Why the step is none that passes can be compared on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformed:
    """What passes made of the step."""

    outcome: Literal["transformed", "refused by the verifier", "crashed"]
    text: str
    """Of the exception; what the passes did otherwise."""

    collectives: tuple[tuple[str, tuple[int, ...]], ...]
    """The order in which this rank would launch them: operator, and the ranks of its group."""

    digest: str = ""
    """Of the sequence of collectives, as ranks compare it before the first step."""

    changed: tuple[str, ...] = ()
    """The passes that changed the graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Effects:
    """Everything that a run leaves behind, as digests by name."""

    values: dict[str, str]
    shared_memory: frozenset[tuple[str, str]]
    """Pairs of outputs and inputs that share memory."""


@dataclass(slots=True)
class _Current:
    step: CapturedStep
    output_names: list[str]
    reference: _Effects
    passed: GraphModule | None = None


_current: list[_Current] = []


def prepare(spec: StepSpec) -> Prepared:
    """Capture a step and execute it as captured."""
    _current.clear()
    try:
        step = capture_step(spec)
    except CaptureError as error:
        return Prepared(num_ops=0, num_collectives=0, problem=str(error))
    graph_module = step.traced.graph_module
    names = _output_names(step)
    reference = _effects(graph_module, step, names)
    again = _effects(graph_module, step, names)
    _current.append(_Current(step, names, reference))
    nodes = graph_module.graph.nodes
    return Prepared(
        num_ops=len(nodes),
        num_collectives=sum(map(is_collective, nodes)),
        problem=None if again == reference else "it does not repeat itself",
    )


def transform(specs: Sequence[PassSpec], verify: bool) -> Transformed:
    """Run passes on a copy of the captured graph."""
    current = _current[0]
    step = current.step.traced
    graph_module = copy.deepcopy(step.graph_module)
    context = PassContext(
        fake_mode=step.fake_mode,
        static_input_names=tuple(entry.name for entry in step.inputs[: step.num_static_inputs]),
    )
    current.passed = None
    try:
        manager = PassManager(build_passes(tuple(specs)), context=context, verify=verify)
        report = manager.run(graph_module)
    except VerificationError as error:
        return Transformed(outcome="refused by the verifier", text=str(error), collectives=())
    except Exception:  # noqa: BLE001  # whatever a pass raises is what we are after
        return Transformed(outcome="crashed", text=traceback.format_exc(), collectives=())
    current.passed = graph_module
    return Transformed(
        outcome="transformed",
        text=str(report),
        collectives=tuple(
            (str(node.target), _ranks_of(node.args[-1]))
            for node in graph_module.graph.nodes
            if is_collective(node)
        ),
        digest=collective_digest(graph_module),
        changed=tuple(record.name for record in report.records if record.report.changed),
    )


@lru_cache
def _ranks_of(group: object) -> tuple[int, ...]:
    """The ranks of the group of that name; names differ from rank to rank."""
    return tuple(dist.get_process_group_ranks(resolve_group(group)))


def execute() -> list[str]:
    """Execute what ``transform`` made, and tell how it differs from the step as captured."""
    current = _current[0]
    assert current.passed is not None, "transform comes first"
    try:
        effects = _effects(current.passed, current.step, current.output_names)
    except Exception:  # noqa: BLE001  # a graph that cannot be executed differs, too
        return [traceback.format_exc()]
    expected = current.reference
    differences = [
        f"{name}: expected {expected.values.get(name)}, got {effects.values.get(name)}"
        for name in expected.values | effects.values
        if expected.values.get(name) != effects.values.get(name)
    ]
    differences += [
        f"{first} and {second} share memory now"
        for first, second in sorted(effects.shared_memory - expected.shared_memory)
    ]
    return differences


def _effects(graph_module: GraphModule, step: CapturedStep, names: Sequence[str]) -> _Effects:
    inputs = [tensor.clone() for tensor in step.inputs]
    custom_ops.observed.clear()
    torch.manual_seed(_RANDOM_SEED + dist.get_rank())
    with torch.no_grad():
        outputs = graph_module(*inputs)
    tensors: dict[str, Any] = {
        f"input {entry.name}": tensor
        for entry, tensor in zip(step.traced.inputs, inputs, strict=True)
    }
    tensors |= dict(zip(names, outputs, strict=True))
    values = {name: _digest(value) for name, value in tensors.items()}
    values["random number generator"] = _digest(torch.get_rng_state())
    values["seen by unknown operators"] = " ".join(custom_ops.observed)
    return _Effects(values=values, shared_memory=_shared_memory(tensors))


def _shared_memory(tensors: dict[str, Any]) -> frozenset[tuple[str, str]]:
    by_storage: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return frozenset(
        (first, second)
        for names in by_storage.values()
        for position, first in enumerate(names)
        for second in names[position + 1 :]
    )


def _digest(value: object) -> str:
    """The bits of a value, its layout, and a glimpse of it for people."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    content = value.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
    bits = hashlib.sha1(content.numpy().tobytes()).hexdigest()[:12]
    dtype = str(value.dtype).removeprefix("torch.")
    glimpse = ""
    with contextlib.suppress(RuntimeError, TypeError):
        glimpse = f" mean {value.double().mean().item():.9g}"
    return f"{dtype}{list(value.shape)}/{list(value.stride())} {bits}{glimpse}"


def _output_names(step: CapturedStep) -> list[str]:
    spec = step.traced.output_spec
    tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    paths, _ = pytree.tree_flatten_with_path(tree)
    return [f"output {pytree.keystr(path)}" for path, _ in paths]
