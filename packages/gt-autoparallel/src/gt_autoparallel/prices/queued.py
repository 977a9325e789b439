"""Prices by which activations wait for parameters that move along the same axis.

The collectives of one process group run one after another. While the parameters of the next layer
are gathered along an axis, and gradients of the last reduced, an exchange of activations along it
waits for what is under way, however small it is; and computation waits for the exchange. By
``PlacementPrices`` it does not, since how much moves where is what is being decided. Here it is
assumed: along some axes whatever is launched for activations first waits for the gathering of a
layer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

import torch

from gt_autoparallel.graph.layer_names import layer_of_module
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.parameter_chains import ParameterMove, parameter_chains
from gt_autoparallel.graph.placement_graph import PlacementGraph
from gt_autoparallel.graph.redistribution import RedistributionStep
from gt_autoparallel.prices.costs import PlacementPrices, StepTime
from gt_autoparallel.prices.microbatches import Microbatches
from gt_passes.simulation import CostModel


class QueuedPrices(PlacementPrices):
    """``PlacementPrices`` with the wait for one layer's parameters.

    They are for searches alone: a plan has the prices that it is stored with.

    Args:
        cost_model: of the machine.
        microbatches: of a step; as for ``PlacementPrices``.
        layer_bytes: of the parameters of a layer, as they are gathered.
        axes: indices of those along which activations wait.
    """

    def __init__(
        self,
        cost_model: CostModel,
        *,
        microbatches: Microbatches | None,
        layer_bytes: int,
        axes: Collection[int],
    ) -> None:
        super().__init__(cost_model, microbatches=microbatches)
        self._layer_bytes = layer_bytes
        self._axes = frozenset(axes)

    def step_time(
        self,
        step: RedistributionStep,
        dtype: torch.dtype,
        mesh: MeshShape,
        move: ParameterMove | None,
    ) -> StepTime:
        """Time of one step of a redistribution, as in ``StepPrices``."""
        time = super().step_time(step, dtype, mesh, move)
        if move is not None or step.kind == "slice" or step.axis not in self._axes:
            return time
        ranks = mesh.ranks_of_axis(step.axis)
        # The other axes have cut the layer too.
        gathered = self._layer_bytes * len(ranks) // math.prod(mesh.sizes)
        wait_us = self.cost_model.collective_us("all_gather", gathered, ranks)
        return StepTime(time.in_full_us + wait_us, time.hidden_us)


def largest_layer_bytes(graph: PlacementGraph) -> int:
    """Bytes of the parameters of the layer that has most, in the dtype in which they are used."""
    of_parameters: dict[str, int] = {}
    for index, name in parameter_chains(graph).items():
        num_bytes = graph.nodes[index].output().num_bytes
        of_parameters[name] = min(num_bytes, of_parameters.get(name, num_bytes))
    of_layers: Counter[str] = Counter()
    for name, num_bytes in of_parameters.items():
        layer = layer_of_module(name)
        if layer is not None:
            of_layers[layer] += num_bytes
    return max(of_layers.values(), default=0)
