"""The table of operators: what each does to chunks.

One rule serves many operators. An operator that is not here, and is not pointwise, may not stand in
a chunked region outside of the expert-parallel parts; nothing is guessed. More rules are added with
``gt_passes.ep_overlap.rule``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from gt_passes._torch_internals import OpOverload
from gt_passes.ep_overlap.chunk_states import (
    Layout,
    Local,
    Partial,
    Sharded,
    State,
    Whole,
    relayout,
)
from gt_passes.ep_overlap.rule_calls import (
    Call,
    NotProvenError,
    Outcome,
    Rule,
    Scaled,
    describe,
    rule,
    rule_of,
    substitute,
)

__all__ = ["find_rule"]

aten: Any = torch.ops.aten

_TO_END = 2**63 - 1


def find_rule(target: object) -> Rule | None:
    """The rule of an operator: its own, or that of pointwise operators; None if it has none."""
    own = rule_of(target)
    if own is not None or not isinstance(target, OpOverload):
        return own
    if torch.Tag.nondeterministic_seeded in target.tags:
        return _refuse_random
    return _pointwise if torch.Tag.pointwise in target.tags else None


def _refuse_random(call: Call) -> Outcome:
    raise NotProvenError("it draws random numbers, which chunks would draw differently")


# Pointwise operators.


@rule(
    aten._to_copy.default,
    aten.alias.default,
    aten.detach.default,
    aten._conj.default,
    aten.view_as_complex.default,
    aten.view_as_real.default,
    aten.floor_divide.default,
    aten.lift_fresh_copy.default,
    aten.clone.default,
    aten.fill.Scalar,
)
def _pointwise(call: Call) -> Outcome | State:
    states = [call.state(node) for node in call.tensors]
    if any(isinstance(state, Partial) for state in states):
        return _linear(call)
    if all(isinstance(state, Whole) for state in states):
        return Whole()
    rank = call.result.ndim
    if call.node.target is aten.view_as_real.default:
        rank -= 1
    elif call.node.target is aten.view_as_complex.default:
        rank += 1
    aligned = {
        node: layout.moved(layout.dim + rank - call.rank(node))
        for node in call.tensors
        if (layout := call.layout(node)) is not None
    }
    layouts = list(dict.fromkeys(aligned.values()))
    if not layouts or not isinstance(call.result.shape[layouts[0].dim], int):
        return Local()
    if len(layouts) > 1:
        raise NotProvenError("its operands are sharded along different dimensions")
    layout = layouts[0]
    cuts = {}
    for node in call.tensors:
        if isinstance(call.state(node), Whole):
            dim = layout.dim - rank + call.rank(node)
            if dim >= 0 and call.shape(node)[dim] != 1:
                cuts[node] = call.as_sharded(node, layout.moved(dim))
    return Outcome(state=call.joined_state(call.tensors, layout), changed=_replacing(call, cuts))


def _replacing(call: Call, cuts: dict[Node, Any]) -> dict[str, Any]:
    """The arguments in which whole operands are cut."""
    if not cuts:
        return {}
    assert isinstance(call.node.target, OpOverload)
    names = [declared.name for declared in call.node.target._schema.arguments]
    return {
        name: changed
        for name in names
        if (changed := substitute(call.get(name), cuts)) != call.get(name)
    }


_ADDITIONS = {aten.add.Tensor, aten.sub.Tensor, aten.add_.Tensor, aten.sub_.Tensor}
_PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar, aten.mul_.Tensor, aten.mul_.Scalar}
_QUOTIENTS = {aten.div.Tensor, aten.div.Scalar, aten.div_.Tensor, aten.div_.Scalar}
_COPIES = {
    aten.neg.default,
    aten.alias.default,
    aten.detach.default,
    aten.clone.default,
    aten._conj.default,
    aten.view_as_real.default,
    aten.view_as_complex.default,
}


def _linear(call: Call) -> State:
    """Sums of terms stay such under linear operators only."""
    target, tensors = call.node.target, call.tensors
    partial = [isinstance(call.state(node), Partial) for node in tensors]
    if target in _COPIES:
        return Partial()
    if target is aten._to_copy.default:
        source = call.operand("self").meta["val"].dtype
        if call.keeps_casts or torch.promote_types(source, call.result.dtype) == call.result.dtype:
            return Partial()
        raise NotProvenError("it rounds a sum of which only a term is known")
    if target in _ADDITIONS and len(partial) == len(_operands(call)) and all(partial):
        return Partial()
    rest_is_whole = all(
        is_partial or isinstance(call.state(node), Whole)
        for node, is_partial in zip(tensors, partial, strict=True)
    )
    if rest_is_whole and sum(partial) == 1:
        if target in _PRODUCTS and call.get("self") is not call.get("other"):
            return Partial()
        if target in _QUOTIENTS and call.get("self") is tensors[partial.index(True)]:
            return Partial()
    raise NotProvenError("it is not linear, and one of its operands is only a term of a sum")


def _operands(call: Call) -> list[Any]:
    """The different operands of a binary operator, numbers included."""
    first, second = call.get("self"), call.get("other")
    return [first] if first is second else [first, second]


# Shapes.


def _other_dim(call: Call, dim: int, layout: Layout | None) -> None:
    if layout is not None and layout.dim == dim:
        raise NotProvenError(f"it works along dim {dim}, which is chunked")


def _sizes(sizes: Any, layout: Layout) -> list[Any]:
    """Sizes of a result, of which one holds the extent."""
    changed = list(sizes)
    if isinstance(changed[layout.dim], int) and changed[layout.dim] != -1:
        changed[layout.dim] = Scaled(layout.factor)
    return changed


@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(call: Call) -> Outcome | State:
    source = call.operand("self")
    layout = call.layout(source)
    if layout is None:
        return call.like(source)
    before, after = call.shape(source), tuple(call.result.shape)
    if not all(isinstance(size, int) for size in (*before, *after)):
        return Local()
    moved = relayout(layout, before, after, extent=call.extent)
    if moved is None:
        raise NotProvenError(f"it spreads the chunked dim of {before} over the dims of {after}")
    return Outcome(
        state=call.like(source, moved), changed={"size": _sizes(call.get("size"), moved)}
    )


@rule(aten.expand.default)
def _expand(call: Call) -> Outcome | State:
    source = call.operand("self")
    layout = call.layout(source)
    if layout is None:
        return call.like(source)
    moved = layout.moved(layout.dim + call.result.ndim - call.rank(source))
    return Outcome(
        state=call.like(source, moved), changed={"size": _sizes(call.get("size"), moved)}
    )


@rule(aten.t.default)
def _t(call: Call) -> State:
    source = call.operand("self")
    layout = call.layout(source)
    if layout is None or call.rank(source) < 2:
        return call.like(source, layout)
    return call.like(source, layout.moved(1 - layout.dim))


@rule(aten.transpose.int)
def _transpose(call: Call) -> State:
    source = call.operand("self")
    layout = call.layout(source)
    if layout is None:
        return call.like(source)
    first, second = call.dim("dim0", source), call.dim("dim1", source)
    swapped = {first: second, second: first}
    return call.like(source, layout.moved(swapped.get(layout.dim, layout.dim)))


@rule(aten.permute.default)
def _permute(call: Call) -> State:
    source = call.operand("self")
    layout = call.layout(source)
    if layout is None:
        return call.like(source)
    dims = [dim % call.rank(source) for dim in call.get("dims")]
    return call.like(source, layout.moved(dims.index(layout.dim)))


@rule(aten.unsqueeze.default)
def _unsqueeze(call: Call) -> State:
    source = call.operand("self")
    layout = call.layout(source)
    if layout is None:
        return call.like(source)
    dim = call.get("dim") % (call.rank(source) + 1)
    return call.like(source, layout.moved(layout.dim + (dim <= layout.dim)))


@rule(aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(call: Call) -> State:
    source = call.operand("self")
    layout = call.layout(source)
    if layout is None:
        return call.like(source)
    dims = call.get("dim")
    dims = [
        dim % call.rank(source) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])
    ]
    if layout.dim in dims:
        raise NotProvenError(f"it drops dim {layout.dim}, which is chunked, where a chunk has one")
    gone = sum(dim < layout.dim and call.shape(source)[dim] == 1 for dim in set(dims))
    return call.like(source, layout.moved(layout.dim - gone))


@rule(aten.select.int)
def _select(call: Call) -> State:
    source = call.operand("self")
    layout = call.layout(source)
    dim = call.dim("dim", source)
    _other_dim(call, dim, layout)
    if layout is None:
        return call.like(source)
    return call.like(source, layout.moved(layout.dim - (dim < layout.dim)))


@rule(aten.slice.Tensor)
def _slice(call: Call) -> State:
    source = call.operand("self")
    layout = call.layout(source)
    if (call.get("start") or 0) != 0 or call.get("step") != 1 or call.get("end") != _TO_END:
        _other_dim(call, call.dim("dim", source), layout)
    return call.like(source, layout)


@rule(aten.slice_backward.default)
def _slice_backward(call: Call) -> Outcome | State:
    source = call.operand("grad_output")
    layout = call.layout(source)
    _other_dim(call, call.dim("dim", source), layout)
    if layout is None:
        return call.like(source)
    return Outcome(
        state=call.like(source, layout),
        changed={"input_sizes": _sizes(call.get("input_sizes"), layout)},
    )


@rule(aten.select_backward.default)
def _select_backward(call: Call) -> Outcome | State:
    source = call.operand("grad_output")
    layout = call.layout(source)
    if layout is None:
        return call.like(source)
    dim = call.get("dim") % call.result.ndim
    moved = layout.moved(layout.dim + (dim <= layout.dim))
    return Outcome(
        state=call.like(source, moved),
        changed={"input_sizes": _sizes(call.get("input_sizes"), moved)},
    )


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
def _split(call: Call) -> Outcome:
    source = call.operand("self")
    layout = call.layout(source)
    dim = call.dim("dim", source, 0)
    _other_dim(call, dim, layout)
    if layout is not None and call.node.target is aten.unbind.int:
        layout = layout.moved(layout.dim - (dim < layout.dim))
    return Outcome(state=(call.like(source, layout),) * len(call.node.meta["val"]))


@rule(aten.constant_pad_nd.default)
def _pad(call: Call) -> State:
    source = call.operand("self")
    layout = call.layout(source)
    if isinstance(call.state(source), Partial) and call.get("value") not in (0, 0.0):
        raise NotProvenError("it pads a term of a sum with something other than zero")
    padded = {
        call.rank(source) - 1 - index // 2 for index, pad in enumerate(call.get("pad")) if pad
    }
    for dim in sorted(padded):
        _other_dim(call, dim, layout)
    return call.like(source, layout)


@rule(aten.cat.default, aten.stack.default)
def _cat(call: Call) -> Outcome | State:
    tensors = call.get("tensors")
    states = [call.state(node) for node in tensors]
    if all(isinstance(state, Partial) for state in states):
        return Partial()
    layouts = [layout for node in tensors if (layout := call.layout(node)) is not None]
    if not layouts or any(isinstance(state, Partial) for state in states):
        raise NotProvenError("it joins terms of a sum, or values of one chunk, with others")
    layout = layouts[0]
    dim = call.get("dim")
    is_stack = call.node.target is aten.stack.default
    dim %= call.result.ndim
    if not is_stack:
        _other_dim(call, dim, layout)
    parts = [call.as_sharded(node, layout) for node in tensors]
    moved = layout.moved(layout.dim + (is_stack and dim <= layout.dim))
    return Outcome(state=call.joined_state(tensors, moved), changed={"tensors": parts})


# Reductions, and what else works along some dimensions.


def _reduced(call: Call, *, is_sum: bool) -> State:
    source = call.operand("self")
    state, layout = call.state(source), call.layout(source)
    dims = call.get("dim")
    dims = dims if isinstance(dims, (list, tuple)) else [dims]
    rank = call.rank(source)
    dims = list(range(rank)) if dims in ([], [None]) else sorted({dim % rank for dim in dims})
    if isinstance(state, Partial):
        if not is_sum:
            raise NotProvenError("it is not linear, and its operand is only a term of a sum")
        return state
    if layout is None:
        return call.like(source)
    if layout.dim not in dims:
        gone = 0 if call.get("keepdim") else sum(dim < layout.dim for dim in dims)
        return call.like(source, layout.moved(layout.dim - gone))
    if not is_sum:
        raise NotProvenError(f"it reduces dim {layout.dim}, which is chunked, and is no sum")
    return Partial() if isinstance(state, Sharded) else Local()


@rule(aten.sum.dim_IntList, aten.sum.default)
def _sum(call: Call) -> State:
    return _reduced(call, is_sum=True)


@rule(
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.any.dim,
    aten.all.dim,
    aten.logsumexp.default,
    aten.var.correction,
    aten.argmax.default,
    aten.argmin.default,
)
def _reduce(call: Call) -> State:
    return _reduced(call, is_sum=False)


@rule(aten.max.dim, aten.min.dim, aten.var_mean.correction)
def _reduce_to_many(call: Call) -> Outcome:
    return Outcome(state=(_reduced(call, is_sum=False),) * 2)


@rule(aten.all.default, aten.any.default)
def _judge(call: Call) -> State:
    return Local()  # good for an assertion, which every chunk makes, and for nothing else


@rule(aten._assert_async.msg, aten._assert_async.default, aten._assert_scalar.default)
def _assertion(call: Call) -> State:
    return Local()


def _along(call: Call, name: str = "self") -> State:
    source = call.operand(name)
    if isinstance(call.state(source), Partial):
        raise NotProvenError("it is not linear, and its operand is only a term of a sum")
    layout = call.layout(source)
    _other_dim(call, call.dim("dim", source, -1), layout)
    return call.like(source, layout)


@rule(aten._softmax.default, aten._log_softmax.default, aten.cumsum.default, aten.cumprod.default)
def _scan(call: Call) -> State:
    return _along(call)


@rule(aten.topk.default, aten.sort.default, aten.sort.stable)
def _ordered(call: Call) -> Outcome:
    return Outcome(state=(_along(call),) * 2)


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax_backward(call: Call) -> Outcome | State:
    _along(
        call,
        "grad_output" if isinstance(call.state(call.operand("grad_output")), Sharded) else "output",
    )
    return _pointwise(call)


@rule(aten.native_layer_norm.default, aten._fused_rms_norm.default)
def _norm(call: Call) -> Outcome:
    source = call.operand("input")
    layout = call.layout(source)
    if not isinstance(call.state(source), Sharded) or layout is None:
        raise NotProvenError(f"its input is {describe(call.state(source))}")
    if layout.dim >= call.rank(source) - len(call.get("normalized_shape")):
        raise NotProvenError("it normalizes over the chunked dim")
    return Outcome(state=(Sharded(layout),) * len(call.node.meta["val"]))


@rule(aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default)
def _norm_backward(call: Call) -> Outcome:
    source = call.operand("input")
    layout = call.layout(source)
    if not isinstance(call.state(source), Sharded) or layout is None:
        raise NotProvenError(f"its input is {describe(call.state(source))}")
    gradient = call.as_sharded(call.operand("grad_out"), layout)
    num_results = len(call.node.meta["val"])
    return Outcome(
        state=(Sharded(layout), *[Partial()] * (num_results - 1)), changed={"grad_out": gradient}
    )


# Matrices.


def _contract(call: Call, left: Node, right: Node, *, batch_dims: int) -> Outcome | State:
    rows, inner, columns = batch_dims, batch_dims + 1, batch_dims + 1
    first, second = call.state(left), call.state(right)
    if isinstance(first, Partial) or isinstance(second, Partial):
        if isinstance(first, Whole) or isinstance(second, Whole):
            return Partial()  # linear in each operand
        raise NotProvenError("both operands are chunked, and one is only a term of a sum")
    if Local in (type(first), type(second)):
        raise NotProvenError("an operand is local to the chunk")
    a, b = call.layout(left), call.layout(right)
    if any(layout is not None and layout.dim < batch_dims for layout in (a, b)):
        layout = a or b
        assert layout is not None
        return Outcome(
            state=Sharded(layout),
            changed=_replacing(
                call, {node: call.as_sharded(node, layout) for node in (left, right)}
            ),
        )
    if a is not None and b is None and a.dim == rows:
        return Sharded(a)
    if b is not None and a is None and b.dim == columns:
        return Sharded(b)
    if (a is None or a.dim == inner) and (b is None or b.dim == rows):
        layout = a or b
        if layout is None:
            return Whole()
        cuts = {
            left: call.as_sharded(left, layout.moved(inner)),
            right: call.as_sharded(right, layout.moved(rows)),
        }
        return Outcome(state=Partial(), changed=_replacing(call, cuts))
    raise NotProvenError("its operands are chunked along dimensions that do not meet")


@rule(aten.mm.default)
def _mm(call: Call) -> Outcome | State:
    return _contract(call, call.operand("self"), call.operand("mat2"), batch_dims=0)


@rule(aten.bmm.default)
def _bmm(call: Call) -> Outcome | State:
    return _contract(call, call.operand("self"), call.operand("mat2"), batch_dims=1)


@rule(aten.addmm.default)
def _addmm(call: Call) -> Outcome | State:
    outcome = _contract(call, call.operand("mat1"), call.operand("mat2"), batch_dims=0)
    state = outcome.state if isinstance(outcome, Outcome) else outcome
    bias = call.operand("self")
    is_row = isinstance(call.state(bias), Whole) and call.rank(bias) == 1
    if not isinstance(state, Sharded) or state.layout.dim != 0 or not is_row:
        raise NotProvenError("its bias would be added once for each chunk, or is chunked itself")
    return outcome


@rule(aten._grouped_mm.default)
def _grouped_mm(call: Call) -> State:
    left, right = call.operand("self"), call.operand("mat2")
    states = (call.state(left), call.state(right))
    if call.rank(left) == call.rank(right) == 2 and not {Whole, Partial} & set(map(type, states)):
        # The gradient of the experts' weights, a sum over the tokens; every token is in one chunk.
        return Partial()
    raise NotProvenError("it is known for the gradient of weights only")


# Attention: samples do not see each other.


@rule(
    *[
        getattr(aten, f"_scaled_dot_product_{name}").default
        for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention")
        for name in (kind, f"{kind}_backward")
    ],
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)
def _attention(call: Call) -> Outcome:
    if call.get("dropout_p", 0.0) != 0.0:
        _refuse_random(call)
    batch = Layout(dim=0)
    cuts = {}
    for node in call.tensors:
        state = call.state(node)
        if isinstance(state, Sharded):
            if state.layout != batch:
                raise NotProvenError(f"attention needs the whole of dim {state.layout.dim}")
        elif isinstance(state, Partial):
            raise NotProvenError(f"its operand {node.name} is a term of a sum")
        elif isinstance(state, Whole) and call.rank(node) > 2 and call.shape(node)[0] != 1:
            cuts[node] = call.as_sharded(node, batch)
    results = call.node.meta["val"]
    states: list[State] = [
        Sharded(batch)
        if isinstance(result, torch.Tensor) and result.ndim > 2 and result.shape[0] == call.extent
        else Local()
        for result in results
    ]
    return Outcome(state=tuple(states), changed=_replacing(call, cuts))


# Lookups.


@rule(aten.embedding.default)
def _embedding(call: Call) -> State:
    indices = call.operand("indices")
    if not isinstance(call.state(call.operand("weight")), Whole):
        raise NotProvenError("its table is chunked")
    return call.like(indices, call.layout(indices))


@rule(aten.embedding_dense_backward.default)
def _embedding_backward(call: Call) -> Outcome | State:
    gradient, indices = call.operand("grad_output"), call.operand("indices")
    layout = call.layout(gradient) or call.layout(indices)
    if layout is None:
        raise NotProvenError("no operand is sharded")
    parts = {"grad_output": call.as_sharded(gradient, layout)}
    return Outcome(state=Partial(), changed={**parts, "indices": call.as_sharded(indices, layout)})


@rule(
    aten.gather.default,
    aten.scatter.value,
    aten.scatter.src,
    aten.scatter_add.default,
    aten.scatter_.value,
    aten.scatter_.src,
    aten.scatter_add_.default,
)
def _gather(call: Call) -> Outcome | State:
    layouts = [layout for node in call.tensors if (layout := call.layout(node)) is not None]
    if not layouts:
        raise NotProvenError("no operand is sharded")
    _other_dim(call, call.dim("dim", call.operand("self")), layouts[0])
    cuts = {node: call.as_sharded(node, layouts[0]) for node in call.tensors}
    return Outcome(
        state=call.joined_state(call.tensors, layouts[0]), changed=_replacing(call, cuts)
    )


@rule(aten.index.Tensor)
def _index(call: Call) -> State:
    source, indices = call.operand("self"), call.get("indices")
    leading = next((at for at, index in enumerate(indices) if index is not None), 0)
    given = indices[leading:]
    states = [call.state(index) for index in given if index is not None]
    if None in given or not isinstance(call.state(source), Whole):
        raise NotProvenError("it reads a chunked value at places that data decide")
    if not all(isinstance(state, Sharded) for state in states) or len(set(states)) > 1:
        raise NotProvenError("its indices are not all sharded alike")
    if len({call.rank(index) for index in given}) > 1 or any(
        index.meta["val"].dtype in (torch.bool, torch.uint8) for index in given
    ):
        raise NotProvenError("its indices differ in rank, or are masks")
    layout = call.layout(given[0])
    assert layout is not None
    return Sharded(layout.moved(layout.dim + leading))


# Constants.


@rule(
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default
)
def _constant_like(call: Call) -> State:
    state = call.state(call.operand("self"))
    if isinstance(state, Partial):
        return Whole()
    return Local(state.layout, permuted=state.permuted) if isinstance(state, Local) else state


@rule(aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default)
def _constant(call: Call) -> Outcome | State:
    """A constant does not depend on the chunk, but the buffer of a gradient is shaped like it.

    The backward of an operator that reads some elements begins with zeros in the shape of what the
    operator read: its shape says which of the sizes hold the extent.
    """
    sizes = call.get("size")
    if any(isinstance(size, Node) for size in sizes):
        return Local()
    partner = call.partner
    for source in () if partner is None else partner.all_input_nodes:
        value = source.meta.get("val")
        if isinstance(value, torch.Tensor) and tuple(value.shape) == tuple(sizes):
            layout = call.layout(source)
            if layout is not None:
                return Outcome(
                    state=call.like(source, layout), changed={"size": _sizes(sizes, layout)}
                )
            break
    return Whole()


def scattered(call: Call) -> State | None:
    """The state of a scatter of tokens, by the contract of expert-parallel regions.

    Inside them, rows are written to a buffer in token order at the places of the chunk's own
    tokens, and nowhere else.
    """
    destination = call.node.args[0] if call.node.args else None
    if call.node.target not in _SCATTERS or not isinstance(destination, Node):
        return None
    state = call.state(destination)
    return state if isinstance(state, (Sharded, Local)) else None


_SCATTERS = {
    aten.index_put.default,
    aten.index_put_.default,
    aten.scatter_add.default,
    aten.scatter_add_.default,
    aten.index_add.default,
    aten.index_add_.default,
    aten.index_copy.default,
}


def local_layout(call: Call, value: object) -> Layout | None:
    """Where the extent stands in ``value``, a result of which nothing else is known, by its sizes.

    A size that is that of a chunked dimension of an operand is taken to be chunked too, in the same
    dimension before others; the shape of every chunk is checked when it runs.
    """
    if not isinstance(value, torch.Tensor):
        return None
    known = [layout for node in call.tensors if (layout := call.layout(node)) is not None]
    fitting = [
        (dim != layout.dim, layout.moved(dim))
        for layout in known
        for dim, size in enumerate(value.shape)
        if isinstance(size, int) and size == layout.factor * call.extent  # type: ignore[redundant-expr]  # a size can be symbolic, whatever its type says
    ]
    return min(fitting, key=lambda found: found[0], default=(True, None))[1]
