"""The defaults of a device, settled with what the user chose, and what then runs, in one line.

A default gives way to whatever it does not go with, and the run says so at its start; the same
option is refused if it was asked for. So do the EP overlap and the 8-bit products that a
configuration is shipped with, to a solver.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from gt_config import AutoParallelConfig, CompileConfig
from gt_config.numerics import NUMERICS, Numerics
from gt_config.option_paths import default_option, option_at, with_option
from gt_passes import MemoryPolicyPass, RecipeError, known_passes
from gt_passes.registry import find_passes
from gt_trainer.device import intended_device_type
from gt_trainer.parallelism_options import TrainerParallelismConfig, balance_of
from gt_trainer.preflight.pass_options import RunOptions, what_changes_bits
from gt_trainer.preflight.preflight import configuration_violations, topology_of
from gt_trainer.quantization.quantization_options import QuantizationConfig
from gt_trainer.trainer import GraphTrainer

_COMPILE = "--compile."
_OF_DEVICE = ("memory_policy", "inductor_compilation", "cuda_graphs")
"""What ``models.device_defaults`` sets."""

_COMPILED = {
    "compile-regions": "Inductor for what memory bounds",
    "compile-whole-graph": "Inductor for the whole graph",
}
_EXCHANGE = "how many tokens ranks exchange is known on the device alone"
_PIPELINE = "of pipelines only two stages on one GPU have been replayed"
_MICROBATCHES = "no GPU has replayed a step of several microbatches yet"
_PLANNED = "the plan says what the backward computes and gathers again"
_OVERLAP = "ep_overlap"
_KEPT = "whether a step can run in chunks depends on its plan; ask for it to try"
_SCALES = "a scale is a maximum over a tensor, and no rule says what that costs of a sharded one"
_ACTIVATIONS = {
    "save_all": "activations kept",
    "selective": "cheap activations recomputed",
    "selective_alternate": "cheap activations and every second product recomputed",
    "full_recompute": "layers recomputed",
    "offload": "activations offloaded to the host",
}


def settle_defaults(
    config: GraphTrainer.Config, world_size: int, *, asked: Collection[str] = ()
) -> tuple[GraphTrainer.Config, tuple[str, ...]]:
    """Take back the defaults that do not go with the other options.

    Args:
        config: finished. Not changed.
        world_size: ranks of the whole job.
        asked: flags that the user gave, as ``--compile.cuda_graphs``: those stay as they are.

    Returns:
        The configuration, and for each default that gave way one line that says why.
    """
    if config.quantization.linears == "none":
        # Whoever turns off a published precision need not clear what chose its layers.
        kept: dict[str, Any] = {
            name: getattr(config.quantization, name) if f"--quantization.{name}" in asked else ()
            for name in ("only", "skip")
        }
        config = replace(config, quantization=replace(config.quantization, **kept))
    open_options = [
        option
        for option in _OF_DEVICE
        if intended_device_type() != "cpu"
        and _COMPILE + option not in asked
        and option_at(config.compile, option) != _neutral(option)
    ]
    lines: list[str] = []
    if config.compile.autoparallel and config.quantization and not _asks_precision(asked):
        linears = config.quantization.linears
        lines.append(f"--quantization.linears {linears} gives way: {_SCALES}")
        config = replace(config, quantization=QuantizationConfig())
    asked_overlap = any(flag.startswith(_COMPILE + _OVERLAP) for flag in asked)
    if config.compile.autoparallel and config.compile.ep_overlap.enabled and not asked_overlap:
        lines.append(f"{_COMPILE}{_OVERLAP}.enabled True gives way: {_KEPT}")
        options = with_option(config.compile, _OVERLAP, _neutral(_OVERLAP))
        config = replace(config, compile=options)
    while open_options and (reasons := _reasons(config, world_size, open_options)):
        for option, reason in reasons.items():
            value = option_at(config.compile, option)
            lines.append(f"{_COMPILE}{option} {value} gives way: {reason}")
            options = with_option(config.compile, option, _neutral(option))
            config = replace(config, compile=options)
            open_options.remove(option)
    return config, tuple(lines)


def settled_by_hand(
    config: GraphTrainer.Config, world_size: int, *, asked: Collection[str] = ()
) -> GraphTrainer.Config | None:
    """The same run without a solver, with the defaults that go with that; None if it has no solver.

    Args:
        config: as for ``settle_defaults``, which may take back for a solver what goes without one.
        world_size: ranks of the whole job.
        asked: flags that the user gave.
    """
    if not config.compile.autoparallel:
        return None
    options = replace(config.compile, autoparallel=False, autoparallel_solver=AutoParallelConfig())
    by_hand = replace(config, compile=options)
    if not _asks_precision(asked):  # as the planned one
        by_hand.quantization = QuantizationConfig()
    parallelism = config.parallelism
    if balance_of(parallelism) == "planned":  # by what a solver places
        assert isinstance(parallelism, TrainerParallelismConfig)
        by_hand.parallelism = replace(parallelism, pipeline_parallel_balance="layers")
    return settle_defaults(by_hand, world_size, asked=asked)[0]


def _asks_precision(asked: Collection[str]) -> bool:
    return any(flag.startswith("--quantization.") for flag in asked)


def describe_run(config: GraphTrainer.Config, world_size: int) -> str:
    """One line: what of a step is compiled, recorded and recomputed, and how exact it is.

    It is read off the passes that run, not off the options that asked for them.

    Args:
        config: settled.
        world_size: ranks of the whole job.
    """
    options = config.compile
    device = intended_device_type()
    if options.mode == "none":
        return f"On {device}: eager"
    run = RunOptions(
        options=options,
        topology=topology_of(config, world_size),
        reshard_after_forward=config.parallelism.fsdp_reshard_after_forward,
    )
    try:
        names = {each.name for passes in run.passes().values() for each in passes}
        changes = what_changes_bits(run)
    except RecipeError:
        return f"On {device}: passes that do not fit together"  # refused before anything runs
    if config.quantization:
        changes = {**changes, "products in 8 bits": "approximate"}
    compiled = [text for name, text in _COMPILED.items() if name in names]
    if "compile-regions" in names and options.regional_modules:
        compiled = [f"Inductor for {', '.join(options.regional_modules)}"]
    parts = [
        _activations(options, names),
        *(compiled or ["nothing compiled"]),
        "CUDA graphs" if "cuda-graphs" in names else "no CUDA graphs",
        _numerics(changes, config, is_pipelined=run.topology.pp > 1),
    ]
    return f"On {device}: {', '.join(parts)}"


def _numerics(
    changes: Mapping[str, Numerics], config: GraphTrainer.Config, *, is_pipelined: bool
) -> str:
    """The class of a run, that of its farthest part, and which parts have it."""
    if not changes:
        # Eager stages reduce gradients after each microbatch. A model in one piece sums the two
        # uses of a tied weight within each of them.
        model = config.model_spec.model if config.model_spec is not None else None
        is_tied = is_pipelined and getattr(model, "enable_weight_tying", False)
        return (
            "bitwise as eager"
            + (", gradients reduced once" if is_pipelined else "")
            + (", a tied weight's by stage first" if is_tied else "")
        )
    numerics = max(changes.values(), key=NUMERICS.index)
    return f"{numerics} ({', '.join(name for name, its in changes.items() if its == numerics)})"


def _activations(options: CompileConfig, names: Collection[str]) -> str:
    if options.mode == "aot_joint" and options.joint_partitioner == "min_cut":
        return "the fewest bytes kept between forward and backward"
    for own in _own_memory_policies(options):
        return f"activations kept as {own} says"
    policy = options.memory_policy if "recompute-tagged" in names else "save_all"
    return _ACTIVATIONS[policy]


def _own_memory_policies(options: CompileConfig) -> list[str]:
    known = [name for name in options.passes if name in known_passes()]
    return [each.name for each in find_passes(known) if issubclass(each, MemoryPolicyPass)]


def _reasons(
    config: GraphTrainer.Config, world_size: int, options: Collection[str]
) -> dict[str, str]:
    """Of the defaults that cannot stay, why."""
    reasons = {}
    for own in _own_memory_policies(config.compile):
        if "memory_policy" in options:
            reasons["memory_policy"] = f"{own} is the memory policy"
    if "memory_policy" in options and config.compile.autoparallel:
        reasons["memory_policy"] = _PLANNED
    # Where a solver places experts, tokens may stay where they are.
    exchanges = config.parallelism.expert_parallel_degree > 1 and not config.compile.autoparallel
    if "cuda_graphs" in options and exchanges:
        reasons["cuda_graphs"] = _EXCHANGE
    elif "cuda_graphs" in options and config.parallelism.pipeline_parallel_degree > 1:
        reasons["cuda_graphs"] = _PIPELINE
    elif "cuda_graphs" in options and config.compile.accumulation == "reduce_once":
        reasons["cuda_graphs"] = _MICROBATCHES
    for violation in configuration_violations(config, world_size):
        option = violation.flag.removeprefix(_COMPILE)
        if option in options:
            reasons.setdefault(option, f"allowed is {violation.allowed}")
    return reasons


def _neutral(option: str) -> object:
    return default_option(CompileConfig, option)
