"""A captured graph as tasks on streams.

Operators run on one compute stream in the graph's order; each process group has a stream of its
own, as torch gives each NCCL communicator one. A collective starts after everything that was issued
to the compute stream before it (its launch records an event there), and a wait makes the compute
stream wait for it. Views cost the host alone. Copies to host memory and back that are waited for
share one stream. A compiled region runs its body, fused (``compiled_region``); a piece that is
replayed as a CUDA graph runs its body for one launch by the host.

Where the host reads a number of a CUDA tensor, it waits for the device. Of a copy in host memory it
does not: a copy has waited. A graph that was captured on a CPU for a run on a GPU says neither.
There numbers of one tensor that are read in a row are assumed to be copied to the host together, as
``tolist`` of such a copy reads them: the first one waits. Another tensor is another copy.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch.fx import GraphModule, Node

from gt_passes._torch_internals import OpOverload, value_of
from gt_passes.analysis.aliasing import written_nodes
from gt_passes.analysis.bucket_copies import BUCKET_COPIES
from gt_passes.analysis.host_copies import is_host_copy
from gt_passes.analysis.node_calls import arguments_of
from gt_passes.analysis.outlined_region import OutlinedRegion, region_inputs, region_of
from gt_passes.cuda_graphs.cuda_graph_replay import ReplayedPiece
from gt_passes.simulation.cost_model import CostModel, OpCost
from gt_passes.simulation.operands import OperandReader
from gt_passes.simulation.timeline import Task, Timeline, schedule
from gt_passes.simulation.work import OpKind, is_view_node

COMPUTE_STREAM = "compute"
COPY_STREAM = "copies to and from the host"

_Launch = Literal["eager", "replay", "replayed"]
"""Launched by the host on its own; the start of a CUDA graph; a part of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRun:
    """A graph on one machine, on paper."""

    timeline: Timeline
    nodes: tuple[Node, ...]
    """The node of each task."""

    graph_nodes: tuple[Node, ...]
    """The same, but of a task inside of a region the node that calls the region."""

    costs: tuple[OpCost, ...]
    """The cost of each task."""


class GraphProgram:
    """The nodes of a graph with what their prices depend on, read once.

    Args:
        graph_module: a captured graph with recorded values. It must not change while this is used.
        cost_model: whose assumptions on sizes hold; any machine can then run the program.
    """

    def __init__(self, graph_module: GraphModule, cost_model: CostModel) -> None:
        self._reader = OperandReader(cost_model.sizes)
        self._steps: list[_Step | _Alias] = []
        self._priced: dict[Hashable, _Priced] = {}
        """By key: keys are deep, so that to look one up for each node and machine is dear."""

        self._read(graph_module, cost_model, "eager")

    def run(self, cost_model: CostModel) -> GraphRun:
        """Price and schedule every node. Linear in their number."""
        lowering = _Lowering()
        costs = [cost_model.cost_of_key(each.key, each.node) for each in self._priced.values()]
        for step in self._steps:
            if isinstance(step, _Alias):
                lowering.alias(step.node, step.stands_for)
            else:
                lowering.add(step.node, step.graph_node, step.cost(cost_model, costs))
        hardware = cost_model.hardware
        replayed = cost_model.host == "cuda_graph"
        timeline = schedule(
            lowering.tasks,
            launch_latency_us=0.0 if replayed else hardware.launch_latency_us,
            sync_us=hardware.host_sync_us,
        )
        return GraphRun(
            timeline=timeline,
            nodes=tuple(lowering.nodes),
            graph_nodes=tuple(lowering.graph_nodes),
            costs=tuple(lowering.costs),
        )

    def _read(
        self,
        graph_module: GraphModule,
        cost_model: CostModel,
        launch: _Launch,
        inside: Node | None = None,
    ) -> None:
        for node in graph_module.graph.nodes:
            region = region_of(node)
            if region is None:
                self._add(node, inside or node, cost_model, launch)
            else:
                self._read_region(node, inside or node, region, cost_model, launch)

    def _read_region(
        self,
        call: Node,
        outermost: Node,
        region: OutlinedRegion,
        cost_model: CostModel,
        launch: _Launch,
    ) -> None:
        placeholders = region.body.graph.find_nodes(op="placeholder")
        self._steps += map(_Alias, placeholders, region_inputs(call))
        if isinstance(region.runner, ReplayedPiece):
            self._steps.append(_Step(call, outermost, None, 0, "replay"))
            self._read(region.body, cost_model, "replayed", outermost)
        else:
            for kernel in compiled_kernels(region.body, cost_model, self._reader):
                self._add(kernel, outermost, cost_model, launch)
        (output,) = region.body.graph.find_nodes(op="output")
        (results,) = output.args
        assert isinstance(results, (tuple, list))  # OutlinedRegion asks for it
        for item in call.users:
            position = item.args[1] if item.target is operator.getitem else None
            result = results[position] if isinstance(position, int) else None
            if isinstance(result, Node):
                self._steps.append(_Alias(item, result))

    def _add(
        self, kernel: Node | FusedKernel, graph_node: Node, cost_model: CostModel, launch: _Launch
    ) -> None:
        if isinstance(kernel, FusedKernel):
            step = _Step(kernel.node, graph_node, None, kernel.moved_bytes, launch)
            self._steps.append(step)
        elif kernel.op == "call_function":
            key = cost_model.key(kernel, self._reader)
            priced = self._priced.setdefault(key, _Priced(key, kernel, len(self._priced)))
            self._steps.append(_Step(kernel, graph_node, priced.number, 0, launch))


class _Alias(NamedTuple):
    """A node that is another one, across the border of a region."""

    node: Node
    stands_for: Node


class _Priced(NamedTuple):
    """All that a price depends on, and the first of the nodes that have it."""

    key: Hashable
    node: Node
    number: int


class _Step(NamedTuple):
    """One kernel, or the start of a CUDA graph."""

    node: Node
    graph_node: Node
    """As in ``GraphRun.graph_nodes``."""

    number: int | None
    """Of its price; None for a fused kernel, whose bytes are its price."""

    moved_bytes: int
    launch: _Launch

    def cost(self, cost_model: CostModel, costs: Sequence[OpCost]) -> OpCost:
        """``costs`` are those of all numbers."""
        if self.launch == "replay":
            return cost_model.replay_launch
        if self.number is None:
            cost = cost_model.memory_bound_cost(self.moved_bytes)
        else:
            cost = costs[self.number]
        return cost_model.replayed(cost) if self.launch == "replayed" else cost


class _Lowering:
    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.nodes: list[Node] = []
        self.graph_nodes: list[Node] = []
        self.costs: list[OpCost] = []
        self._launched: dict[Node, int] = {}
        """From a collective or copy, and what is taken out of its results, to its task."""

        self._last_compute: tuple[int, ...] = ()
        self._last_read: Node | None = None
        """The tensor of which the host read a number, if the compute stream did nothing since."""

        self._copied: set[Node] = set()
        """Copies between the memories of host and device."""

        self._pending_host_us = 0.0

    def alias(self, node: Node, stands_for: Node) -> None:
        """What waits for ``node`` waits for what ``stands_for`` launched, if it launched anything.

        A body serves every call of its region, so what it stood for before is forgotten.
        """
        self._launched.pop(node, None)
        if stands_for in self._launched:
            self._launched[node] = self._launched[stands_for]

    def add(self, node: Node, graph_node: Node, cost: OpCost) -> None:
        """Make the task of a node, if it is one."""
        num_tasks = len(self.tasks)
        self._add(node, cost)
        self.graph_nodes += [graph_node] * (len(self.tasks) - num_tasks)

    def _add(self, node: Node, cost: OpCost) -> None:
        if cost.kind == "none":
            self._pass_on(node)
        elif cost.kind == "view":
            self._pass_on(node)
            self._pending_host_us += cost.host_us
        elif cost.kind == "host_scalar" and self._is_known(_read_tensor(node)):
            self._pending_host_us += cost.host_us
        elif cost.kind == "collective":
            assert cost.collective is not None  # the cost model says so
            stream = f"group {cost.collective.group_name}"
            self._launched[node] = self._append(node, cost, stream, self._last_compute)
        elif cost.kind == "host_copy" and is_host_copy(node):
            self._launched[node] = self._append(node, cost, COPY_STREAM, self._last_compute)
        elif cost.kind == "wait":
            launched = (self._launched.get(argument) for argument in node.all_input_nodes)
            self._compute(node, cost, tuple(task for task in launched if task is not None))
        else:
            self._compute(node, cost, ())

    def _is_known(self, tensor: Node) -> bool:
        """Whether the host has the numbers of a tensor, and waits for nothing to read one."""
        value = value_of(tensor)
        assert isinstance(value, torch.Tensor)  # a number was read of it
        is_read = tensor in self._copied or tensor is self._last_read
        return value.device.type == "cpu" and is_read

    def _compute(self, node: Node, cost: OpCost, waits_for: tuple[int, ...]) -> None:
        self._last_compute = (self._append(node, cost, COMPUTE_STREAM, waits_for),)
        self._last_read = _read_tensor(node) if cost.kind == "host_scalar" else None
        if cost.kind == "host_copy":
            self._copied.add(node)

    def _append(self, node: Node, cost: OpCost, stream: str, waits_for: tuple[int, ...]) -> int:
        self.tasks.append(
            Task(
                name=node.name,
                stream=stream,
                duration_us=cost.duration_us,
                waits_for=waits_for,
                host_us=self._pending_host_us + cost.host_us,
                blocks_host=cost.blocks_host,
                needs=cost.needs,
                takes=cost.takes,
            )
        )
        self.nodes.append(node)
        self.costs.append(cost)
        self._pending_host_us = 0.0
        return len(self.tasks) - 1

    def _pass_on(self, node: Node) -> None:
        """Items of a collective's results, and views of them, are still what it writes."""
        for argument in node.all_input_nodes:
            if argument in self._launched:
                self._launched[node] = self._launched[argument]


def _read_tensor(node: Node) -> Node:
    """The tensor of which a node reads a number on the host, whatever it was viewed as for that."""
    (tensor,) = node.all_input_nodes
    while is_view_node(tensor):
        (viewed, *_) = tensor.all_input_nodes
        if tensor.target is operator.getitem and not is_view_node(viewed):
            break  # one of several results, which are tensors of their own
        tensor = viewed
    return tensor


# What a region that Inductor compiled runs: its body, with neighbouring operators fused.
#
# A compiled region is one node of the graph, and its body knows what it does
# (``gt_passes.analysis.outlined_region``). Inductor fuses operators that are bound by memory.
# Here each run of such operators, uninterrupted in program order by a matrix product, attention
# or a collective, is one kernel: it reads once what comes from outside the run, and writes once
# what is used outside it, and what it writes into inputs. What reads a number that was reduced
# over rows is another kernel, which reads again: the number is known when the first has ended
# everywhere. A scale of float8 is such a number (``get_tensor_memory_traffic_ovhd_s`` in
# torchao's ``roofline_utils`` counts the same kernels). Complex numbers are not fused, for
# Inductor generates no code for them (``unsupported_input_tensor`` in
# ``torch/_inductor/lowering.py``). Inductor also fuses across such interruptions where it may
# reorder, and epilogues into products; neither is modelled.
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
