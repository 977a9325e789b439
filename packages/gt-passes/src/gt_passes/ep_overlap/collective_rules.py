"""What collectives of tensor and sequence parallelism do to chunks.

They work between ranks, element by element or by blocks of the first dimension, and each rank's
block walks the whole chunked extent: to gather blocks is to walk it more often (``outer`` of a
layout), to reduce and scatter them, less often. What is gathered along another dimension is cut
between the walks and joined along that one, and what is scattered the other way round.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from gt_passes._torch_internals import OpOverload
from gt_passes.ep_overlap.chunk_states import Partial, Sharded, State, Whole
from gt_passes.ep_overlap.rule_calls import NotProvenError, RuleCall, RuleOutcome, Scaled, rule


def _collective(name: str) -> OpOverload:
    operator: OpOverload = getattr(torch.ops._c10d_functional, name).default
    return operator


@rule(_collective("wait_tensor"))
def _wait(call: RuleCall) -> State:
    return call.state(call.operands[0])


@rule(_collective("all_reduce"))
def _all_reduce(call: RuleCall) -> State:
    return _reduced(call)


@rule(_collective("all_gather_into_tensor"))
def _all_gather(call: RuleCall) -> State:
    return _walked(call, call.state(call.operands[0]), times=call.get("group_size"), over=1)


@rule(_collective("reduce_scatter_tensor"))
def _reduce_scatter(call: RuleCall) -> State:
    return _walked(call, _reduced(call), times=1, over=call.get("group_size"))


def _reduced(call: RuleCall) -> State:
    state = call.state(call.operands[0])
    if isinstance(state, Partial) and call.get("reduce_op") not in ("sum", "avg"):
        raise NotProvenError("it is not linear, and its operand is only a term of a sum")
    return state


def _walked(call: RuleCall, state: State, *, times: int, over: int) -> State:
    """The state of what walks the extent more or less often in its first dimension."""
    if isinstance(state, (Whole, Partial)) or state.layout is None or state.layout.dim != 0:
        return state
    walks = state.layout.outer * times
    if walks % over:
        raise NotProvenError("it works along dim 0, which is chunked")
    return replace(state, layout=replace(state.layout, outer=walks // over))


def cut_between_walks(call: RuleCall) -> RuleOutcome | None:
    """The outcome of a split along the chunked dimension into parts that walk all of the extent.

    None if it is none such.
    """
    source = call.operands[0]
    state, size = call.state(source), call.get("split_size")
    if not isinstance(state, Sharded) or not isinstance(size, int):
        return None
    layout = state.layout
    walk = layout.inner * call.extent
    sizes = [shape[layout.dim] for shape in call.shapes]
    along = call.get("dim") % call.rank(source) == layout.dim
    if not along or any(not isinstance(each, int) or each % walk for each in (size, *sizes)):
        return None
    found = [
        Sharded(replace(layout, outer=each // walk)) for each in sizes if isinstance(each, int)
    ]
    args = (call.node.args[0], Scaled(size // call.extent), *call.node.args[2:])
    return call.outcome(list(found), args=args)


def slice_of_walks(call: RuleCall) -> RuleOutcome | None:
    """The outcome of a slice along the chunked dimension that takes walks of all of the extent.

    None if it is none such. A rank takes its own samples so of those that were gathered.
    """
    source = call.operands[0]
    state, sizes = call.state(source), call.shape(source)
    dim = call.get("dim") % len(sizes)
    start, end, step = (call.get(name) for name in ("start", "end", "step"))
    is_part = isinstance(start, int) and isinstance(end, int) and step in (None, 1)
    if not isinstance(state, Sharded) or state.layout.dim != dim or not is_part:
        return None
    walk = state.layout.inner * call.extent
    start, end, _ = slice(start, end).indices(sizes[dim])
    if start % walk or end % walk or end <= start:
        return None
    scaled = (Scaled(start // call.extent), Scaled(end // call.extent))
    return call.outcome(
        [Sharded(replace(state.layout, outer=(end - start) // walk))],
        args=(call.node.args[0], dim, *scaled),
    )


def slice_of_walks_backward(call: RuleCall) -> RuleOutcome | None:
    """The outcome of the gradient of a ``slice_of_walks``: its walks among walks of zeros.

    None if it is none such.
    """
    (source,) = call.operands
    state, sizes = call.state(source), call.get("input_sizes")
    dim = call.get("dim") % len(sizes)
    if not isinstance(state, Sharded) or state.layout.dim != dim or call.get("step") != 1:
        return None
    if not all(isinstance(each, int) for each in (sizes[dim], call.get("start"), call.get("end"))):
        return None
    walk = state.layout.inner * call.extent
    start, end, _ = slice(call.get("start"), call.get("end")).indices(sizes[dim])
    if start % walk or end % walk or sizes[dim] % walk:
        return None
    layout = replace(state.layout, outer=sizes[dim] // walk)
    scaled = [*sizes[:dim], Scaled(layout.factor), *sizes[dim + 1 :]]
    part = (Scaled(start // call.extent), Scaled(end // call.extent))
    return call.outcome([Sharded(layout)], args=(call.node.args[0], scaled, dim, *part, 1))


def join_of_walks(call: RuleCall) -> RuleOutcome | None:
    """The outcome of a concatenation along the chunked dimension of parts that walk it alike.

    None if it is none such.
    """
    states = [call.state(node) for node in call.get("tensors")]
    layouts = [state.layout for state in states if isinstance(state, Sharded)]
    dim = call.get("dim") % call.ranks[0]
    if len(layouts) < len(states) or {(each.dim, each.inner) for each in layouts} != {
        (dim, layouts[0].inner)
    }:
        return None
    outer = sum(each.outer for each in layouts)
    return call.outcome([Sharded(replace(layouts[0], outer=outer))])
