"""Gather parameters in 8 bits that are only read in 8 bits."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from gt_config.graph_kinds import SHARD_AXES, GraphKind, MeshAxis
from gt_config.node_keys import FsdpCollectiveAnnotation
from gt_passes._torch_internals import value_of
from gt_passes.analysis.bucket_copies import PACK_BUCKET, UNPACK_BUCKET
from gt_passes.analysis.code_motion import CodeMotion
from gt_passes.analysis.collectives import is_collective
from gt_passes.analysis.fsdp_collective import fsdp_collective
from gt_passes.analysis.node_calls import call_like
from gt_passes.contract import ChangeBounds, PassContext, PassReport, Refusal
from gt_passes.fsdp.fsdp_buckets import replace_uses
from gt_passes.fsdp.fsdp_launches import FsdpLaunch
from gt_passes.fsdp.fsdp_pass import FsdpPass
from gt_passes.fsdp.quantized_reads import QuantizedReads, find_quantized_reads, form_of
from gt_passes.registry import register_pass
from gt_trace.node_metadata import copy_annotations, write_annotation

_aten = torch.ops.aten
_functional = torch.ops._c10d_functional
_ALL_GATHER = _functional.all_gather_into_tensor.default


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeBeforeGather(FsdpPass):
    """Cast shards to 8 bits, by the scale of the whole parameter, and gather these.

    After ``reshard-after-forward``, whose gatherings for the backward have the scales of the
    forward; before ``bucket-all-gathers``. The maxima of a block are reduced over its ranks at
    once, and exact arithmetic by which scales are made of them is done for all together. What is
    gathered are bytes, as backends know no float8. What is done to shards is annotated as part of
    gathering, so that a pipeline does it where it gathers, once for all microbatches.

    *Before*::

        w = wait_tensor(all_gather_into_tensor(_to_copy(shard, dtype=bfloat16), 8, "fsdp"))
        scale = reciprocal(max(abs(w))) * 448
        q = _to_copy(clamp(_to_copy(w, dtype=float32) * scale, -448, 448), dtype=float8_e4m3fn)

    *After*::

        s = _to_copy(shard, dtype=bfloat16)
        m = wait_tensor(all_reduce(pack_bucket([max(abs(s)), ...], 1, bfloat16), "max", "fsdp"))
        scale, ... = unpack_bucket(reciprocal(m) * 448, 1, [1, ...])
        c = _to_copy(clamp(_to_copy(s, dtype=float32) * scale, -448, 448), dtype=float8_e4m3fn)
        q = view(wait_tensor(all_gather_into_tensor(view(c, uint8), 8, "fsdp")), float8_e4m3fn)

    *Refuses*: parameters that somebody reads as they are; scales that are not of the largest
    magnitude of all elements, as those of rows, or are made by what rounds inexactly, as ``exp``
    (but powers of two are found by ``log2`` and ``exp2``, for each parameter alone); products in
    another dtype than float32, and other clamps; shards that are padded along another dim than the
    first, or written to; several ways to quantize one parameter.

    *Preserves numerics*: yes. A maximum over ranks is exact, and a cast does to an element what it
    does to it anywhere. Of a parameter with NaN, which makes all of it NaN here, some backends
    reduce the maximum of the numbers, so that its numbers stay what they are.
    """

    name: ClassVar[str] = "quantize-before-gather"
    mesh_axes: ClassVar[frozenset[MeshAxis]] = SHARD_AXES
    runs_on: ClassVar[frozenset[GraphKind]] = frozenset({"STEP", "STAGE"})

    @property
    def bounds(self) -> ChangeBounds:
        """Fewer bytes; scales live until their last reader."""
        return ChangeBounds(collective_bytes_may_shrink=True, peak_memory_growth=None)

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Quantize before gathering; see the class."""
        graph = graph_module.graph
        found = self.find_launches(graph, _ALL_GATHER)
        motion = CodeMotion(graph)
        refusals = list(found.refusals)
        gathers: list[_Gather] = []
        for launch in found.launches:
            if launch.kind != "unshard":
                continue
            reads = find_quantized_reads(launch.wait)
            if isinstance(reads, QuantizedReads):
                reads = _reason_to_stay(launch, reads, motion) or reads
            if isinstance(reads, str):
                refusals.append(Refusal(node_name=launch.launch.name, reason=reads))
            elif reads is not None:
                gathers.append(_Gather(launch=launch, reads=reads))
        nodes = _Nodes(graph)
        scales: dict[Hashable, Node] = {}
        num_buckets = 0
        for members in _blocks(gathers, motion):
            scales |= nodes.scales(members, motion)
            num_buckets += 1
        for gather in gathers:
            nodes.quantize(gather, scales[gather.key])
        counts = {"quantized": len(gathers), "reductions_of_maxima": num_buckets}
        return PassReport.of(counts, refusals)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gather:
    launch: FsdpLaunch
    reads: QuantizedReads

    @property
    def key(self) -> Hashable:
        """Equal for gatherings of one shard whose scale is computed alike."""
        return _expression(self.launch.input), self.launch.options, self.reads.form


def _expression(node: Node) -> Hashable:
    """What a shard is: a parameter, cast."""
    if node.op != "call_function":
        return node
    return form_of(node), tuple(map(_expression, node.all_input_nodes))


def _reason_to_stay(launch: FsdpLaunch, reads: QuantizedReads, motion: CodeMotion) -> str | None:
    """Why a gathering must not be replaced by another that other nodes stand in front of."""
    shard: dict[Node, None] = {}
    pending = [launch.input]
    while pending:
        node = pending.pop()
        if node not in shard and node.op == "call_function":
            shard[node] = None
            pending += node.all_input_nodes
    if any(is_collective(node) for node in shard):
        return "its shard is gathered along another axis before"
    # Other maxima over ranks move with it, as FSDP's own.
    own = [node for node in reads.replaced if not is_collective(node)]
    reasons = map(motion.reason_not_to_move, (*shard, launch.launch, *own))
    return next(filter(None, reasons), None)


def _blocks(gathers: Sequence[_Gather], motion: CodeMotion) -> Iterator[list[_Gather]]:
    """The first gathering of each parameter, those together whose scales are computed at once."""
    first: dict[Hashable, _Gather] = {}
    for gather in gathers:
        first.setdefault(gather.key, gather)
    blocks: dict[Hashable, list[_Gather]] = {}
    for gather in first.values():
        launch = gather.launch
        key = (
            launch.block,
            launch.direction,
            launch.options,
            launch.input_value.dtype,
            motion.section(launch.launch),
            gather.reads.form,
        )
        blocks.setdefault(key, []).append(gather)
    yield from blocks.values()


class _Nodes:
    """Makes the nodes of the pass, with fake values and the metadata of what they stand for."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def scales(self, members: Sequence[_Gather], motion: CodeMotion) -> dict[Hashable, Node]:
        """The scales of parameters, in front of the first gathering, by ``_Gather.key``."""
        first = members[0].launch
        place = first.launch
        for member in members:
            needed = motion.ancestors_after([member.launch.input], place)
            assert not isinstance(needed, str)  # each may be moved, and needs no gathering
            for node in needed:
                place.prepend(node)
        names = tuple(name for each in members for name in each.launch.parameter_names)
        own = fsdp_collective(place)
        assert own is not None  # find_fsdp_launches has read it
        over_shards = FsdpCollectiveAnnotation(
            kind="unshard", parameter_names=names, mesh_axis=own.mesh_axis
        )
        # Which axis other maxima are of, no graph says.
        over_others = FsdpCollectiveAnnotation(kind="unshard", parameter_names=names, mesh_axis="")
        with self._graph.inserting_before(place):
            maxima = [self._local_maximum(member, over_shards) for member in members]
            dtype = first.input_value.dtype
            packed = self._call(PACK_BUCKET, maxima, 1, dtype, like=place, of=over_shards)
            reduced = self._call(
                _functional.all_reduce.default,
                packed,
                "max",
                first.options[-1],
                like=place,
                of=over_shards,
            )
            value = self._call(_functional.wait_tensor.default, reduced, like=place, of=over_shards)
            for node in members[0].reads.together:
                value = self._again(node, {node.all_input_nodes[0]: value}, over_others)
            sizes = [1] * len(members)
            pieces = self._call(UNPACK_BUCKET, value, 1, sizes, like=place, of=over_shards)
            return {
                member.key: self._number(pieces, index, member, over_shards)
                for index, member in enumerate(members)
            }

    def quantize(self, gather: _Gather, scale: Node) -> None:
        """Gather a parameter in 8 bits, in place of its gathering."""
        launch, reads = gather.launch, gather.reads
        operators = reads.reads[0].operators
        own = fsdp_collective(launch.launch)
        with self._graph.inserting_before(launch.launch):
            value = launch.input
            source = operators[0].args[0]
            for node in operators:
                value = self._again(node, {source: value, reads.reads[0].scale: scale}, own)
                source = node
            dtype = _dtype(value)
            like = launch.launch
            value = self._call(_aten.view.dtype, value, torch.uint8, like=like, of=own)
            value = self._call(_ALL_GATHER, value, *launch.options, like=like, of=own)
            value = self._call(_functional.wait_tensor.default, value, like=launch.wait, of=own)
            value = self._call(_aten.view.dtype, value, dtype, like=launch.wait, of=own)
            results = {chain[-1]: scale for chain in reads.scales}
            for read in reads.reads:
                viewed, source = value, launch.wait
                for node in read.views:
                    viewed, source = self._again(node, {source: viewed}), node
                results[read.operators[-1]] = viewed
        replace_uses(self._graph, results)
        for node in reversed((launch.launch, *reads.replaced)):
            self._graph.erase_node(node)

    def _local_maximum(self, member: _Gather, annotation: FsdpCollectiveAnnotation) -> Node:
        maximum = member.reads.scales[0][0]
        (magnitudes,) = maximum.all_input_nodes
        (whole,) = magnitudes.all_input_nodes
        local = self._again(magnitudes, {whole: member.launch.input}, annotation)
        return self._again(maximum, {magnitudes: local}, annotation)

    def _number(
        self, pieces: Node, index: int, member: _Gather, annotation: FsdpCollectiveAnnotation
    ) -> Node:
        like = member.launch.launch
        piece = self._call(operator.getitem, pieces, index, like=like, of=annotation)
        number = self._call(_aten.view.default, piece, [], like=like, of=annotation)
        for node in member.reads.alone:
            number = self._again(node, {node.all_input_nodes[0]: number}, annotation)
        return number

    def _again(
        self,
        node: Node,
        replaced: dict[Any, Node],
        of: FsdpCollectiveAnnotation | None = None,
    ) -> Node:
        """A node that does the same to other arguments."""
        args = map_arg(node.args, lambda each: replaced.get(each, each))
        assert isinstance(args, tuple)
        return self._call(node.target, *args, like=node, of=of, **node.kwargs)

    def _call(
        self,
        target: Callable[..., Any] | str,
        *args: Any,
        like: Node,
        of: FsdpCollectiveAnnotation | None,
        **kwargs: Any,
    ) -> Node:
        assert callable(target)
        node = call_like(like, target, *args, **kwargs)
        copy_annotations(like, node)
        if of is not None:
            write_annotation(node, of)
        return node


def _dtype(node: Node) -> torch.dtype:
    value = value_of(node)
    assert isinstance(value, torch.Tensor)
    return value.dtype
