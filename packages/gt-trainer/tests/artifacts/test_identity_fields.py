"""Every setting there is, found by reflection, counts in a run's identity or is declared not to.

A field that somebody adds, here, in torchtitan or in PyTorch, and of which nothing is decided fails.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch._functorch.config

from gt_config.graph_neutral import is_graph_neutral
from gt_trace import InputPreparer
from gt_trainer._torch_internals import torch_settings
from gt_trainer.artifacts import run_identity
from gt_trainer.artifacts.run_identity import (
    NO_PART_OF_THE_GRAPH,
    Machine,
    RunSettings,
    step_identity,
    topology_of_run,
)
from gt_trainer.dry_run.fake_step import fake_step
from gt_trainer.launcher import run_in_child
from gt_trainer.models import deepseek_v3
from gt_trainer.trainer import GraphTrainer

Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shift(InputPreparer):
    """A preparer with a setting."""

    by: int


def fields_of(value: Any, part: str, path: Path = ()) -> Iterator[tuple[Path, bool]]:
    """The path of each setting inside a part of the identity, and whether it is declared out."""
    if isinstance(value, (list, tuple)) and value and dataclasses.is_dataclass(value[0]):
        for index, each in enumerate(value):
            yield from fields_of(each, part, (*path, index))
        return
    if not dataclasses.is_dataclass(value):
        yield path, False
        return
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        is_out = is_graph_neutral(field) or field.name in NO_PART_OF_THE_GRAPH.get(part, ())
        if is_out or not field.compare:
            yield (*path, field.name), True
        else:
            yield from fields_of(inner, part, (*path, field.name))


def changed(value: Any) -> Any:
    """Another value; whether a run would take it does not matter to its identity."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return f"{value} or another"
    if isinstance(value, (list, tuple)):
        return type(value)([*value, "one more"])
    if isinstance(value, dict):
        return {**value, "one more": 1}
    return "another"


def with_change(value: Any, path: Path) -> Any:
    """A copy with another value at a path."""
    if not path:
        return changed(value)
    result = copy.copy(value)
    first, *rest = path
    if isinstance(first, int):
        items = list(value)
        items[first] = with_change(items[first], tuple(rest))
        return type(value)(items)
    object.__setattr__(result, first, with_change(getattr(value, first), tuple(rest)))
    return result


@cache
def outcomes() -> dict[str, tuple[bool, bool]]:
    """For each setting, whether it is declared out, and whether another value gives another identity."""
    return run_in_child(_outcomes, timeout_seconds=300)


def _outcomes() -> dict[str, tuple[bool, bool]]:
    config = deepseek_v3.deepseek_v3_debugmodel()
    spec = config.model_spec
    del spec.model.layers[2:]  # one dense, one of experts
    config.training.seq_len, config.training.local_batch_size = 32, 2
    found: dict[str, tuple[bool, bool]] = {}
    with fake_step(config, 1) as step:
        settings = RunSettings(
            compile=config.compile,
            topology=topology_of_run(step.parallel_dims, config.training, config.parallelism),
            model=spec.model,
            loss=config.loss,
            parallelism=config.parallelism,
            training=config.training,
            debug=config.debug,
            machine=Machine(device="cpu"),
            input_preparers=(Shift(by=1),),
        )

        def digest(of: RunSettings) -> str:
            return step_identity(
                of, model=step.model, loss_fn=step.loss_fn, arguments=step.inputs, passes=()
            ).digest

        before = digest(settings)
        for part in dataclasses.fields(settings):
            for path, is_out in fields_of(getattr(settings, part.name), part.name):
                whole = with_change(settings, (part.name, *path))
                found[".".join(map(str, (part.name, *path)))] = is_out, digest(whole) != before
    return found


def test_each_setting_of_a_run_counts_or_is_declared_to_be_no_part_of_a_graph():
    found = outcomes()
    parts = {name.partition(".")[0] for name in found}
    assert parts == {field.name for field in dataclasses.fields(RunSettings)}
    assert len(found) > 150
    undecided = [name for name, (is_out, differs) in found.items() if not is_out and not differs]
    assert undecided == []


def test_what_is_declared_to_be_no_part_of_a_graph_changes_no_identity():
    declared = {name for name, (is_out, _) in outcomes().items() if is_out}
    assert {"training.steps", "debug.seed", "compile.artifacts"} <= declared
    assert [name for name in sorted(declared) if outcomes()[name][1]] == []


def test_each_part_of_a_configuration_is_in_the_settings_or_declared():
    parts = {field.name for field in dataclasses.fields(RunSettings)}
    of_run = parts - {"machine", "topology", "model", "input_preparers"} | {"model_spec"}
    fields = {field.name for field in dataclasses.fields(GraphTrainer.Config)}
    assert fields == of_run | NO_PART_OF_THE_GRAPH["run"]


def test_each_setting_of_pytorch_counts_or_is_declared(monkeypatch):
    live = {f"{module}.{name}" for module, held in torch_settings().items() for name in held}
    declared = NO_PART_OF_THE_GRAPH["pytorch"]
    assert declared <= live
    before = run_identity._pytorch_settings()
    assert before.keys() == live - declared
    for module, held in torch_settings().items():
        for name, value in held.items():
            other = {**torch_settings(), module: {**held, name: changed(value)}}
            monkeypatch.setattr(run_identity, "torch_settings", lambda other=other: other)
            assert (run_identity._pytorch_settings() != before) == (
                f"{module}.{name}" not in declared
            )
            monkeypatch.undo()


def test_the_settings_of_pytorch_are_those_of_the_moment():
    before = run_identity._pytorch_settings()
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        during = run_identity._pytorch_settings()
    differing = {name for name in before if before[name] != during[name]}
    assert differing == {"functorch.activation_memory_budget"}
    assert run_identity._pytorch_settings() == before
