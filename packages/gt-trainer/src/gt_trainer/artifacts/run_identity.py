"""The fingerprint of the graph that a rank is about to capture, taken before it is captured.

A stored graph is used only under an equal fingerprint. So everything that a capture reads goes in:
found by reflection and not listed, with the few exceptions named here. Ranks that are alike have
equal fingerprints: of where a rank stands, only the shapes of its tensors enter.

Versions say little of a checkout in which people work, so that sources count as well: those of this
project's packages, since they make the graph, and those that define the model and its loss.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.distributed import ParallelDims

from gt_config import CompileConfig, Fingerprint, Topology, fingerprint
from gt_passes import GraphPass
from gt_trace import InputPreparer, register_block_masks
from gt_trace.capture.captured_mode import CapturedMode, hooks_of
from gt_trainer._torch_internals import torch_settings
from gt_trainer.artifacts.plain_data import folded, plain_data, tensor_text
from gt_trainer.artifacts.stage_names import StageNames
from gt_trainer.placement.placed_parts import identity_of_plan

PACKAGES = ("gt_config", "gt_trace", "gt_passes", "gt_pipeline", "gt_autoparallel", "gt_trainer")
"""Whose sources count. Not every run imports all of them; one of them shapes the graph or not by
what it is asked, and to tell would be to trust one more thing."""

NO_PART_OF_THE_GRAPH: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        # What surrounds a step. Of the others the model has what they do to it: activation
        # checkpointing wraps its modules, overrides and quantization change its configuration.
        "run": frozenset(
            {
                "activation_checkpoint",
                "checkpoint",
                "comm",
                "dataloader",
                "dump_folder",
                "hf_assets_path",
                "lr_scheduler",
                "metrics",
                "optimizer",
                "override",
                "profiler",
                "quantization",
                "tokenizer",
                "validator",
            }
        ),
        "model": frozenset({"param_init"}),  # values of parameters
        "loss": frozenset(),
        # A path; the stages that it gives are the model.
        "parallelism": frozenset({"pipeline_parallel_schedule_csv"}),
        # How long a run is, and what surrounds its steps.
        "training": frozenset({"steps", "max_norm", "gc_freq", "gc_debug"}),
        "debug": frozenset(
            {"seed", "print_config", "save_config_file", "enable_structured_logging"}
        ),
        # Reports, and caches of torch.compile, whose keys are its own affair.
        "pytorch": frozenset(
            {
                "functorch.debug_partitioner",
                "functorch.visualize_memory_budget_pareto",
                "functorch.memory_budget_pareto_dir",
                "functorch.torch_compile_graph_format",
                "functorch.enable_autograd_cache",
                "functorch.enable_remote_autograd_cache",
                "functorch.bundled_autograd_cache",
                "functorch.bypass_autograd_cache_key",
                "functorch.strict_autograd_cache",
                "functorch.force_autograd_cache",
                "symbols.print_specializations",
                "symbols.enrich_profiler_metadata",
            }
        ),
    }
)
"""Fields that a captured graph does not depend on, by the part of the identity that they are of:
of torchtitan's configurations, and of PyTorch's settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The device that a graph is for, as far as a capture asks about it."""

    device: str
    """Type of device: "cpu" or "cuda"."""

    name: str | None = None
    """The model, as the driver names it; None on CPUs, of which no capture asks anything."""

    capability: str | None = None
    """CUDA's compute capability, as "9.0"."""

    num_local_devices: int | None = None
    """How many a host has: whether ranks of a group reach each other's memory."""

    @classmethod
    def here(cls, device: torch.device | str) -> Machine:
        """This machine with its devices of one type."""
        kind = torch.device(device).type
        if kind != "cuda":
            return cls(device=kind)
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return cls(
            device=kind,
            name=properties.name,
            capability=f"{properties.major}.{properties.minor}",
            num_local_devices=torch.cuda.device_count(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What a run has settled before anything is captured, as far as graphs depend on it."""

    compile: CompileConfig
    topology: Topology
    model: object
    """torchtitan's configuration of the model."""

    loss: object
    """torchtitan's configuration of the loss."""

    parallelism: ParallelismConfig
    training: TrainingConfig
    debug: DebugConfig
    machine: Machine
    input_preparers: Sequence[InputPreparer] = ()
    """Hooks on the inputs of captures."""


def topology_of_run(
    parallel_dims: ParallelDims, training: TrainingConfig, parallelism: ParallelismConfig
) -> Topology:
    """The extents of a run whose meshes exist."""
    num_samples = training.local_batch_size * parallel_dims.dp_replicate * parallel_dims.dp_shard
    steps = max(1, training.global_batch_size // num_samples)
    return Topology(
        world=parallel_dims.world_size,
        dp_replicate=parallel_dims.dp_replicate,
        dp_shard=parallel_dims.dp_shard,
        cp=parallel_dims.cp,
        tp=parallel_dims.tp,
        ep=parallel_dims.ep,
        pp=parallel_dims.pp,
        batch_size=training.local_batch_size,
        microbatch_size=parallelism.pipeline_parallel_microbatch_size,
        seq_len=training.seq_len,
        gradient_accumulation_steps=steps,
        sequence_parallel=parallelism.enable_sequence_parallel,
    )


def step_identity(
    settings: RunSettings,
    *,
    model: nn.Module,
    loss_fn: object,
    arguments: Sequence[Any],
    passes: Sequence[GraphPass],
    num_microbatches: int = 1,
    stage: StageNames | None = None,
) -> Fingerprint:
    """The fingerprint of a training step on this rank.

    Args:
        settings: of the run.
        model: placed; of its tensors, names, shapes, dtypes and placements are read. Those on meta
            stand for tensors on the device of the machine.
        loss_fn: as built.
        arguments: of the step, which a capture would be given; likewise.
        passes: that will run on the graph, in order.
        num_microbatches: for which one capture is cut into graphs.
        stage: which stage of a pipeline ``model`` is; alike ones have one fingerprint.

    Raises:
        FingerprintTypeError: something is of a kind of which nothing says in what two differ; the
            message names it.
    """

    def plain(value: object, path: str) -> Any:
        left_out = NO_PART_OF_THE_GRAPH.get(path, frozenset())
        return plain_data(value, path=path, leave_out=left_out)

    def named(texts: Mapping[str, str]) -> dict[str, str]:
        if stage is None:
            return folded(texts)
        return folded({stage.of_module(name): text for name, text in texts.items()})

    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    plain_passes = [{"name": each.name, **plain(each, each.name)} for each in passes]
    return fingerprint(
        settings.compile,
        settings.topology,
        model={
            "config": plain(settings.model, "model"),
            "modules": named(_modules(model)),
            "attributes": named(
                dict(
                    attribute_texts(
                        model,
                        leave_out=NO_PART_OF_THE_GRAPH["model"],
                        meta_device=settings.machine.device,
                    )
                )
            ),
            "parameters": named(_tensors(parameters, settings.machine)),
            "buffers": named(_tensors(buffers, settings.machine)),
        },
        batch={**_arguments(arguments, settings.machine), "num_microbatches": num_microbatches},
        environment=environment(settings.machine),
        further={
            "loss": plain(settings.loss, "loss"),
            "parallelism": plain(settings.parallelism, "parallelism"),
            "training": plain(settings.training, "training"),
            "debug": plain(settings.debug, "debug"),
            "passes": plain_passes,
            "global_modes": _global_modes(),
            "pytorch": _pytorch_settings(),
            "plan": identity_of_plan(
                settings.compile, model, str if stage is None else stage.text_without
            ),
            "stage": None if stage is None else _stage(stage, settings.model, plain_passes),
            "definitions": definitions(model, loss_fn, (*passes, *settings.input_preparers)),
            "input_preparers": [
                {
                    "class": _class_name(each),
                    "attributes": plain_data(
                        each, path=f"input_preparers[{index}]", takes_any_object=True
                    ),
                }
                for index, each in enumerate(settings.input_preparers)
            ],
        },
    )


def _stage(stage: StageNames, model: Any, passes: object) -> dict[str, object]:
    """What of its place in a pipeline the graphs of a stage depend on.

    Where a pass names a layer by its number, they depend on which layers these are.
    """
    of_layers = [model.layers[number] for number in stage.layers]
    left_out = NO_PART_OF_THE_GRAPH["model"]
    return {
        "is_first": stage.stage_index == 0,
        "is_last": stage.stage_index == stage.num_stages - 1,
        "layers": plain_data(of_layers, path="stage.layers", leave_out=left_out),
        "numbers": list(stage.layers) if stage.names_a_layer(passes) else None,
    }


def environment(machine: Machine) -> dict[str, str | None]:
    """Versions of what makes a graph, sources of this project, and the device it is for."""
    return {
        **{name: _version(name.replace("_", "-")) for name in PACKAGES},
        **{f"sources of {name}": sources_digest(name) for name in PACKAGES},
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torch git": torch.version.git_version,
        "torch cuda": torch.version.cuda,
        "torchtitan": _version("torchtitan"),
        "torchao": _version("torchao"),
        "transformers": _version("transformers"),
        "device": machine.device,
        "device name": machine.name,
        "device capability": machine.capability,
        "devices of a host": str(machine.num_local_devices),
    }


@functools.cache
def sources_digest(package: str) -> str | None:
    """SHA-256 of all Python files of a package, or of a module; None where there is none."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return None
    digest = hashlib.sha256()
    folders = list(map(Path, spec.submodule_search_locations or ()))
    if not folders and spec.origin is not None and Path(spec.origin).is_file():
        return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@functools.cache
def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _modules(model: nn.Module) -> dict[str, str]:
    """Class, mode and number of hooks of each module; the model itself is ""."""
    mode = CapturedMode.now(model)
    return {
        name: f"{_class_name(each)}, {'training' if mode.training[name] else 'evaluating'}"
        + (f", hooks {mode.num_hooks[name]}" if name in mode.num_hooks else "")
        for name, each in model.named_modules()
    }


def _tensors(named: Iterator[tuple[str, torch.Tensor]], machine: Machine) -> dict[str, str]:
    """Tensors as texts; of one with several names, its first name in the place of the others."""
    first: dict[int, str] = {}
    return {
        name: tensor_text(tensor, meta_device=machine.device)
        if first.setdefault(id(tensor), name) == name
        else f"the same as {first[id(tensor)]}"
        for name, tensor in named
    }


def _arguments(arguments: Sequence[Any], machine: Machine) -> dict[str, object]:
    """Leaves of the arguments of a step by their paths, and what these are the leaves of.

    Masks of FlexAttention are trees too: what they close over are leaves.
    """
    register_block_masks()
    leaves, spec = pytree.tree_flatten_with_path(tuple(arguments))
    structure = plain_data(spec, path="batch")
    return {
        "structure": json.dumps(structure, sort_keys=True),
        "leaves": {
            pytree.keystr(path): tensor_text(leaf, meta_device=machine.device)
            if isinstance(leaf, torch.Tensor)
            else plain_data(leaf, path=f"batch{pytree.keystr(path)}")
            for path, leaf in leaves
        },
    }


def _global_modes() -> dict[str, object]:
    """Switches of PyTorch by which operators are chosen while a step is traced."""
    mode = CapturedMode.now(None)
    return {
        "autocast": {kind: repr(dtype) for kind, dtype in mode.autocast.items()},
        "autocast's cache": mode.autocast_cache,
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        **mode.settings,
    }


def _pytorch_settings() -> dict[str, object]:
    """Settings of PyTorch's own by which a graph is traced and cut, but for caches and reports."""
    return {
        f"{module}.{name}": plain_data(value, path=f"{module}.{name}", takes_any_object=True)
        for module, settings in torch_settings().items()
        for name, value in settings.items()
        if f"{module}.{name}" not in NO_PART_OF_THE_GRAPH["pytorch"]
    }


def definitions(
    model: nn.Module, loss_fn: object, others: Sequence[GraphPass | InputPreparer] = ()
) -> Mapping[str, str]:
    """Digests of the sources that define the model, its hooks, the loss, passes and preparers.

    Of classes with their bases, by the names of their modules. They are read once in a process:
    ask for them before anybody has time to edit what was imported.
    """
    objects: list[object] = [*model.modules(), loss_fn, *others]
    modules = {base.__module__ for each in objects for base in type(each).__mro__}
    functions = [*(hook for each in model.modules() for hook in hooks_of(each)), loss_fn]
    modules |= {str(each.__module__) for each in functions if hasattr(each, "__module__")}
    return {name: digest for name in sorted(modules) if (digest := _module_digest(name))}


@functools.cache
def _module_digest(name: str) -> str | None:
    """None of PyTorch and of Python itself, whose versions say it, and of what has no source.

    Of code that is not installed but lies in somebody's folder, with all of its package: a model
    calls functions that stand in other files.
    """
    package = name.partition(".")[0]
    if package == "torch" or package in sys.stdlib_module_names:
        return None
    module = importlib.import_module(name)
    if "site-packages" not in Path(getattr(module, "__file__", None) or "site-packages").parts:
        whole = sources_digest(package)
        if whole is not None:
            return whole
    try:
        return hashlib.sha256(inspect.getsource(module).encode()).hexdigest()
    except (OSError, TypeError):
        return None


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


# What is set on a model's modules besides tensors, submodules and hooks, as texts.
#
# A forward reads attributes: scales, numbers of heads, functions put in the place of methods.
# Those of torchtitan's modules follow from its configuration, until somebody sets one by hand.
# All count, as far as they are data or functions; of tensors the values too, unless they are
# parameters or buffers, which are inputs of a graph where others are its constants. Of other
# objects their classes count, and of those that a model's author wrote their attributes too;
# PyTorch's own (process groups, streams) and this project's say by rank and by run what no graph
# holds.
_NO_PART = frozenset({*vars(nn.Module()), "_param_init"})
"""Tables of parameters, buffers, submodules and hooks, and the mode, which are counted elsewhere;
and torchtitan's note of how parameters are drawn, in which no graph differs."""

_OURS = "_gt_"
"""What this project notes on modules begins so. It follows from how tensors are placed, and from
sources that count."""

_MOST_CHARACTERS = 60


def attribute_texts(
    model: nn.Module, *, leave_out: Set[str], meta_device: str
) -> Iterator[tuple[str, str]]:
    """Name and text of each attribute of each module, as ``layers.0.attention.n_heads`` and "16".

    Args:
        model: whose modules are looked at.
        leave_out: names of fields of configurations that no graph depends on.
        meta_device: the type of device that a tensor on meta stands for.
    """
    known: dict[int, str] = {}
    state = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name in _NO_PART or name.startswith(_OURS):
                continue
            path = f"{prefix}.{name}" if prefix else name
            if id(value) not in known:  # modules share functions and configurations
                converted = plain_data(
                    value,
                    path=path,
                    leave_out=leave_out,
                    meta_device=meta_device,
                    takes_any_object=True,
                    is_constant=lambda tensor: id(tensor) not in state,
                )
                known[id(value)] = _short(json.dumps(converted, sort_keys=True, default=repr))
            yield path, known[id(value)]


def _short(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"sha256 {hashlib.sha256(text.encode()).hexdigest()}"
