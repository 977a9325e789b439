"""Writes to memory that several actions or microbatches share, and which of them order would break.

Eager training runs the forward and backward of one microbatch before the next; a pipeline does not.
A forward that updates a buffer is fine, since forwards keep their order. What else is written and
shared is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch.fx import GraphModule, Node

from gt_config.node_keys import PipelineAction
from gt_passes.analysis.collectives import is_wait
from gt_passes.analysis.graph_scan import GraphScanner
from gt_passes.analysis.operator_effects import is_only_a_view
from gt_passes.analysis.written_memory import Memory, memories_written
from gt_pipeline.graph.action_parts import PARTS
from gt_pipeline.graph.slots import Slot


def find_state_problems(
    graph_module: GraphModule,
    *,
    slots: Mapping[Node, Slot],
    parts: Mapping[Node, PipelineAction],
    outputs: Collection[Node],
) -> Iterator[str]:
    """Yield a sentence for each write of a joint graph that a pipeline cannot keep in order.

    ``slots`` are of its placeholders, ``parts`` of all other nodes; ``outputs`` leave the stage in
    its forward.
    """
    for memory in memories_written(GraphScanner().scan(graph_module)):
        yield from _problems(memory, slots, parts, outputs)


def _problems(
    memory: Memory,
    slots: Mapping[Node, Slot],
    parts: Mapping[Node, PipelineAction],
    outputs: Collection[Node],
) -> Iterator[str]:
    writers = [writer for writer in memory.writers if not is_wait(writer)]
    if not writers:
        return
    where = f"{writers[0].name} ({writers[0].target})"
    given = [slots[member] for member in memory.members if member in slots]
    for slot in given:
        if slot.kind in ("argument", "output_gradient"):
            yield f"{where} writes to {slot}, which belongs to another stage: write to a copy"
        elif slot.kind == "parameter":
            yield f"{where} writes to {slot}, which all microbatches read: write to a copy"
    unsharded = any(parts.get(member) == "UNSHARD" for member in memory.members)
    if unsharded and any(parts[writer] != "UNSHARD" for writer in writers):
        yield f"{where} writes to a gathered parameter, which all microbatches read"
    backward = [writer for writer in writers if parts[writer] not in ("UNSHARD", "FORWARD")]
    if not backward:
        return
    where = f"{backward[0].name} ({backward[0].target})"
    if any(member in outputs for member in memory.members):
        yield f"{where} writes in the backward to what the forward gave to the stage after"
    touching = {
        parts[node]
        for member in memory.members
        for node in (member, *member.users)
        if node in parts and not is_only_a_view(node)
    }
    if len(touching) > 1:
        yield from (
            f"{where} writes to {slot} in the backward, and {_named(touching)} touch it too: the "
            "order of microbatches would decide what they find"
            for slot in given
            if slot.kind == "buffer"
        )


def _named(parts: Collection[PipelineAction]) -> str:
    return ", ".join(sorted(parts, key=PARTS.index))
