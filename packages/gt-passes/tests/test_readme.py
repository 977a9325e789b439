"""The README's examples run and print what it says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

import gt_passes
from gt_passes import registry, simulation
from gt_trace import trace_step

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.parametrize("number", [0, 1], ids=["a pass", "EP overlap"])
def test_an_example_prints_what_the_readme_shows(number: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "_PASSES", dict(registry._PASSES))
    text = README.read_text(encoding="utf-8")
    programs = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    outputs = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
    assert len(programs) == len(outputs) == 2
    program, shown = programs[number], outputs[number]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, str(README), "exec", dont_inherit=True), {"__name__": "readme"})
    assert without_times(printed.getvalue()) == without_times(shown)


FRAGMENTS = re.findall(r"```py\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=["memory policy", "simulation"])
def test_a_fragment_runs_on_a_graph(fragment: str):
    def step(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).relu().sum()

    traced = trace_step(step)(torch.rand(4, 4))
    node = next(each for each in traced.graph_module.graph.nodes if each.op == "call_function")
    names = {
        **{name: getattr(simulation, name) for name in simulation.__all__},
        **{name: getattr(gt_passes, name) for name in gt_passes.__all__},
        "graph_module": traced.graph_module,
        "node": node,
        "num_bytes": 2**20,
        "ranks": tuple(range(8)),
        "tasks": (),
    }
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(fragment, str(README), "exec", dont_inherit=True), names)


def without_times(text: str) -> str:
    return re.sub(r" +\d+\.\d", " #", text)


def test_the_map_names_every_shelf():
    text = README.read_text(encoding="utf-8")
    source = Path(gt_passes.__path__[0])
    shelves = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in source.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert {name for name in shelves - {"__init__.py"} if f"`{name}`" not in text} == set()
