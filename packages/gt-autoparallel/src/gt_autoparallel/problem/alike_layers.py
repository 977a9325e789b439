"""Which variables stand for alike layers that may be placed, and recompute, differently.

Alike layers share a choice, so that under a budget all of them recompute a value or none does, and
what is best lies between. The solver may therefore let each layer choose for itself
(``solver.mixtures``), all but values that go from one layer to another and what reads them: these
are the same for all layers of a kind. Then no layer sees what another one does, and each of a kind
has the same costs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from gt_autoparallel.graph.layer_names import layer_of_module
from gt_autoparallel.graph.placement_graph import PlacementGraph
from gt_autoparallel.problem.clustering import Clustering
from gt_autoparallel.solver.problem import Block, FloatArray


def crossing_nodes(graph: PlacementGraph) -> frozenset[int]:
    """Nodes of a layer that another layer's nodes read, or that read another layer's."""
    found: set[int] = set()
    for use in graph.uses:
        maker, reader = (
            layer_of_module(graph.nodes[index].module) for index in (use.value.node, use.consumer)
        )
        if maker is not None and maker != reader:
            found.add(use.value.node)
            if reader is not None:
                found.add(use.consumer)
    return frozenset(found)


def layer_blocks(
    graph: PlacementGraph,
    clustering: Clustering,
    *,
    crossing: frozenset[int],
    passing_bytes: Mapping[int, Sequence[FloatArray]],
    rows_of_window: Mapping[str, Sequence[int]],
) -> tuple[Block, ...]:
    """A block for each kind of layers of which there are several.

    Args:
        graph: whose nodes are clustered.
        clustering: of its alike layers.
        crossing: nodes that are the same in all layers of a kind.
        passing_bytes: for each memory row of a kind's backward, for each class of nodes [options]:
            bytes that are there for one layer at a time.
        rows_of_window: these rows, by the kind's window.
    """
    inner: dict[tuple[str, ...], list[int]] = defaultdict(list)
    windows: dict[tuple[str, ...], set[int]] = defaultdict(set)
    for number, members in enumerate(clustering.members):
        layers = [layer_of_module(graph.nodes[node].module) for node in members]
        things = tuple(layer for layer in layers if layer is not None)
        if len(things) < 2:
            continue
        windows[things].add(clustering.window_of_class[number])
        if members[0] not in crossing:
            inner[things].append(number)
    blocks = []
    for things, variables in inner.items():
        names = {clustering.window_names[window] for window in windows[things]}
        blocks.append(
            Block(
                name=things[0],
                size=len(things),
                variables=tuple(variables),
                windows=tuple(sorted(windows[things])),
                passing_bytes={
                    row: tuple(passing_bytes[row][variable] for variable in variables)
                    for name in sorted(names)
                    for row in rows_of_window.get(name, ())
                },
            )
        )
    return tuple(blocks)
