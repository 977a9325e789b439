"""What experts do along one mesh axis, as constraints on a captured graph.

A style pins how parameters are stored, what is gathered of them, how inputs come, and how the
residual stream lies between layers, in the forward and in the backward. Along axes of data
parallelism it pins, besides, what is computed with parameters to the batch, and gradients to sums
that are still to be made. What lies between follows from these; where it does not, the planner
takes the cheapest way, which is at least as good as any hand-written one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Literal

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from gt_autoparallel.graph.experts import FIRST_WEIGHT_OPERAND
from gt_autoparallel.graph.layer_names import layer_of_module
from gt_autoparallel.graph.layouts import MeshShape, fits
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.parameter_chains import gradient_chains, parameter_chains
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode, TensorSpec, Value
from gt_autoparallel.problem.constraints import LayoutConstraint
from gt_autoparallel.problem.tensor_parallel_names import TensorParallelNames
from gt_autoparallel.rules import node_options
from gt_autoparallel.rules.experts import expert_options

AxisStyle = Literal["ddp", "fsdp", "tp", "tp+sp", "ddp+ep", "fsdp+ep"]
"""ddp: parameters replicated, the batch sharded. fsdp: parameters sharded and gathered for use, the
batch sharded. tp: Megatron's columns and rows, activations between layers replicated.
tp+sp: the same with activations between layers sharded along the sequence.
ddp+ep, fsdp+ep: routed experts distributed, tokens travel to them; all else as ddp or fsdp."""

_DATA_PARALLEL = ("ddp", "fsdp", "ddp+ep", "fsdp+ep")
_SHARDED_PARAMETERS = ("fsdp", "fsdp+ep")
_TENSOR_PARALLEL = ("tp", "tp+sp")
_EXPERT_PARALLEL = ("ddp+ep", "fsdp+ep")


def expert_styles(
    mesh: MeshShape, *, routed_experts: bool = False
) -> dict[str, dict[str, AxisStyle]]:
    """The experts' plans for a mesh: name, and what they do along each axis.

    Tensor or expert parallelism is along the axis of neighboring ranks; the other axes all do the
    same. Expert parallelism is among them if the model has routed experts.
    """
    inner = mesh.names[min(range(mesh.num_axes), key=lambda axis: (mesh.strides[axis], -axis))]
    ddp: dict[str, AxisStyle] = dict.fromkeys(mesh.names, "ddp")
    fsdp: dict[str, AxisStyle] = dict.fromkeys(mesh.names, "fsdp")
    styles = {"DDP": ddp, "FSDP": fsdp}
    if routed_experts:
        styles |= {"DDP + EP": ddp | {inner: "ddp+ep"}, "FSDP + EP": fsdp | {inner: "fsdp+ep"}}
    if mesh.num_axes == 1:
        return styles | {"TP": {inner: "tp"}, "TP + SP": {inner: "tp+sp"}}
    return styles | {
        "DDP + TP": ddp | {inner: "tp"},
        "DDP + TP + SP": ddp | {inner: "tp+sp"},
        "FSDP + TP": fsdp | {inner: "tp"},
        "FSDP + TP + SP": fsdp | {inner: "tp+sp"},
    }


def pinned_constraints(
    graph: PlacementGraph,
    mesh: MeshShape,
    styles: Mapping[str, AxisStyle],
    *,
    names: TensorParallelNames | None = None,
    replicate_unknown: Collection[str] = (),
    places: PinnedPlaces | None = None,
) -> tuple[LayoutConstraint, ...]:
    """The constraints under which a plan does what experts do.

    A parameter that a style cannot cut evenly is replicated along that axis. Activations between
    layers must be (batch, sequence, width). ``places`` are those of the graph; None finds them.

    Raises:
        ValueError: ``styles`` are not those of the mesh's axes.
    """
    if set(styles) != set(mesh.names):
        raise ValueError(
            f"styles are for axes {sorted(styles)!r}; the mesh has {list(mesh.names)!r}"
        )
    by_axis = [styles[name] for name in mesh.names]
    places = places or PinnedPlaces(graph)
    pins = _Pins(graph, mesh, by_axis, names or TensorParallelNames(), replicate_unknown, places)
    found = (
        LayoutConstraint(node=node.name, side=side, position=position, placements=placements)
        for pinned, side in ((pins.outputs(), _OUTPUT), (pins.operands(), _OPERAND))
        for node, position, placements in pinned
        if any(placement is not None for placement in placements)
    )
    return tuple(dict.fromkeys(found))


_Pin = tuple[PlacementNode, int, tuple[Placement | None, ...]]
_OUTPUT: Literal["output"] = "output"
_OPERAND: Literal["operand"] = "operand"


class PinnedPlaces:
    """Where in a graph styles pin anything, whatever they are."""

    def __init__(self, graph: PlacementGraph) -> None:
        self._graph = graph
        self._readers: dict[int, list[PlacementNode]] = defaultdict(list)
        for use in graph.uses:
            self._readers[use.value.node].append(graph.nodes[use.consumer])
        self.parameters = parameter_chains(graph)
        """Nodes that are a parameter or its cast, with its name."""
        self.expert_weights = _expert_weights(graph, self.parameters)
        self.between_layers = tuple(self._between_layers())
        self.with_parameters = tuple(self._with_parameters())
        self.before_gradients = tuple(self._before_gradients())

    def _with_parameters(self) -> Iterator[PlacementNode]:
        """What computes with parameters and something else."""
        of_parameters: set[int] = set()
        for node in self._graph.nodes:
            sources = [value.node in of_parameters for value in node.operands]
            if node.kind == "parameter" or (sources and all(sources)):
                of_parameters.add(node.index)
            elif any(sources) and node.kind in ("operator", "experts") and node.outputs[0]:
                yield node

    def _before_gradients(self) -> Iterator[tuple[PlacementNode, PlacementNode]]:
        """What makes a value that becomes a gradient, and the first on its way to that."""
        chains = gradient_chains(self._graph)
        for use in self._graph.uses:
            maker = self._graph.nodes[use.value.node]
            reader = self._graph.nodes[use.consumer]
            if reader.index in chains and maker.index not in chains and not use.value.output:
                yield maker, reader

    def _between_layers(self) -> Iterator[Value]:
        """What one layer makes and another reads, of the shape of the residual stream."""
        nodes = self._graph.nodes
        batches = {
            node.output().shape[:2]
            for node in self._graph.of_kind("input")
            if len(node.output().shape) >= 2
        }
        seen = set()
        for use in self._graph.uses:
            maker, reader = nodes[use.value.node], nodes[use.consumer]
            if maker.kind not in ("operator", "experts") or use.value in seen:
                continue
            home = layer_of_module(maker.module)
            leaves = home is not None and home != layer_of_module(reader.module)
            shared = reader.kind == "share" and self._read_elsewhere(reader, home)
            spec = maker.output(use.value.output)
            is_stream = len(spec.shape) == 3 and spec.shape[:2] in batches
            if home is not None and (leaves or shared) and is_stream:
                seen.add(use.value)
                # Sums that are not finished yet are finished before the stream goes on.
                yield Value(reader.index) if shared else use.value

    def _read_elsewhere(self, share: PlacementNode, home: str | None) -> bool:
        return any(layer_of_module(n.module) != home for n in self._readers[share.index])


class _Pins:
    def __init__(
        self,
        graph: PlacementGraph,
        mesh: MeshShape,
        styles: list[AxisStyle],
        names: TensorParallelNames,
        replicate_unknown: Collection[str],
        places: PinnedPlaces,
    ) -> None:
        self._graph = graph
        self._mesh = mesh
        self._styles = styles
        self._names = names
        self._replicate_unknown = replicate_unknown
        self._places = places
        self._offers: dict[tuple[int, Placement], tuple[tuple[NodeOption, ...], bool]] = {}
        """What ``_if_offered`` has found: repeated layers get the same tuple of options, which is
        kept alive for its id."""

    def operands(self) -> Iterator[_Pin]:
        """Where routed experts are, along axes of data parallelism."""
        for node in self._graph.of_kind("experts"):
            if node.phase == "forward":
                wanted = tuple(
                    (Shard(0) if style in _EXPERT_PARALLEL else Replicate())
                    if style in _DATA_PARALLEL
                    else None
                    for style in self._styles
                )
                yield node, FIRST_WEIGHT_OPERAND, wanted

    def outputs(self) -> Iterator[_Pin]:
        """Layouts in which values leave their nodes."""
        yield from self._parameters()
        for node in self._graph.of_kind("input"):
            spec = node.output()
            yield node, 0, self._fitting(spec, [self._batch(style, spec) for style in self._styles])
        for value in self._places.between_layers:
            node = self._graph.nodes[value.node]
            spec = node.output(value.output)
            wanted = [self._residual(style) for style in self._styles]
            yield node, value.output, self._fitting(spec, wanted)
        yield from self._data_parallel()

    def _data_parallel(self) -> Iterator[_Pin]:
        """Results of what reads parameters, and values that become gradients."""
        if not any(style in _DATA_PARALLEL for style in self._styles):
            return
        for node in self._places.with_parameters:
            yield from self._if_offered(node, Shard(0))
        for maker, reader in self._places.before_gradients:
            # Some casts must not come before the sum: it is then made even earlier.
            if reader.kind != "operator" or list(self._if_offered(reader, Partial("sum"))):
                yield from self._if_offered(maker, Partial("sum"))

    def _if_offered(self, node: PlacementNode, placement: Placement) -> Iterator[_Pin]:
        """The first output of a node, along axes of data parallelism, if it has such an option."""
        wanted = tuple(placement if style in _DATA_PARALLEL else None for style in self._styles)
        operands = self._graph.operand_specs(node)
        options = (
            expert_options(node, operands, self._mesh)
            if node.kind == "experts"
            else node_options(node, operands, self._mesh, replicate_unknown=self._replicate_unknown)
        )
        key = (id(options), placement)
        if key not in self._offers:
            self._offers[key] = (options, any(_lies(option, wanted) for option in options))
        if self._offers[key][1]:
            yield node, 0, wanted

    def _parameters(self) -> Iterator[_Pin]:
        """Parameters as stored, and what is shared of them between their users."""
        chains = self._places.parameters
        stored: dict[str, tuple[Placement, ...]] = {}
        for node in self._graph.of_kind("parameter"):
            name, spec = str(node.target), node.output()
            stored[name] = self._stored(name, spec)
            yield node, 0, stored[name]
        for node in self._graph.of_kind("share"):
            name_of = chains.get(node.operands[0].node)
            if name_of is not None:
                used = tuple(
                    placement if self._cuts(style, name_of) else Replicate()
                    for style, placement in zip(self._styles, stored[name_of], strict=True)
                )
                yield node, 0, used

    def _stored(self, name: str, spec: TensorSpec) -> tuple[Placement, ...]:
        """Axes that cut what is computed first; then each other takes a dim, the first if it can.

        Of two axes on one dim the later must be gathered before the earlier, so that a dim which an
        axis cuts for computation is not for those before it.
        """
        layout: list[Placement] = [Replicate()] * self._mesh.num_axes
        for axis, style in enumerate(self._styles):
            if self._cuts(style, name):
                dim = 0 if style in _EXPERT_PARALLEL else self._names.dim_of(name)
                assert dim is not None, "a style that cuts a parameter says where"
                self._shard_if_it_fits(layout, axis, dim, spec)
        cut_by = {p.dim: axis for axis, p in enumerate(layout) if isinstance(p, Shard)}
        for axis, style in enumerate(self._styles):
            if style not in _SHARDED_PARAMETERS or self._cuts(style, name):
                continue
            for dim in range(len(spec.shape)):
                free = cut_by.get(dim, -1) < axis
                if free and self._shard_if_it_fits(layout, axis, dim, spec):
                    break
        return tuple(layout)

    def _cuts(self, style: AxisStyle, parameter: str) -> bool:
        """Whether each rank computes with its own piece of a parameter, ungathered."""
        if style in _EXPERT_PARALLEL:
            return parameter in self._places.expert_weights
        return style in _TENSOR_PARALLEL and self._names.dim_of(parameter) is not None

    def _shard_if_it_fits(
        self, layout: list[Placement], axis: int, dim: int, spec: TensorSpec
    ) -> bool:
        changed = [*layout[:axis], Shard(dim), *layout[axis + 1 :]]
        if fits(spec.shape, tuple(changed), self._mesh):
            layout[axis] = Shard(dim)
            return True
        return False

    def _batch(self, style: AxisStyle, spec: TensorSpec) -> Placement:
        if style in _TENSOR_PARALLEL or not spec.shape:
            return Replicate()
        return Shard(0)

    def _residual(self, style: AxisStyle) -> Placement:
        if style == "tp":
            return Replicate()
        return Shard(1) if style == "tp+sp" else Shard(0)

    def _fitting(self, spec: TensorSpec, wanted: list[Placement]) -> tuple[Placement | None, ...]:
        """What is wanted, or whatever the planner likes, if that does not cut the tensor evenly."""
        if fits(spec.shape, tuple(wanted), self._mesh):
            return tuple(wanted)
        return (None,) * self._mesh.num_axes


def _lies(option: NodeOption, wanted: tuple[Placement | None, ...]) -> bool:
    layout = option.outputs[0]
    return layout is not None and all(
        pin is None or pin == there for pin, there in zip(wanted, layout, strict=True)
    )


def _expert_weights(graph: PlacementGraph, chains: Mapping[int, str]) -> frozenset[str]:
    """Names of the parameters that routed experts compute with."""
    found = set()
    for node in graph.of_kind("experts"):
        if node.phase == "forward":
            for value in node.operands[FIRST_WEIGHT_OPERAND:]:
                maker = graph.nodes[value.node]
                source = maker.operands[0].node if maker.kind == "share" else maker.index
                found.add(chains[source])
    return frozenset(found)
