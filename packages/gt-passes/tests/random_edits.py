"""Edits of a graph by somebody who knows nothing of what a verifier looks at.

An edit takes a node at random and changes something about it that Python lets one change: what it
reads, a number, the operator, where it stands, who reads it. Whether that is a bug is not known
here: it may compute the same in another way. What is recorded of the values is made again as a pass
does that records what it computes, so that an edit is not found for what it wrote down.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node

from gt_passes.analysis.node_calls import evaluate
from gt_passes.analysis.tensor_signature import is_symbolic, signature

aten = torch.ops.aten

_EXCHANGED: tuple[tuple[Any, ...], ...] = (
    (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default),
    (aten.cos.default, aten.sin.default, aten.neg.default, aten.rsqrt.default, aten.exp.default),
    (aten.silu.default, aten.relu.default, aten.sigmoid.default, aten.clone.default),
    (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default),
    (aten.mm.default, aten.bmm.default),
)
"""Operators that take the same arguments."""


class UnfitEditError(Exception):
    """An edit that leaves no graph: an operator does not take what it is given."""


def edit_at_random(
    graph_module: GraphModule, draw: random.Random, *, edits_memory: bool = False
) -> str:
    """Change a graph, and say what was done to which node.

    Raises:
        UnfitEditError: What was chosen cannot be done, or operators refuse what they get.
    """
    graph = graph_module.graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    edit = draw.choice(_EDITS)
    if edits_memory and draw.random() < 0.3:
        edit = draw.choice(_EDITS_OF_MEMORY)
    node = draw.choice(calls)
    what = f"{edit.__name__.strip('_').replace('_', ' ')} {node.name}"
    before = _forms(graph)
    try:
        detail = edit(graph, node, draw)
        graph.lint()
        _record_again(graph, before)
    except UnfitEditError:
        raise
    except Exception as error:  # noqa: BLE001  # operators raise anything
        raise UnfitEditError(f"{what}: {error}") from None
    graph_module.recompile()
    return f"{what}{detail and f' ({detail})'}"


def _read_another(graph: Graph, node: Node, draw: random.Random) -> str:
    index, old = _some_argument(node, draw)
    other = draw.choice(_alike(old, _before(graph, node), draw))
    node.update_arg(index, other)
    return f"argument {index}: {other} for {old}"


def _change_number(graph: Graph, node: Node, draw: random.Random) -> str:
    numbers = [
        (index, each) for index, each in enumerate(node.args) if isinstance(each, (int, float))
    ]
    lists = [
        (index, each)
        for index, each in enumerate(node.args)
        if isinstance(each, (list, tuple)) and any(isinstance(item, int) for item in each)
    ]
    if not numbers and not lists:
        raise UnfitEditError("no number")
    index, old = draw.choice([*numbers, *lists])
    new: Any
    if isinstance(old, (list, tuple)):
        new = list(old)
        new[draw.randrange(len(new))] = draw.choice([0, 1, -1, 2])
        draw.shuffle(new)
    elif isinstance(old, bool):
        new = not old
    elif isinstance(old, int):
        new = old + draw.choice([-1, 1, 2])
    else:
        new = draw.choice([-old, old * 1.5, 0.0, old + 1e-6])
    node.update_arg(index, new)
    return f"argument {index}: {new} for {old}"


def _change_keyword(graph: Graph, node: Node, draw: random.Random) -> str:
    if not node.kwargs:
        raise UnfitEditError("no keyword argument")
    name = draw.choice(sorted(node.kwargs))
    old = node.kwargs[name]
    kwargs = dict(node.kwargs)
    if isinstance(old, bool):
        kwargs[name] = not old
    elif isinstance(old, torch.dtype):
        kwargs[name] = draw.choice([torch.float32, torch.bfloat16, torch.float64, torch.int64])
    else:
        del kwargs[name]
    node.kwargs = kwargs
    return f"{name}: {kwargs.get(name, 'left out')} for {old}"


def _change_text(graph: Graph, node: Node, draw: random.Random) -> str:
    """Another group, or another reduction."""
    indices = [index for index, each in enumerate(node.args) if isinstance(each, str)]
    if not indices:
        raise UnfitEditError("no text")
    index = draw.choice(indices)
    old = node.args[index]
    texts = {
        argument
        for each in graph.nodes
        for argument in each.args
        if isinstance(argument, str) and argument != old
    }
    new = draw.choice(sorted({*texts, "sum", "avg", "max"} - {old}))
    node.update_arg(index, new)
    return f"argument {index}: {new} for {old}"


def _call_another(graph: Graph, node: Node, draw: random.Random) -> str:
    fitting = [each for each in _EXCHANGED if node.target in each]
    if not fitting:
        targets = {
            each.target: None
            for each in graph.nodes
            if each.op == "call_function"
            and len(each.args) == len(node.args)
            and isinstance(each.target, OpOverload)
        }
        fitting = [tuple(targets)]
    others = [each for each in draw.choice(fitting) if each is not node.target]
    if not others:
        raise UnfitEditError("no other operator")
    old, node.target = node.target, draw.choice(others)
    return f"{node.target} for {old}"


def _leave_out(graph: Graph, node: Node, draw: random.Random) -> str:
    _, by = _some_argument(node, draw)
    node.replace_all_uses_with(by)
    graph.erase_node(node)
    return f"its readers read {by}"


def _move(graph: Graph, node: Node, draw: random.Random) -> str:
    nodes = list(graph.nodes)
    place = {each: index for index, each in enumerate(nodes)}
    first = max((place[each] for each in node.all_input_nodes), default=0)
    last = min((place[each] for each in node.users), default=len(nodes) - 1)
    inputs = [index for index, each in enumerate(nodes) if each.op in ("placeholder", "get_attr")]
    first = max([first, *inputs])
    targets = [each for each in nodes[first + 1 : last + 1] if each is not node]
    if not targets:
        raise UnfitEditError("nowhere to go")
    target = draw.choice(targets)
    target.prepend(node)
    return f"before {target}"


def _swap_neighbours(graph: Graph, node: Node, draw: random.Random) -> str:
    after = node.next
    if after.op != "call_function" or node in after.all_input_nodes:
        raise UnfitEditError("it reads the one before it")
    after.append(node)
    return f"with {after}"


def _swap_operands(graph: Graph, node: Node, draw: random.Random) -> str:
    indices = [index for index, each in enumerate(node.args) if isinstance(each, Node)]
    if len(indices) < 2:
        raise UnfitEditError("one operand")
    first, second = draw.sample(indices, 2)
    args = list(node.args)
    args[first], args[second] = args[second], args[first]
    node.args = tuple(args)
    return f"arguments {first} and {second}"


def _compute_twice(graph: Graph, node: Node, draw: random.Random) -> str:
    users = list(node.users)
    if not users:
        raise UnfitEditError("nobody reads it")
    with graph.inserting_after(node):
        copy = graph.node_copy(node)
    user = draw.choice(users)
    user.replace_input_with(node, copy)
    return f"for {user}"


def _exchange_readers(graph: Graph, node: Node, draw: random.Random) -> str:
    others = _alike(node, _before(graph, node), draw)
    other = draw.choice(others)
    users, theirs = list(node.users), [each for each in other.users if each > node]
    for user in users:
        user.replace_input_with(node, other)
    for user in theirs:
        if user is not node:
            user.replace_input_with(other, node)
    return f"with {other}"


def _read_through(graph: Graph, node: Node, draw: random.Random) -> str:
    """Put an operator between a node and one of those that read it."""
    users = list(node.users)
    value = node.meta.get("val")
    if not users or not isinstance(value, torch.Tensor):
        raise UnfitEditError("no tensor that somebody reads")
    made: list[tuple[Any, tuple[Any, ...]]] = [
        (aten.clone.default, ()),
        (aten.neg.default, ()),
        (aten.mul.Tensor, (draw.choice([1.0, 1.0000001, -1.0, 2.0]),)),
        (aten.add.Tensor, (draw.choice([0.0, 1e-7, 1.0]),)),
        (aten.alias.default, ()),
        (aten.detach.default, ()),
        (aten.view.default, (list(value.shape),)),
        (aten.flip.default, ([0],)),
        (aten.roll.default, ([1], [0])),
        (aten.contiguous.default, ()),
    ]
    target, more = draw.choice(made)
    with graph.inserting_after(node):
        between = graph.call_function(target, (node, *more))
    between.meta.update({key: item for key, item in node.meta.items() if key != "val"})
    user = draw.choice(users)
    user.replace_input_with(node, between)
    return f"{target}{more} for {user}"


def _write_into(graph: Graph, node: Node, draw: random.Random) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise UnfitEditError("no tensor")
    target, more = draw.choice([(aten.mul_.Tensor, (1.5,)), (aten.add_.Tensor, (1.0,))])
    place = draw.choice(list(graph.nodes)[list(graph.nodes).index(node) + 1 :])
    with graph.inserting_before(place):
        graph.call_function(target, (node, *more))
    return f"{target} before {place}"


def _write_through_a_view(graph: Graph, node: Node, draw: random.Random) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        raise UnfitEditError("no matrix")
    target, more = draw.choice(
        [
            (aten.diagonal.default, ()),
            (aten.diagonal.default, (1,)),
            (aten.select.int, (0, 1)),
            (aten.transpose.int, (0, 1)),
            (aten.unfold.default, (0, 2, 2)),
            (aten.narrow.default, (0, -2, 1)),
        ]
    )
    place = draw.choice(list(graph.nodes)[list(graph.nodes).index(node) + 1 :])
    with graph.inserting_before(place):
        view = graph.call_function(target, (node, *more))
        graph.call_function(aten.mul_.Tensor, (view, draw.choice([1.0, 1.5])))
    return f"{target}{more} before {place}"


def _edit_constant(graph: Graph, node: Node, draw: random.Random) -> str:
    """Change one element of a constant, in a way that PyTorch counts or not."""
    constant = draw.choice(_constants(graph))
    value = getattr(graph.owning_module, str(constant.target))
    how = draw.choice(["data", "numpy", "storage", "in place", "replaced"])
    index = draw.randrange(value.numel())
    if how == "data":
        value.data.view(-1)[index] += 1.0
    elif how == "numpy":
        value.numpy().reshape(-1)[index] += 1.0
    elif how == "storage":
        value.untyped_storage().byteswap(value.dtype)
    elif how == "in place":
        value.view(-1)[index].mul_(2.0)
    else:
        setattr(graph.owning_module, str(constant.target), value.clone())
    return f"{constant}: {how}, at {index}"


def _read_constant_again(graph: Graph, node: Node, draw: random.Random) -> str:
    constant = draw.choice(_constants(graph))
    user = draw.choice(list(constant.users))
    other = draw.choice(_constants(graph))
    with graph.inserting_before(draw.choice([user, constant])):
        again = graph.get_attr(str(draw.choice([constant, constant, other]).target))
    again.meta["val"] = constant.meta["val"]
    user.replace_input_with(constant, again)
    return f"{again.target} for {constant} in {user}"


def _constants(graph: Graph) -> list[Node]:
    found = [
        node
        for node in graph.find_nodes(op="get_attr")
        if node.users
        and isinstance(getattr(graph.owning_module, str(node.target), None), torch.Tensor)
    ]
    if not found:
        raise UnfitEditError("no constant")
    return found


_EDITS: tuple[Callable[[Graph, Node, random.Random], str], ...] = (
    _read_another,
    _read_another,
    _change_number,
    _change_number,
    _change_keyword,
    _change_text,
    _call_another,
    _leave_out,
    _move,
    _move,
    _swap_neighbours,
    _swap_operands,
    _compute_twice,
    _exchange_readers,
    _read_through,
    _write_into,
)

_EDITS_OF_MEMORY = (_write_through_a_view, _edit_constant, _read_constant_again)
"""Edits that few steps have a place for."""


def _before(graph: Graph, node: Node) -> list[Node]:
    nodes = list(graph.nodes)
    return nodes[: nodes.index(node)]


def _some_argument(node: Node, draw: random.Random) -> tuple[int, Node]:
    arguments = [(index, each) for index, each in enumerate(node.args) if isinstance(each, Node)]
    if not arguments:
        raise UnfitEditError("it reads nothing")
    return draw.choice(arguments)


def _alike(node: Node, among: Sequence[Node], draw: random.Random) -> list[Node]:
    """Other nodes, mostly such as have the same shape and type."""
    value = node.meta.get("val")
    others = [each for each in among if each is not node and each.op != "get_attr"]
    if draw.random() < 0.8:
        others = [each for each in others if _kind(each.meta.get("val")) == _kind(value)]
    if not others:
        raise UnfitEditError("no other node")
    return others


def _kind(value: Any) -> Any:
    """Shape and type, as far as data does not decide them."""
    signed = signature(value)
    if not isinstance(value, torch.Tensor) or is_symbolic(signed):
        return signed
    return value.dtype, tuple(value.shape)


def _forms(graph: Graph) -> dict[Node, tuple[Any, ...]]:
    return {each: (each.target, each.args, each.kwargs) for each in graph.nodes}


def _record_again(graph: Graph, before: dict[Node, tuple[Any, ...]]) -> None:
    """Make recorded values again of what an edit changed, and of what reads other values by it."""
    changed: set[Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or is_symbolic(signature(node.meta.get("val"))):
            continue
        is_stale = before.get(node) != (node.target, node.args, node.kwargs)
        if not is_stale and changed.isdisjoint(node.all_input_nodes):
            continue
        with _fake_mode(node):
            value = evaluate(node)
        if "val" not in node.meta or signature(value) != signature(node.meta["val"]):
            node.meta["val"] = value
            changed.add(node)


def _fake_mode(node: Node) -> Any:
    values = [each.meta.get("val") for each in node.all_input_nodes]
    modes = [each.fake_mode for each in values if isinstance(each, FakeTensor)]
    return modes[0] if modes else contextlib.nullcontext()
