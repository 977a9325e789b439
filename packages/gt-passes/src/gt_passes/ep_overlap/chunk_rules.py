"""The table of operators: what each does to chunks.

Nearly every operator walks most dimensions of its operands and results together, index by index,
and mixes the elements of the others. So a rule is mostly a name for each dimension, as in einsum:
the name that holds the chunked extent says where it stands in the results, of which whole operands
a chunk needs its part, and, where no result has it, that the operator sums over it or is refused.

An operator that is not here, and is not pointwise, may not stand in a chunked region outside of the
expert-parallel parts; nothing is guessed. More rules are added with ``gt_passes.ep_overlap.rule``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from gt_passes._torch_internals import OpOverload, value_of
from gt_passes.analysis.node_calls import evaluate
from gt_passes.analysis.operator_effects import draws_random_numbers
from gt_passes.ep_overlap.chunk_states import (
    Local,
    Partial,
    Sharded,
    State,
    Whole,
    layout_in_view,
    layout_of,
)
from gt_passes.ep_overlap.collective_rules import (
    cut_between_walks,
    join_of_walks,
    slice_of_walks,
    slice_of_walks_backward,
)
from gt_passes.ep_overlap.rule_calls import (
    RULES,
    NotProvenError,
    Rule,
    RuleCall,
    RuleOutcome,
    rule,
)

aten: Any = torch.ops.aten


def _operators(names: str) -> tuple[OpOverload, ...]:
    """Operators of ATen by their names."""
    found = (name.split(".") for name in names.split())
    return tuple(getattr(getattr(aten, packet), overload) for packet, overload in found)


def find_rule(node: Node) -> Rule | None:
    """The rule of a node's operator: its own, or that of pointwise ones; None if it has none."""
    own = RULES.get(node.target)
    if own is not None or not isinstance(node.target, OpOverload):
        return own
    if draws_random_numbers(node):
        return _refuse_random
    return _pointwise if torch.Tag.pointwise in node.target.tags else None


def _refuse_random(call: RuleCall) -> RuleOutcome:
    raise NotProvenError("it draws random numbers, which chunks would draw differently")


# Dimensions by name.

Dims = Sequence[object]
"""A name for each dimension of a tensor; None for one whose elements the operator mixes."""


def follow(
    call: RuleCall,
    operands: Iterable[tuple[Node, Dims]],
    results: Sequence[Dims],
    *,
    sums: Collection[object] = (),
) -> RuleOutcome:
    """Follow the chunked extent from operands to results, by the names of dimensions.

    Args:
        call: that is judged.
        operands: which count, with names. Each index of a name is computed from the same index of
            it in all operands that have the name.
        results: names for each result.
        sums: names over which the operator sums.
    """
    names_of: dict[Node, Dims] = {}
    for node, names in operands:
        if tuple(names_of.setdefault(node, names)) != tuple(names):
            raise NotProvenError(f"it reads {node.name} as operands of different dims")
    states = {node: call.state(node) for node in names_of}
    if any(isinstance(state, Partial) for state in states.values()):
        _check_linear(call)
        return call.outcome([Partial()] * len(results))
    chunked = {
        names[layout.dim]: layout
        for node, names in names_of.items()
        if (layout := call.layout(node)) is not None
    }
    if len(chunked) > 1:
        raise NotProvenError("its operands are sharded along different dimensions")
    name, layout = next(iter(chunked.items()), (None, None))
    local = [state for state in states.values() if isinstance(state, Local)]
    # Who knows which tokens a chunk's own value is of, if not by a dimension of it?
    permuted = any(state.permuted or state.layout is None for state in local)
    if layout is None:
        return call.outcome([Local(permuted=permuted) if local else Whole()] * len(results))
    found: list[State] = []
    for names in results:
        if name is not None and name in names:
            there = layout.moved(names.index(name))
            found.append(Local(there, permuted=permuted) if local else Sharded(there))
        elif name in sums:
            found.append(Local() if local else Partial())
        else:
            raise NotProvenError(f"it works along dim {layout.dim}, which is chunked")
    cuts = {
        node: there
        for node, names in names_of.items()
        if name in names and call.must_cut(node, there := layout.moved(names.index(name)))
    }
    return call.outcome(found, cuts=cuts, args=call.scaled_arguments(layout_of(found[0])))


_SUMS = _operators("sum.dim_IntList sum.default")

_LINEAR = {
    *_SUMS,
    *_operators(
        "neg.default clone.default lift_fresh_copy.default _to_copy.default "
        "constant_pad_nd.default slice_backward.default select_backward.default cat.default "
        "stack.default add.Tensor sub.Tensor add_.Tensor sub_.Tensor"
    ),
}
"""In all operands together: the sum of their results is their result on sums."""

_MULTILINEAR: dict[object, tuple[str, ...]] = {
    **dict.fromkeys(_operators("mul.Tensor mul_.Tensor"), ("self", "other")),
    **dict.fromkeys(_operators("mul.Scalar mul_.Scalar div.Scalar div_.Scalar"), ("self",)),
    **dict.fromkeys(_operators("div.Tensor div_.Tensor"), ("self",)),
    **dict.fromkeys(_operators("mm.default bmm.default"), ("self", "mat2")),
}
"""In each of these operands while all others stay as they are."""


def _check_linear(call: RuleCall) -> None:
    """Sums of terms stay such under linear operators only."""
    target, arguments = call.node.target, call.arguments
    states = [call.state(node) for node in call.operands]
    if target is aten._to_copy.default:
        before, after = value_of(call.operands[0]), call.results[0]
        assert isinstance(before, torch.Tensor)
        if not call.keeps_casts and torch.promote_types(before.dtype, after.dtype) != after.dtype:
            raise NotProvenError("it rounds a sum of which only a term is known")
    adds_number = any(
        isinstance(arguments.get(name), (int, float)) and arguments[name] != 0
        for name in ("other", "value")
    )
    if target in _LINEAR and all(isinstance(state, Partial) for state in states):
        if not adds_number:
            return
    elif sum(isinstance(state, Whole) for state in states) == len(states) - 1:
        (term,) = (n for n in call.operands if isinstance(call.state(n), Partial))
        places = [name for name, value in arguments.items() if value is term]
        if len(places) == 1 and places[0] in _MULTILINEAR.get(target, ()):
            return
    raise NotProvenError("it is not linear, and one of its operands is only a term of a sum")


def _aligned(call: RuleCall, rank: int) -> list[tuple[Node, Dims]]:
    """Operands that broadcast: dimensions count from the last of ``rank``."""
    return [(node, range(rank - call.rank(node), rank)) for node in call.operands]


# Operators that mix no elements.


@rule(*_operators("_to_copy.default clone.default lift_fresh_copy.default"))
@rule(*_operators("floor_divide.default fill.Scalar"))
def _pointwise(call: RuleCall) -> RuleOutcome:
    rank = max(call.ranks)
    return follow(call, _aligned(call, rank), [range(rank)] * len(call.results))


@rule(
    *_operators(
        "alias.default detach.default _conj.default view_as_complex.default view_as_real.default "
        "view.default _unsafe_view.default reshape.default expand.default t.default transpose.int "
        "permute.default unsqueeze.default squeeze.dim squeeze.dims select.int slice.Tensor "
        "split.Tensor split_with_sizes.default unbind.int"
    )
)
def _view(call: RuleCall) -> RuleOutcome:
    """Where the extent went is seen in the view that the operator makes of a contiguous value."""
    source = call.operands[0]
    state, layout, shape = call.state(source), call.layout(source), call.shape(source)
    if layout is None:
        return call.outcome([state] * len(call.results))
    if call.node.target is aten.split.Tensor and (cut := cut_between_walks(call)) is not None:
        return cut
    if call.node.target is aten.slice.Tensor and (part := slice_of_walks(call)) is not None:
        return part
    numbers = [value_of(node) for node in call.operands[1:]]
    if not all(isinstance(size, int) for sizes in (shape, numbers, *call.shapes) for size in sizes):
        return call.outcome([Local()] * len(call.results))
    whole = torch.empty(shape, dtype=source.meta["val"].dtype, device="meta")
    views = evaluate(call.node, lambda node: whole if node is source else value_of(node))
    found: list[State] = []
    for view in views if isinstance(views, (tuple, list)) else [views]:
        if view.nbytes < whole.nbytes and call.get("dim") % len(shape) == layout.dim:
            raise NotProvenError(f"it works along dim {layout.dim}, which is chunked")
        there = layout_in_view(layout, whole, view, extent=call.extent)
        if there is None:
            raise NotProvenError(
                f"it spreads the chunked dim of {shape} over the dims of {tuple(view.shape)}"
            )
        assert isinstance(state, (Sharded, Local))  # as it has a layout
        found.append(replace(state, layout=there))
    return call.outcome(found, args=call.scaled_arguments(layout_of(found[0])))


# Operators that mix the elements of dimensions that they name.


@rule(
    *_SUMS,
    *_operators(
        "mean.dim mean.default amax.default amin.default any.dim all.dim logsumexp.default "
        "var.correction var_mean.correction argmax.default argmin.default max.dim min.dim "
        "_softmax.default _softmax_backward_data.default _log_softmax.default "
        "_log_softmax_backward_data.default cumsum.default cumprod.default topk.default "
        "sort.default sort.stable gather.default scatter.value scatter.src scatter_add.default "
        "scatter_.value scatter_.src scatter_add_.default cat.default stack.default "
        "slice_backward.default select_backward.default constant_pad_nd.default index_add.default "
        "native_layer_norm.default _fused_rms_norm.default"
    ),
)
def _along(call: RuleCall) -> RuleOutcome:
    """Operands are aligned; named dimensions stay, go, or are new, as the rank of a result says."""
    if call.node.target is aten.cat.default and (joined := join_of_walks(call)) is not None:
        return joined
    is_gradient = call.node.target is aten.slice_backward.default
    if is_gradient and (among := slice_of_walks_backward(call)) is not None:
        return among
    rank = max(call.rank(node) for node in call.operands)
    dims = _mixed_dims(call, rank)
    names: list[object] = list(range(rank))
    kept = [None if name in dims else name for name in names]
    results: list[Dims] = []
    for each in call.ranks:
        if each > rank:
            (new,) = dims
            results.append([*names[:new], None, *names[new:]])
        else:
            results.append(kept if each == rank else [name for name in kept if name is not None])
    sums = names if call.node.target in _SUMS else ()
    return follow(call, _aligned(call, rank), results, sums=sums)


def _mixed_dims(call: RuleCall, rank: int) -> set[int]:
    """The dimensions that an argument names, or all."""
    if (pads := call.get("pad")) is not None:
        return {rank - 1 - index // 2 for index, pad in enumerate(pads) if pad}
    if (normalized := call.get("normalized_shape")) is not None:
        return set(range(rank - len(normalized), rank))
    named = call.get("dim")
    named = [named] if isinstance(named, int) else named or range(rank)
    return {dim % max(1, rank, *call.ranks) for dim in named}


@rule(*_operators("native_layer_norm_backward.default _fused_rms_norm_backward.default"))
def _norm_backward(call: RuleCall) -> RuleOutcome:
    rank = call.rank(call.get("input"))
    outer = range(rank - len(call.get("normalized_shape")))
    of_input = [*outer, *[None] * len(call.get("normalized_shape"))]
    of_weights: list[Dims] = [()] * (len(call.results) - 1)
    return follow(call, _aligned(call, rank), [of_input, *of_weights], sums=outer)


# Products.

_PRODUCTS = {
    aten.mm.default: "mk,kn->mn",
    aten.bmm.default: "bmk,bkn->bmn",
    aten.addmm.default: "mn,mk,kn->mn",
}


@rule(*_PRODUCTS)
def _product(call: RuleCall) -> RuleOutcome:
    given, result = _PRODUCTS[call.node.target].split("->")
    operands = [
        (node, names[len(names) - call.rank(node) :])
        for node, names in zip(call.arguments.values(), given.split(","), strict=False)
    ]
    # A bias would be added once for each chunk.
    return follow(call, operands, [result], sums=("k",) if len(operands) == 2 else ())


@rule(aten._grouped_mm.default)
def _grouped_mm(call: RuleCall) -> State:
    operands = [call.get("self"), call.get("mat2")]
    if all(
        call.rank(node) == 2 and isinstance(call.state(node), (Sharded, Local)) for node in operands
    ):
        # The gradient of the experts' weights, a sum over the tokens; every token is in one chunk.
        return Partial()
    raise NotProvenError("it is known for the gradient of weights only")


_ATTENTIONS = "flash_attention flash_attention_for_cpu efficient_attention cudnn_attention"


@rule(
    *(
        getattr(aten, f"_scaled_dot_product_{kind}{end}").default
        for kind in _ATTENTIONS.split()
        for end in ("", "_backward")
    )
)
def _attention(call: RuleCall) -> RuleOutcome:
    """Samples do not see each other. What has no batch is the state of random numbers."""
    if draws_random_numbers(call.node):
        _refuse_random(call)
    operands = [
        (node, ["batch", *[None] * (call.rank(node) - 1)])
        for node in call.operands
        if call.rank(node) > 2
    ]
    outcome = follow(call, operands, [["batch"]] * len(call.results))
    assert isinstance(outcome.state, tuple)
    batch = call.shape(call.operands[0])[0]
    has_batch = [len(shape) > 2 and shape[0] == batch for shape in call.shapes]
    states = zip(outcome.state, has_batch, strict=True)
    return replace(outcome, state=tuple(state if batch else Local() for state, batch in states))


# Lookups.


@rule(aten.embedding.default)
def _embedding(call: RuleCall) -> RuleOutcome:
    indices, table = call.get("indices"), call.get("weight")
    names = range(call.rank(indices))
    return follow(call, [(table, ("row", "column")), (indices, names)], [[*names, "column"]])


@rule(aten.embedding_dense_backward.default)
def _embedding_backward(call: RuleCall) -> RuleOutcome:
    gradient, indices = call.get("grad_output"), call.get("indices")
    names = range(call.rank(indices))
    sums = () if call.get("scale_grad_by_freq") else names
    operands = [(gradient, [*names, "column"]), (indices, names)]
    return follow(call, operands, [["row", "column"]], sums=sums)


@rule(aten.index.Tensor)
def _index(call: RuleCall) -> RuleOutcome:
    source, indices = call.get("self"), call.get("indices")
    leading = next((at for at, index in enumerate(indices) if index is not None), 0)
    given = indices[leading:]
    if None in given or any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i in given):
        raise NotProvenError("its indices are masks, or not next to each other")
    rank = max(map(call.rank, given))
    read: Dims = [None] * call.rank(source)
    operands = [(source, read), *((i, range(rank - call.rank(i), rank)) for i in given)]
    behind = read[leading + len(given) :]
    return follow(call, operands, [[*read[:leading], *range(rank), *behind]])


# Constants, and what only chunks see.


@rule(*_operators("zeros_like.default ones_like.default full_like.default empty_like.default"))
def _constant_like(call: RuleCall) -> State:
    state = call.state(call.get("self"))
    return Whole() if isinstance(state, Partial) else state


@rule(*_operators("new_zeros.default new_ones.default new_empty.default new_full.default"))
def _constant(call: RuleCall) -> RuleOutcome | State:
    """A constant does not depend on the chunk, but the buffer of a gradient is shaped like it.

    The backward of an operator that reads some elements begins with zeros in the shape of what the
    operator read: its shape says which of the sizes hold the extent. Where that was a part of a
    sequence, the zeros are those of the whole, of which each rank takes its part.
    """
    sizes = call.get("size")
    if any(isinstance(size, Node) for size in sizes):
        return Local()
    sources = () if call.partner is None else call.partner.all_input_nodes
    source = next((source for source in sources if call.shape(source) == tuple(sizes)), None)
    if source is None:
        source = next((source for source in sources if _has_the_extent_of(call, source)), None)
    layout = None if source is None else call.layout(source)
    if source is None or layout is None:
        return Whole()
    return RuleOutcome(state=call.state(source), args=call.scaled_arguments(layout))


def _has_the_extent_of(call: RuleCall, source: Node) -> bool:
    """Whether a constant is like an operand of its partner but for dimensions without chunks."""
    layout, sizes, shape = call.layout(source), call.get("size"), call.shape(source)
    return (
        layout is not None and len(sizes) == len(shape) and sizes[layout.dim] == shape[layout.dim]
    )


@rule(*_operators("all.default any.default"))
@rule(*_operators("_assert_async.msg _assert_async.default _assert_scalar.default"))
def _judge(call: RuleCall) -> State:
    return Local()  # good for an assertion, which every chunk makes, and for nothing else


# The contract of expert-parallel regions.

_SCATTERS = _operators(
    "index_put.default index_put_.default scatter_add.default scatter_add_.default "
    "index_add.default index_add_.default index_copy.default"
)


def outcome_by_contract(call: RuleCall, *, permuted: bool) -> RuleOutcome:
    """The states in an expert-parallel part, where tokens are independent by contract.

    Rows are scattered to a buffer in token order at the places of the chunk's own tokens, and
    nowhere else. Of anything else, sizes say where the extent stands: one that is that of a chunked
    dimension of an operand is taken to be chunked too, in the same dimension before others; the
    shape of every chunk is checked when it runs.

    Args:
        call: of an operator without a rule, or whose rule does not hold.
        permuted: whether its results may stand in another order than that of tokens.
    """
    destination = call.node.args[0] if call.node.args else None
    if call.node.target in _SCATTERS and isinstance(destination, Node):
        state = call.state(destination)
        if isinstance(state, (Sharded, Local)):
            return RuleOutcome(state=state)
    known = [layout for node in call.operands if (layout := call.layout(node)) is not None]
    states: list[State] = []
    for shape in call.shapes:
        fitting = [
            (dim != layout.dim, layout.moved(dim))
            for layout in known
            for dim, size in enumerate(shape)
            if isinstance(size, int) and size == layout.factor * call.extent
        ]
        best = min(fitting, key=lambda found: found[0], default=(True, None))
        states.append(Local(best[1], permuted=permuted))
    return call.outcome(states)
