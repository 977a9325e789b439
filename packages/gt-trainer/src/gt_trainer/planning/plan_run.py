"""From what was asked for to a plan: what can be planned at all, the search, the answer."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from gt_trainer.planning.candidates import NoRecipeError

if TYPE_CHECKING:
    from gt_trainer.trainer import GraphTrainer

import importlib.util
import itertools
import json
import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gt_trainer.device import intended_for
from gt_trainer.dry_run.numbers_as_text import GIB
from gt_trainer.launcher.child import RunningChild
from gt_trainer.launcher.launch_scripts import ClusterRun, launch_scripts
from gt_trainer.planning.candidates import PlanRequest, candidates, divides
from gt_trainer.planning.cluster import Cluster
from gt_trainer.planning.counted_model import counted_model
from gt_trainer.planning.model_counts import ModelCounts
from gt_trainer.planning.plan_answer import PlanAnswer
from gt_trainer.planning.plan_page import plan_page
from gt_trainer.planning.planner import bounded_candidates, search_plan
from gt_trainer.planning.run_beside import (
    RunBeside,
    checked_beside,
    finish_beside,
    start_beside,
)
from gt_trainer.planning.scaling_curve import ScalingPoint, scaling_curve
from gt_trainer.planning.simulate_recipes import recipe_config, simulate_recipes
from gt_trainer.trainer import GraphTrainer

_PRECISIONS = ("none", "float8_tensorwise", "float8_rowwise")
_SKIP = "--quantization.skip"
_MOST_DOUBLINGS = 6
_STARTED_BY = {".sbatch": "Slurm", ".sh": "torchrun"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """What is asked of a plan."""

    cluster: Cluster
    num_gpus: int
    global_batch_tokens: int | None = None
    """Of one step; None for one sequence on each GPU."""

    minutes: float = 10.0
    enough: float = math.inf
    """As for ``search_plan``."""

    scaling_minutes: float | None = None
    """For other numbers of GPUs after that; None looks at none."""

    what_if: Mapping[str, float]
    """As for ``Cluster.with_relaxed``: each alone."""

    fixed: Mapping[str, object]
    """Values that recipes must have, by flag."""

    beside: RunBeside | None = None
    """A run that is simulated, too, for as long as it takes; None for none."""

    further: tuple[str, ...] = ()
    """Flags of the configuration that are no part of a recipe, as typed."""

    model_flags: str
    """How the model is chosen on the command line."""


def make_plan(
    config: GraphTrainer.Config,
    question: PlanQuestion,
    *,
    asked: Collection[str] = (),
    tell: Callable[[str], None] = lambda line: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> PlanAnswer:
    """Plan runs of a model.

    Args:
        config: with the flags that every recipe has. Not changed.
        question: what is asked.
        asked: the flags of ``config`` that the user gave.
        tell: is told what was found, recipe by recipe.
        is_stopped: as for ``search_plan``; other numbers of GPUs are left out then.

    Raises:
        NoRecipeError: it cannot be; the text says what is nearest.
    """
    check_plannable(config, asked=asked)
    model = counted_model(config)
    machine = question.cluster.hardware
    seq_len = model.seq_len
    tokens = question.global_batch_tokens or question.num_gpus * seq_len
    if tokens % seq_len:
        nearest = max(1, round(tokens / seq_len)) * seq_len
        raise NoRecipeError(
            f"--global-batch-tokens {tokens} is no multiple of the {seq_len} tokens of a sequence: "
            f"the nearest is {nearest}"
        )
    request = PlanRequest(
        num_gpus=question.num_gpus,
        global_batch=tokens // seq_len,
        gpus_per_node=machine.gpus_per_node,
        linears=_precisions(config, question.fixed),
        # What was asked for every recipe has.
        skipped=() if _SKIP in asked else config.quantization.skip or ("lm_head",),
        fixed=question.fixed,
    )
    check_possible(request, model, question.cluster)
    beside, simulated_beside = question.beside, None
    if beside is not None:
        beside = checked_beside(beside, request.num_gpus, request.global_batch)
    relaxed = [
        question.cluster.with_relaxed({name: value}).hardware
        for name, value in question.what_if.items()
    ]
    search = partial(search_plan, config, model, asked=asked, tell=tell, is_stopped=is_stopped)
    child = None if beside is None else start_beside(beside, request.num_gpus, machine)
    try:
        plan = search(
            request, [machine, *relaxed], seconds=60 * question.minutes, enough=question.enough
        )
        if child is not None and beside is not None:
            simulated_beside = finish_beside(
                beside, request.num_gpus, child, tell=tell, is_stopped=is_stopped
            )
    finally:
        if child is not None:
            child.kill()
    scaling: tuple[ScalingPoint, ...] = ()
    if question.scaling_minutes is not None and not is_stopped():
        scaling = scaling_curve(
            search,
            request,
            plan,
            seq_len=seq_len,
            seconds=60 * question.scaling_minutes,
            is_stopped=is_stopped,
        )
    spec = config.model_spec
    assert spec is not None
    return PlanAnswer(
        model=f"{spec.name} {spec.flavor}",
        cluster=question.cluster,
        num_gpus=question.num_gpus,
        global_batch_tokens=tokens,
        plan=plan,
        beside=simulated_beside,
        model_flags=question.model_flags,
        further=question.further,
        scaling=scaling,
    )


def write_plan_page(
    report: PlanAnswer, config: GraphTrainer.Config, path: Path, *, asked: Collection[str] = ()
) -> list[Path]:
    """Write the plan as a page; beside it data, and of the fastest a trace and scripts.

    Args:
        report: of ``make_plan``.
        config: as for ``make_plan``.
        path: of the page.
        asked: as for ``make_plan``.

    Returns:
        What was written.

    Raises:
        ChildFailedError: capturing the first recipe once more failed.
    """
    data = path.with_suffix(".json")
    data.write_text(json.dumps(report.as_data(), indent=1) + "\n", encoding="utf-8")
    beside = [("the plan as data", data)]
    if report.ranked:
        recipe = report.ranked[0].recipe
        trace = path.with_suffix(".trace.json")
        beside.append(("a trace of the fastest, for ui.perfetto.dev", trace))
        started = cluster_run(report, path.stem)
        scripts = {} if started is None else launch_scripts(started)
        for name, text in scripts.items():
            script = path.parent / name
            script.write_text(text, encoding="utf-8")
            script.chmod(0o755)
            beside.append((f"the fastest for {_STARTED_BY[script.suffix]}", script))
        with intended_for("cuda"):
            configs = {recipe: recipe_config(config, recipe, asked=asked)}
        machines = report.plan.machines[:1]
        RunningChild(partial(simulate_recipes, configs, machines, trace_path=trace)).result()
    path.write_text(
        plan_page(report, beside=[(what, each.name) for what, each in beside]), encoding="utf-8"
    )
    return [path, *(each for _, each in beside)]


def cluster_run(report: PlanAnswer, name: str) -> ClusterRun | None:
    """What launch scripts start: the fastest recipe, on whole hosts or on a part of one.

    Args:
        report: with a recipe that fits.
        name: of job and scripts; what a shell would read otherwise is replaced.

    Returns:
        None where the GPUs are no whole hosts.
    """
    recipe = report.ranked[0].recipe
    per_host = min(report.cluster.gpus_per_host, report.num_gpus)
    if report.num_gpus % per_host:
        return None
    what = f"{report.model} on {report.num_gpus} {report.cluster.hardware.name}: {recipe}"
    return ClusterRun(
        name=re.sub(r"[^\w.-]", "_", name),
        what=" ".join(what.split()),
        model=report.model,
        num_nodes=report.num_gpus // per_host,
        gpus_per_node=per_host,
        hosts_per_domain=max(1, report.cluster.hardware.gpus_per_node // per_host),
        arguments=(*shlex.split(report.model_flags), *report.further, *recipe.flags()),
    )


def check_possible(request: PlanRequest, model: ModelCounts, cluster: Cluster) -> None:
    """Refuse what no recipe can do.

    Raises:
        NoRecipeError: the text says what is nearest.
    """
    if not any(candidates(replace(request, fixed={}), model)):
        batch = nearest_batch(request, model)
        raise NoRecipeError(
            f"no degrees divide {request.global_batch:,} sequences a step among "
            f"{request.num_gpus:,} GPUs: the nearest batch that can be divided is "
            f"--global-batch-tokens {batch * model.seq_len}"
        )
    if not any(candidates(request, model)):
        listed = " ".join(f"{flag} {value}" for flag, value in request.fixed.items())
        raise NoRecipeError(
            f"no recipe for {request.num_gpus:,} GPUs and {request.global_batch:,} sequences a "
            f"step has {listed}: leave one of these flags out"
        )
    if _fits(request, model, cluster):
        return
    state = model.num_parameters * 4 * model.parameter_bytes
    gib = cluster.hardware.hbm_capacity_bytes / GIB
    raise NoRecipeError(
        f"the model does not fit: its parameters, gradients and the optimizer's states are "
        f"{state / GIB:,.0f} GiB, and {request.num_gpus:,} GPUs of {gib:.1f} GiB have no room for "
        f"them{_enough_gpus(request, model, cluster)}"
    )


def nearest_batch(request: PlanRequest, model: ModelCounts) -> int:
    """The batch next to the one asked for that some degrees divide; in sequences."""
    for distance in itertools.count(1):
        for batch in (request.global_batch + distance, request.global_batch - distance):
            if batch > 0 and divides(replace(request, global_batch=batch), model):
                return batch
    raise AssertionError("one sequence for each GPU can be divided")


def _enough_gpus(request: PlanRequest, model: ModelCounts, cluster: Cluster) -> str:
    for doublings in range(1, _MOST_DOUBLINGS + 1):
        gpus = request.num_gpus << doublings
        larger = replace(request, num_gpus=gpus, global_batch=max(gpus, request.global_batch))
        if _fits(larger, model, cluster):
            return f": {gpus:,} such GPUs might"
    return ""


def _fits(request: PlanRequest, model: ModelCounts, cluster: Cluster) -> bool:
    bounded = bounded_candidates(candidates(request, model), model, [cluster.hardware])
    return any(math.isfinite(each.bounds_us[0]) for each in bounded)


def _precisions(config: GraphTrainer.Config, fixed: Mapping[str, object]) -> list[str]:
    """What was asked for; else the run's own precision, and 8 bits where they can be had."""
    asked = fixed.get("--quantization.linears")
    if asked is not None:
        return [str(asked)]
    if importlib.util.find_spec("torchao") is None:
        return ["none"]
    return list(dict.fromkeys((*_PRECISIONS, config.quantization.linears)))


# Settings with which the bounds of a search would be none, so that no plan is made with them.
_LAYOUT = "bounds are of stages as the other flags lay them out"
_PASSES = "bounds are of graphs as the passes of the mode leave them"

UNPLANNED: dict[str, tuple[object, str]] = {
    "--compile.mode": ("aot_fx_trace", "only captured graphs are simulated"),
    "--compile.autoparallel": (False, "bounds are of the placement that torchtitan publishes"),
    "--compile.disable_passes": ((), _PASSES),
    "--compile.fsdp_second_group": (False, "bounds are of one stream for each process group"),
    "--compile.full_recompute_saved_ops": ((), "bounds are of layers that are computed again"),
    "--compile.passes": ((), _PASSES),
    "--parallelism.module_fqns_per_model_part": (None, _LAYOUT),
    "--parallelism.pipeline_parallel_balance": ("layers", _LAYOUT),
    "--parallelism.pipeline_parallel_first_stage_less_layers": (1, _LAYOUT),
    "--parallelism.pipeline_parallel_last_stage_less_layers": (1, _LAYOUT),
    "--parallelism.pipeline_parallel_layers_per_stage": (None, _LAYOUT),
    "--parallelism.pipeline_parallel_schedule_csv": ("", "a plan chooses the schedule"),
    "--quantization.experts": ("none", "bounds of experts are those of the run's own precision"),
    "--training.enable_cpu_offload": (False, "bounds are of states that GPUs hold"),
}
"""The value of each that a plan can be made with, and why no other."""

_LAST = "lm_head"


def check_plannable(config: GraphTrainer.Config, *, asked: Collection[str] = ()) -> None:
    """Refuse what bounds do not hold for.

    Args:
        config: with the flags that every recipe has.
        asked: the flags of ``config`` that the user gave.

    Raises:
        NoRecipeError: names every such flag, and why.
    """
    problems = list(_problems(config, asked))
    if problems:
        listed = "\n  ".join(problems)
        raise NoRecipeError(f"no plan can be made with these settings:\n  {listed}")


def _problems(config: GraphTrainer.Config, asked: Collection[str]) -> Iterator[str]:
    for flag, (planned, reason) in UNPLANNED.items():
        value = operator.attrgetter(flag.removeprefix("--"))(config)
        if value != planned:
            yield f"{flag} is {value!r}, and must be {planned!r}: {reason}"
    skip = config.quantization.skip
    if (skip or _SKIP in asked) and _LAST not in skip:
        yield (
            f"{_SKIP} is {skip!r}, and must have {_LAST!r}: bounds of the projection to logits are "
            "those of the run's own precision"
        )
    for group in config.optimizer.param_groups:
        if group.optimizer_name not in ("Adam", "AdamW"):
            yield (
                f"the optimizer is {group.optimizer_name!r}, and must be Adam or AdamW: bounds are "
                "of their states"
            )
