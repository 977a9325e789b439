"""What a region that Inductor compiled runs: its body, with neighbouring operators fused.

A compiled region is one node of the graph, and its body knows what it does
(``gt_passes.analysis.outlined_region``). Inductor fuses operators that are bound by memory. Here
each run of such operators, uninterrupted in program order by a matrix product, attention or a
collective, is one kernel: it reads once what comes from outside the run, and writes once what is
used outside it, and what it writes into inputs. What reads a number that was reduced over rows is
another kernel, which reads again: the number is known when the first has ended everywhere. A scale
of float8 is such a number (``get_tensor_memory_traffic_ovhd_s`` in torchao's ``roofline_utils``
counts the same kernels).
Complex numbers are not fused, for Inductor generates no code for them
(``unsupported_input_tensor`` in ``torch/_inductor/lowering.py``). Inductor also fuses across such
interruptions where it may reorder, and epilogues into products; neither is modelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from gt_passes._torch_internals import OpOverload
from gt_passes.analysis.aliasing import written_nodes
from gt_passes.analysis.bucket_copies import BUCKET_COPIES
from gt_passes.analysis.node_calls import arguments_of
from gt_passes.simulation.cost_model import CostModel
from gt_passes.simulation.operands import OperandReader
from gt_passes.simulation.work import OpKind, is_view_node

_COPY_INTO = torch.ops.aten.copy_.default
_TRANSPARENT: frozenset[OpKind] = frozenset({"none", "view"})


class FusedKernel(NamedTuple):
    """Operators that run as one kernel, bound by memory."""

    node: Node
    """The last of them."""

    moved_bytes: int


def compiled_kernels(
    body: GraphModule, cost_model: CostModel, reader: OperandReader
) -> Iterator[Node | FusedKernel]:
    """What the body of a region runs, in order: nodes as they are, and fused ones.

    Args:
        body: of a compiled region.
        cost_model: says of each operator what kind it is.
        reader: of the operands of the body's nodes.
    """
    run: list[Node] = []
    for node in body.graph.nodes:
        if node.op != "call_function":
            continue
        cost = cost_model.cost_of_key(cost_model.key(node, reader), node)
        # Inductor calls our own operators, which it does not see into.
        is_call = cost.is_guess or node.target in BUCKET_COPIES
        fuses = cost.kind == "streaming" and not is_call and not _is_complex(node, reader)
        if fuses or (run and cost.kind in _TRANSPARENT):
            run.append(node)
            if cost.kind == "none":  # free, and perhaps an item of a collective's results
                yield node
            continue
        yield from _fused(run, reader)
        run = []
        yield node
    yield from _fused(run, reader)


def _fused(run: list[Node], reader: OperandReader) -> Iterator[FusedKernel]:
    """The kernels of a run of operators: one, and another after each reduction over rows."""
    if not run:
        return
    fused = _Run(run, reader)
    for turn in range(1 + max(fused.turns.values())):
        results = [node for node in fused.written if fused.turns[node] == turn]
        if results:
            yield FusedKernel(node=results[-1], moved_bytes=fused.moved_bytes(results, turn))


class _Run:
    """Operators that are bound by memory, in order, and what they read of one another.

    A view is what it views, and several of one value are one value.
    """

    def __init__(self, run: list[Node], reader: OperandReader) -> None:
        self._reader = reader
        self._read: dict[Node, tuple[Node, ...]] = {}
        self._users: dict[Node, list[Node]] = {}
        self.turns: dict[Node, int] = {}
        """Of each operator, how many kernels come before its own."""

        source: dict[Node, Node] = {}
        for node in run:
            overwritten = node.args[:1] if node.target is _COPY_INTO else ()
            read = dict.fromkeys(
                source.get(each, each) for each in node.all_input_nodes if each not in overwritten
            )
            if is_view_node(node):
                source[node] = next(iter(read))
                continue
            self._read[node] = tuple(read)
            turn = 0
            for each in read:
                self._users.setdefault(each, []).append(node)
                if each in self.turns:
                    is_over_rows = _is_reduction(each) and not self._is_along_rows(each)
                    turn = max(turn, self.turns[each] + is_over_rows)
            self.turns[node] = turn

        def is_used_outside(node: Node) -> bool:
            users = (user for user in node.users if user not in self.turns)
            return any(user not in source or is_used_outside(user) for user in users)

        self._outside = {
            node for node in self.turns if any(written_nodes(node)) or is_used_outside(node)
        }
        self.written = [node for node in self.turns if node in self._outside or _is_reduction(node)]
        """In order. All else is computed anew by each kernel that needs it."""

    def moved_bytes(self, results: Sequence[Node], turn: int) -> int:
        """What the kernel reads and writes whose results these are."""
        written = set(self.written)
        members: set[Node] = set()
        read: dict[Node, None] = {}
        pending = list(results)
        while pending:
            node = pending.pop()
            if node not in self.turns or (node in written and self.turns[node] < turn):
                read[node] = None
            elif node not in members:
                members.add(node)
                pending += self._read[node]
        moved = [*read]
        for node in results:
            users = self._users.get(node, ())
            if node in self._outside or any(user not in members for user in users):
                moved.append(node)
        return sum(operand.num_bytes for node in moved for operand in self._reader.outputs(node))

    def _is_along_rows(self, reduction: Node) -> bool:
        """Whether each row of several is reduced on its own, so that one block reads all of it."""
        num_dims = len(self._reader.inputs(reduction)[0].shape)
        dims = arguments_of(reduction).get("dim")
        dims = [dims] if isinstance(dims, int) else dims
        return num_dims > 1 and dims in ([-1], [num_dims - 1])


def _is_reduction(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.reduction in node.target.tags


def _is_complex(node: Node, reader: OperandReader) -> bool:
    """Whether any of the tensors that an operator reads or writes is of complex numbers."""
    return any(each.dtype.is_complex for each in (*reader.inputs(node), *reader.outputs(node)))
