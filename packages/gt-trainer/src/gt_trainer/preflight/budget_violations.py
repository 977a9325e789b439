"""A memory budget that no plan can keep, found before any rank starts or anything is captured.

However a solver places a model, its parameters, their gradients and the optimizer's state are there
in the backward, at best cut over all ranks. What activations take besides, only the solver can say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gt_config import Topology, Violation
from gt_trainer.preflight.plan_file_violations import model_on_meta
from gt_trainer.trainer import GraphTrainer

_GIB = 2**30


def budget_violations(config: GraphTrainer.Config, topology: Topology) -> Iterator[Violation]:
    """Yield at most one violation: a budget below what the state of training takes.

    Args:
        config: of a run with which nothing else is wrong: its model is built, on meta.
        topology: its extents.
    """
    gib = config.compile.autoparallel_solver.memory_budget_gib
    if not config.compile.autoparallel or gib is None:
        return
    # Imported here: no other run pays for the solver.
    from gt_autoparallel import PlacementRequest

    parameters = list(model_on_meta(config).parameters())
    state = sum(each.nbytes for each in parameters) * (
        1 + PlacementRequest().optimizer_state_copies
    )
    gradients = sum(each.nbytes for each in parameters if each.requires_grad)
    least = (state + gradients) / topology.world
    if gib * _GIB >= least:
        return
    yield Violation(
        flag="--compile.autoparallel_solver.memory_budget_gib",
        value=gib,
        allowed=f"at least {math.ceil(1000 * least / _GIB) / 1000:.3f} on {topology.world} ranks: "
        "so much do parameters, gradients and optimizer state take, cut over all of them, without "
        "any activation",
        fix="allow more, or use more ranks",
    )
