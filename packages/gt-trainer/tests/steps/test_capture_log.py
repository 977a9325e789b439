"""What passes left alone is told if an option asked for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from gt_config.graph_kinds import EVERY_GRAPH, GraphKind
from gt_config.numerics import Numerics
from gt_passes import GraphPass, PassContext, PassManager, PassReport, Refusal
from gt_trainer.steps.capture_log import explain_refusals


@dataclass(frozen=True)
class CarryOut(GraphPass):
    """Refuses three places, for two reasons."""

    name: ClassVar[str] = "carry-out"
    numerics: ClassVar[Numerics] = "bitwise"
    runs_on: ClassVar[frozenset[GraphKind]] = EVERY_GRAPH

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        refusals = (
            Refusal(node_name="mm", reason="it is wide"),
            Refusal(node_name="add", reason="it is small"),
            Refusal(node_name="mm_1", reason="it is wide"),
        )
        return PassReport(changed=False, refusals=refusals)


@dataclass(frozen=True)
class CleanUp(CarryOut):
    """The same, asked for by nobody."""

    name: ClassVar[str] = "clean-up"
    only_cleans_up: ClassVar[bool] = True


def test_refusals_are_told_by_reason_unless_the_pass_only_cleans_up():
    graph_module = make_fx(lambda x: x.cos(), tracing_mode="fake")(torch.ones(2))
    passes = [CleanUp(), CarryOut()]
    context = PassContext.from_graph(graph_module)
    report = PassManager(passes, context=context).run(graph_module)
    assert [*explain_refusals(report)] == [
        "carry-out left mm and 1 more alone: it is wide",
        "carry-out left add alone: it is small",
    ]
