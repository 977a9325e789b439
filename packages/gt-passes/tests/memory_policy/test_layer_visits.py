"""When a step enters and leaves its layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from gt_config.node_keys import ModuleAnnotation, PhaseAnnotation
from gt_passes.analysis.layer_names import LayerNames
from gt_passes.memory_policy.offload_tagged import LayerVisits
from gt_trace.node_metadata import write_annotation


def nodes(text: str) -> list[Node]:
    """One node a letter pair: the phase (f, l, b, o, or - for none) and the layer (or .)."""
    graph, made = Graph(), []
    phases = {"f": "forward", "l": "loss", "b": "backward", "o": "optimizer"}
    for letter, layer in text.split():
        node = graph.call_function(torch.ops.aten.ones.default, ([2],))
        if letter in phases:
            write_annotation(node, PhaseAnnotation(phase=phases[letter]))
        if layer != ".":
            write_annotation(node, ModuleAnnotation(fqn=f"layers.{layer}.norm"))
        made.append(node)
    return made


def visits(text: str) -> LayerVisits:
    return LayerVisits(nodes(text), LayerNames())


def segments(text: str) -> Sequence[tuple[bool, int, int, list[int]]]:
    return [(s.is_backward, s.start, s.end, s.layer_starts) for s in visits(text).segments]


def test_a_step_goes_forward_and_back():
    assert segments("-. f. f0 f0 f1 l. b. b1 b0 b0 o0") == [
        (False, 1, 6, [2, 4]),
        (True, 6, 10, [7, 8]),
    ]


def test_a_layer_begins_once_however_its_nodes_are_scattered():
    assert segments("f0 f1 b1 b0 b1 b0") == [(False, 0, 2, [0, 1]), (True, 2, 6, [2, 3])]


def test_every_microbatch_has_its_own_visits():
    assert [s[3] for s in segments("f0 f1 b1 b0 f0 f1 b1 b0")] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_layers_are_counted_from_where_one_stands():
    #                   0  1  2  3  4  5  6  7  8
    (forward,) = visits("f. f0 f0 f1 f1 f2 f. l. l.").segments
    starts = [forward.start_of_layer(2, ahead=ahead) for ahead in (-2, -1, 0, 1, 2, 3, 4, 5)]
    # The start of the step; layers 0, 1 and 2; the end of the layers; the end of the segment.
    assert starts == [0, 0, 1, 3, 5, 6, 9, 9]


def test_segments_are_found_by_position():
    found = visits("f0 f1 b1 b0 f0 b0")
    assert [found.segments.index(found.segment_at(at)) for at in range(6)] == [0, 0, 1, 1, 2, 3]
