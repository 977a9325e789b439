"""The verifier: reads off a graph whether it can still be right.

It checks that the graph is well-formed SSA in execution order, that its inputs and outputs are
those of the capture, that fake re-propagation gives every recorded shape, stride, dtype and device,
that no two nodes find out the same size, that nothing is written where elements share memory, that
every collective is waited for once and read only then, and that nothing races with a collective in
flight. What needs the graph before a pass is in ``verification_session``, what needs the graphs of
other ranks in ``collective_order``.

XLA verifies around its passes even in release builds, and MLIR after every pass, for the reason
that stands here too: a pass that breaks a graph is found at that pass, not in a loss curve.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from gt_passes._torch_internals import (
    OpOverload,
    fake_mode_of,
    fast_tensor_attributes,
    pytree,
    value_of,
)
from gt_passes.analysis.aliasing import written_nodes
from gt_passes.analysis.call_form import SYMBOLIC
from gt_passes.analysis.graph_scan import GraphScan, GraphScanner
from gt_passes.analysis.node_calls import attribute_of
from gt_passes.analysis.symbol_bindings import symbols_bound_by, symbols_of
from gt_passes.analysis.tensor_signature import describe, signature
from gt_passes.contract import PassContext
from gt_passes.graph_problem import GraphProblem
from gt_passes.verifier.collective_races import find_race_problems
from gt_passes.verifier.collective_waits import find_wait_problems
from gt_passes.verifier.memory_order import MemoryOrder
from gt_passes.verifier.repropagation import Repropagator, UnverifiedNode
from gt_trace.code_text import code_problem, shadowed_parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationReport:
    """What the verifier found, as data."""

    problems: tuple[GraphProblem, ...]
    """Empty when nothing is wrong."""

    unverified: tuple[UnverifiedNode, ...]
    """Nodes about which re-propagation says nothing, because their operator cannot be run on fake
    values. Not an error, and never silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInterface:
    """What a graph takes and gives. Passes leave it alone: the caller binds by position."""

    placeholders: tuple[tuple[str, Hashable], ...]
    """Target and signature of each input."""

    outputs: tuple[Hashable, ...]
    """Signature of each output."""

    @classmethod
    def of(cls, graph_module: GraphModule) -> GraphInterface:
        """The interface of a graph as it is now."""
        find_nodes = graph_module.graph.find_nodes
        results: list[Node] = []
        for node in find_nodes(op="output"):
            map_arg(node.args, results.append)  # every occurrence, unlike all_input_nodes
        with fast_tensor_attributes():
            return cls(
                placeholders=tuple(
                    (str(node.target), signature(value_of(node)))
                    for node in find_nodes(op="placeholder")
                ),
                outputs=tuple(signature(value_of(result)) for result in results),
            )

    def find_differences(self, now: GraphInterface) -> Iterator[GraphProblem]:
        """Yield a problem for each way in which ``now`` is not this interface."""
        yield from _sequence_differences("input", self.placeholders, now.placeholders)
        yield from _sequence_differences("output", self.outputs, now.outputs)


@dataclass(slots=True)
class Verifier:
    """Verifies graphs, and remembers what operators answer from one to the next.

    ::

        report = Verifier().verify(graph_module)
        assert not report.problems, report.problems
    """

    _repropagator: Repropagator = field(default_factory=Repropagator)
    _scanner: GraphScanner = field(default_factory=GraphScanner)

    def scan(self, graph_module: GraphModule, *, before: GraphScan | None = None) -> GraphScan:
        """The graph as it is now, for ``find_new_problems``; see ``GraphScanner.scan``."""
        return self._scanner.scan(graph_module, before=before)

    def verify(
        self,
        graph_module: GraphModule,
        *,
        interface: GraphInterface | None = None,
        tolerated_waits: Collection[Node] = (),
        scan: GraphScan | None = None,
    ) -> VerificationReport:
        """Check a graph completely; changes nothing.

        Args:
            graph_module: with fake values in ``node.meta["val"]``.
            interface: what the graph must take and give; None to accept what it does.
            tolerated_waits: waits that may be one too many, because the captured program has them.
            scan: of the graph as it is now, if there is one already.

        Raises:
            GraphInputError: the graph has no fake values at all.
        """
        fake_mode = PassContext.from_graph(graph_module).fake_mode
        if scan is None:
            scan = self.scan(graph_module)
        problems = list(_structure_problems(scan))
        is_well_formed = not problems
        if interface is not None:
            problems += interface.find_differences(GraphInterface.of(graph_module))
        problems += self._repropagator.find_problems(scan, fake_mode)
        problems += find_symbol_problems(scan.position)
        problems += find_wait_problems(scan, tolerated=tolerated_waits)
        problems += find_refused_write_problems(scan.writers)
        if is_well_formed:
            problems += find_race_problems(MemoryOrder.of(scan))
        return VerificationReport(
            problems=tuple(problems), unverified=tuple(self._repropagator.unverified)
        )

    def find_new_problems(
        self,
        before: GraphScan,
        after: GraphScan,
        *,
        interface: GraphInterface,
        tolerated_waits: Collection[Node] = (),
    ) -> tuple[GraphProblem, ...]:
        """Check what changed in a graph that was right before, and what that reaches.

        Args:
            before: scan of the graph when it was last verified.
            after: scan of the graph now, made with ``before``.
            interface: what the graph must take and give.
            tolerated_waits: as for ``verify``.
        """
        graph_module = after.graph_module
        fake_mode = fake_mode_of(graph_module.graph)
        changed = after.changed_nodes(before)
        problems = list(_raw_size_problems(changed, after))
        if fake_mode is None or not _is_well_formed(before, after, changed):
            problems += self.verify(
                graph_module, interface=interface, tolerated_waits=tolerated_waits, scan=after
            ).problems
            return tuple(problems)
        reached = dict.fromkeys(changed)
        for node in changed:
            reached.update(dict.fromkeys(node.users))
            # What nobody read had to have no value.
            unread = (each for each in node.all_input_nodes if value_of(each) is None)
            reached.update(dict.fromkeys(unread))
        if _touches_interface(before, after, reached):
            problems += interface.find_differences(GraphInterface.of(graph_module))
        problems += self._repropagator.find_problems(after, fake_mode, only=reached)
        if any(map(symbols_bound_by, changed)):
            problems += find_symbol_problems(after.position)
        problems += find_wait_problems(after, tolerated=tolerated_waits)
        problems += find_refused_write_problems(n for n in after.writers if n in reached)
        return tuple(problems)


def _raw_size_problems(nodes: Iterable[Node], scan: GraphScan) -> Iterator[GraphProblem]:
    """Yield a problem for each symbolic size among arguments that stands there without a node."""
    for node in nodes:
        call = scan.calls[node]
        if call.split()[0].is_exact:
            continue
        leaves = pytree.tree_leaves((call.args, call.kwargs))
        sizes = dict.fromkeys(str(leaf) for leaf in leaves if isinstance(leaf, SYMBOLIC))
        if sizes:
            yield GraphProblem(
                check="well-formed",
                node_name=node.name,
                target=str(node.target),
                message=f"the size {', '.join(sizes)} among its arguments is of no node",
                expected="a node, as of aten.sym_size.int(tensor, dim)",
            )


def _is_well_formed(before: GraphScan, after: GraphScan, changed: Sequence[Node]) -> bool:
    """Whether a changed graph is surely well-formed; where not, the whole of it is looked at."""
    position = after.position
    if next(reversed(position)).op != "output":
        return False
    for node in changed:
        if node.op not in ("call_function", "output"):
            return False
        if node.op == "output" and position[node] != len(position) - 1:
            return False
        if code_problem(node) is not None:
            return False
    if not after.is_reordered(before):
        return _are_after_operands(changed, after)
    placeholders = after.graph_module.graph.find_nodes(op="placeholder")
    num_placeholders = before.num_placeholders
    return all(position[node] < num_placeholders for node in placeholders) and _are_after_operands(
        position, after
    )


def _are_after_operands(nodes: Iterable[Node], scan: GraphScan) -> bool:
    """Whether nodes of a graph stand behind all that they read."""
    position, calls = scan.position, scan.calls
    for node in nodes:
        index = position[node]
        for operand in calls[node].split()[1]:
            if position.get(operand, index) >= index:
                return False
    return True


def _touches_interface(before: GraphScan, after: GraphScan, reached: Collection[Node]) -> bool:
    """Whether inputs or outputs may not be what they were; ``reached`` changed, or reads that."""
    placeholders = itertools.islice(after.position, before.num_placeholders + 1)
    old_placeholders = itertools.islice(before.position, before.num_placeholders + 1)
    same_inputs = all(
        node is old or (node.op != "placeholder" and old.op != "placeholder")
        for node, old in zip(placeholders, old_placeholders, strict=False)
    )
    return not same_inputs or any(node.op in ("placeholder", "output") for node in reached)


def _is_surely_sound(scan: GraphScan) -> bool:
    """Whether there surely is no problem of structure: ``Graph.lint`` takes three times as long."""
    graph, position = scan.graph_module.graph, scan.position
    find_nodes = graph.find_nodes
    if scan.num_placeholders != len(find_nodes(op="placeholder", sort=False)):
        return False
    if find_nodes(op="output", sort=False) != [next(reversed(position), None)]:
        return False
    names = {node.name for node in position}
    for node in position:
        if node.op not in _SOUND_OPS or node.graph is not graph or code_problem(node):
            return False
        if node.op == "get_attr" and attribute_of(scan.graph_module, node) is None:
            return False
    if len(names) != len(position) or shadowed_parameter(position):
        return False
    return _are_after_operands(position, scan)


_SOUND_OPS = frozenset({"placeholder", "call_function", "get_attr", "output"})


def _structure_problems(scan: GraphScan) -> Iterator[GraphProblem]:
    """SSA in execution order, as ``Graph.lint`` sees it, and inputs first and one output last."""
    if _is_surely_sound(scan):
        return
    graph_module = scan.graph_module
    try:
        graph_module.graph.lint()
    except (RuntimeError, ValueError, AttributeError, AssertionError) as error:
        # lint prints the whole graph after its first line.
        yield GraphProblem(check="well-formed", message=str(error).split("\n", 1)[0])
    nodes = list(graph_module.graph.nodes)
    for node in nodes:
        if problem := code_problem(node):
            yield GraphProblem(check="well-formed", node_name=node.name, message=problem)
    if problem := shadowed_parameter(nodes):
        yield GraphProblem(check="well-formed", message=problem)
    outputs = [node for node in nodes if node.op == "output"]
    if len(outputs) != 1 or nodes[-1] is not outputs[0]:
        yield GraphProblem(
            check="well-formed",
            message="a graph ends with its one output",
            expected="1 output node, the last",
            got=f"{len(outputs)} output nodes, and {nodes[-1].op if nodes else 'nothing'} last",
        )
    seen_computation: Node | None = None
    for node in nodes:
        if node.op != "placeholder":
            seen_computation = seen_computation or node
        elif seen_computation is not None:
            yield GraphProblem(
                check="well-formed",
                node_name=node.name,
                message=f"this placeholder stands after {seen_computation.name}",
                expected="all placeholders first",
            )


def _sequence_differences(
    kind: str, before: tuple[Hashable, ...], now: tuple[Hashable, ...]
) -> Iterator[GraphProblem]:
    if len(before) != len(now):
        yield GraphProblem(
            check="inputs and outputs",
            message=f"the number of {kind}s changed",
            expected=str(len(before)),
            got=str(len(now)),
        )
        return
    for position, (old, new) in enumerate(zip(before, now, strict=True)):
        if old != new:
            yield GraphProblem(
                check="inputs and outputs",
                message=f"{kind} {position} changed",
                expected=describe(old),
                got=describe(new),
            )


# Every data-dependent size is found out by one node.
def find_symbol_problems(nodes: Iterable[Node]) -> Iterator[GraphProblem]:
    """Yield a problem for each symbol that a node binds and that was bound before.

    Args:
        nodes: all of a graph, in its order.
    """
    bound: dict[Any, Node] = {}
    for node in nodes:
        if node.op == "placeholder":
            bound.update(dict.fromkeys(symbols_of(value_of(node)), node))
            continue
        for symbol in symbols_bound_by(node):
            if symbol in bound:
                yield GraphProblem(
                    check="fake re-propagation",
                    node_name=node.name,
                    target=str(node.target),
                    message=f"it says that its result is {symbol}, as {bound[symbol]} does: a "
                    "compiler would take both for one number",
                )
            bound[symbol] = node


# Nothing is written that only a kernel would refuse, when the step runs.
#
# Fake values take writes to an expanded tensor, of which several elements are one, and of ATen's
# elementwise operators those whose result the written tensor cannot hold, as a fraction in whole
# numbers. Of what else only kernels refuse (lists of tensors, as ``_foreach_mul_`` writes them,
# ``index_add_``, ``addmm_``) nothing is known here.
_CHECK: Final = "refused writes"

_TAKE_IT = frozenset(
    {
        *("aten::fill_", "aten::zero_", "aten::masked_fill_", "aten::index_fill_"),
        *("aten::index_put_", "aten::_index_put_impl_", "aten::tril_", "aten::triu_"),
    }
)
"""Operators whose kernels write to an expanded tensor, by running them on a CPU."""


def find_refused_write_problems(writers: Iterable[Node]) -> Iterator[GraphProblem]:
    """Yield a problem for each write to an expanded tensor, or of what a tensor cannot hold.

    Args:
        writers: nodes that write to memory.
    """
    for writer in writers:
        yield from _dtype_problems(writer)
        if _takes_expanded(writer):
            continue
        for written in written_nodes(writer):
            value = value_of(written)
            if isinstance(value, torch.Tensor) and _is_expanded(value):
                yield GraphProblem(
                    check=_CHECK,
                    node_name=writer.name,
                    target=str(writer.target),
                    message=f"it writes to {written.name}, of which elements share memory",
                    expected="a tensor whose elements each have memory of their own",
                    got=describe(signature(value)),
                )


def _dtype_problems(writer: Node) -> Iterator[GraphProblem]:
    pure = _without_write(writer.target)
    if pure is None or any(value_of(each) is None for each in writer.all_input_nodes):
        return
    args, kwargs = cast("Any", map_aggregate((writer.args, writer.kwargs), _small))
    result: torch.dtype | None = None
    refusal = ""
    try:
        result = pure(*args, **kwargs).dtype
    except RuntimeError as error:
        refusal = str(error).splitlines()[0]
    except Exception:  # noqa: BLE001 - promotion fails on rare types: nothing is known of these
        return
    for written in written_nodes(writer):
        value = cast("torch.Tensor", value_of(written))  # or the operator refused it
        if result is not None and torch.can_cast(result, value.dtype):
            continue
        yield GraphProblem(
            check=_CHECK,
            node_name=writer.name,
            target=str(writer.target),
            message=f"its operator refuses to write to {written.name}: {refusal}"
            if result is None
            else f"it writes {result} to {written.name}, which cannot hold it",
            expected=None if result is None else f"a tensor to which {result} is converted",
            got=describe(signature(value)),
        )


@functools.cache
def _without_write(target: object) -> Callable[..., Any] | None:
    """The operator that gives what an elementwise one of ATen would write; None of any other.

    Those of others may carry the tag and say nothing of types: their fakes may look at sizes.
    """
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags:
        return None
    namespace, _, name = target._schema.name.partition("::")
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if namespace != "aten" or packet is None or not name.endswith("_"):
        return None
    # Names of overloads differ: `pow_.Scalar` is `pow.Tensor_Scalar`.
    overloads: list[OpOverload] = [getattr(packet, each) for each in packet.overloads()]
    return next((each for each in overloads if _takes(each) == _takes(target)), None)


def _takes(operator: OpOverload) -> list[tuple[str, str]]:
    return [(each.name, str(each.type)) for each in operator._schema.arguments]


def _small(argument: Any) -> Any:
    """As many dimensions, of one element each: what decides the type of a result."""
    value = value_of(argument) if isinstance(argument, Node) else argument
    if isinstance(value, torch.Tensor):
        return torch.empty((1,) * value.dim(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return {torch.SymInt: 1, torch.SymFloat: 1.0, torch.SymBool: True}[type(value)]
    return value


def _takes_expanded(writer: Node) -> bool:
    if not isinstance(writer.target, OpOverload):
        return False
    changes_metadata_alone = torch.Tag.inplace_view in writer.target.tags
    return changes_metadata_alone or writer.target._schema.name in _TAKE_IT


def _is_expanded(value: torch.Tensor) -> bool:
    """Whether a dimension of more than one has stride 0. Of symbols nothing is known."""
    if value.layout is not torch.strided:
        return False
    return any(
        type(size) is int and type(stride) is int and size > 1 and stride == 0
        for size, stride in zip(value.shape, value.stride(), strict=True)
    )
