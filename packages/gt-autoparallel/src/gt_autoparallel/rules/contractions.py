"""Matrix products, written as einsums: linear in each factor, summed over the letters that go.

A partial factor gives a partial product, but saves nothing: it can be moved before or after, and
before it every rank would compute the whole product. So products have no option with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed.tensor import Partial

from gt_autoparallel.graph.layouts import MeshShape, local_shape
from gt_autoparallel.graph.options import AxisOption, NodeOption
from gt_autoparallel.rules.dim_labels import DimLabels, Labels, axis_options
from gt_autoparallel.rules.operator_call import OperatorCall
from gt_autoparallel.rules.operator_rule import OperatorRule, Rule, Rules, labelled, rules_of
from gt_autoparallel.rules.pointwise import broadcast_labels
from gt_autoparallel.rules.sharded_call import LocalCall, ShardedCall


def einsum_labels(equation: str) -> DimLabels:
    """The labels of ``"mk,kn->mn"``: a letter that only operands have is summed over."""
    left, _, right = equation.partition("->")
    operands = tuple(tuple(operand) for operand in left.split(","))
    summed = frozenset(letter for operand in operands for letter in operand if letter not in right)
    return DimLabels(operands=operands, outputs=(tuple(right),), summed=summed)


def _einsum(equation: str) -> Rule:
    labels = einsum_labels(equation)
    return labelled(lambda call: labels)


def _added_product(equation: str) -> Rule:
    """``addmm``: something that broadcasts to the product is added to it, once."""
    product = einsum_labels(equation)
    output = product.outputs[0]
    assert output is not None

    def labels(call: OperatorCall) -> DimLabels:
        places = broadcast_labels(call.operands[0].shape, call.output().shape)
        added = tuple(None if place is None else output[place] for place in places)
        return DimLabels(
            operands=(added, *product.operands), outputs=product.outputs, summed=product.summed
        )

    return labelled(labels)


def _add_on_first_rank(sharded: ShardedCall) -> LocalCall:
    """Where ranks' products are to be summed, only the first of them adds."""
    return sharded.with_arguments(beta=sharded.call.arguments["beta"] if _adds(sharded) else 0)


def _adds(sharded: ShardedCall) -> bool:
    return not any(
        isinstance(placement, Partial) and index > 0
        for placement, index in zip(sharded.option.output(), sharded.coordinate, strict=True)
    )


def _linear_labels(call: OperatorCall) -> DimLabels:
    """``linear(input[..., k], weight[n, k], bias[n])``."""
    leading = tuple(range(len(call.spec("input").shape) - 1))
    return DimLabels(
        operands=((*leading, "k"), ("n", "k"), ("n",))[: len(call.operands)],
        outputs=((*leading, "n"),),
        summed=frozenset("k"),
    )


def _bias_on_first_rank(sharded: ShardedCall) -> LocalCall:
    return sharded.with_arguments() if _adds(sharded) else sharded.with_arguments(bias=None)


def _matmul_labels(call: OperatorCall) -> DimLabels:
    """``matmul``: products of the last two dims, broadcast over those before them."""
    left, right = call.operands
    batch = call.output().shape[: max(len(left.shape), len(right.shape), 2) - 2]
    left_batch = broadcast_labels(left.shape[:-2], batch)
    right_batch = broadcast_labels(right.shape[:-2], batch)
    row = ("m",) if len(left.shape) > 1 else ()
    column = ("n",) if len(right.shape) > 1 else ()
    return DimLabels(
        operands=((*left_batch, *row, "k"), (*right_batch, "k", *column)),
        outputs=((*range(len(batch)), *row, *column),),
        summed=frozenset("k"),
    )


def _grouped_product(call: OperatorCall) -> DimLabels:
    """``_grouped_mm``: a product for each group of rows or columns that lie behind one another.

    Offsets say where a group ends in the whole tensor, so that the dim with the groups stays whole.
    """
    left, right = (len(operand.shape) for operand in call.operands[:2])
    offsets = call.arguments["offs"] is not None
    equation = {
        (2, 3): "_k,_kn->_n",  # rows in groups, and a matrix for each
        (3, 2): "_mk,k_->m_",
        (2, 2): "m_,_n->_mn",  # what is summed over is in groups
        (3, 3): "gmk,gkn->gmn",
    }[left, right]
    labels = einsum_labels(equation)

    def without_groups(dims: Labels) -> Labels:
        return tuple(None if label == "_" else label for label in dims)

    (output,) = labels.outputs
    assert output is not None
    return DimLabels(
        operands=(*map(without_groups, labels.operands), *((None,),) * offsets),
        outputs=(without_groups(output),),
        summed=labels.summed,
    )


def _grouped_options(call: OperatorCall) -> Iterable[AxisOption]:
    if call.arguments["bias"] is not None:
        return ()  # its rows are in groups, too: nobody has needed to say how
    return axis_options(_grouped_product(call))


def _rows_are_aligned(call: OperatorCall, option: NodeOption, mesh: MeshShape) -> bool:
    """Kernels of grouped products take rows of a multiple of 16 bytes."""
    inputs = zip(call.operands[:2], option.operands[:2], strict=True)
    for spec, layout in (*inputs, (call.output(), option.output())):
        # Which of the last two dims lies densely, strides say; a cut keeps the order.
        dense = min((-1, -2), key=lambda dim: spec.stride[dim])
        length = local_shape(spec.shape, layout, mesh)[dense]
        if length != spec.shape[dense] and length * spec.dtype.itemsize % 16:
            return False
    return True


RULES: Rules = {
    "aten._grouped_mm": OperatorRule(
        options=_grouped_options, localize=None, fits=_rows_are_aligned
    ),
    **rules_of(("mm",), _einsum("mk,kn->mn")),
    **rules_of(("bmm",), _einsum("bmk,bkn->bmn")),
    **rules_of(("mv",), _einsum("mk,k->m")),
    **rules_of(("dot", "vdot"), _einsum("k,k->")),
    **rules_of(("addmm",), _added_product("mk,kn->mn"), localize=_add_on_first_rank),
    **rules_of(("baddbmm",), _added_product("bmk,bkn->bmn"), localize=_add_on_first_rank),
    **rules_of(("linear",), labelled(_linear_labels), localize=_bias_on_first_rank),
    **rules_of(("matmul",), labelled(_matmul_labels)),
}
