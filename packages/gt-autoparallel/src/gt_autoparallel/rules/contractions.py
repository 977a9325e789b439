"""Matrix products, written as einsums: linear in each factor, summed over the letters that go.

A partial factor gives a partial product, but saves nothing: it can be moved before or after, and
before it every rank would compute the whole product. So products have no option with it.
"""

from __future__ import annotations

from torch.distributed.tensor import Partial

from gt_autoparallel.rules.dim_labels import DimLabels
from gt_autoparallel.rules.operator_call import OperatorCall
from gt_autoparallel.rules.operator_rule import Rule, Rules, labelled, rules_of
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


RULES: Rules = {
    **rules_of(("mm",), _einsum("mk,kn->mn")),
    **rules_of(("bmm",), _einsum("bmk,bkn->bmn")),
    **rules_of(("mv",), _einsum("mk,k->m")),
    **rules_of(("dot", "vdot"), _einsum("k,k->")),
    **rules_of(("addmm",), _added_product("mk,kn->mn"), localize=_add_on_first_rank),
    **rules_of(("baddbmm",), _added_product("bmk,bkn->bmn"), localize=_add_on_first_rank),
    **rules_of(("linear",), labelled(_linear_labels), localize=_bias_on_first_rank),
    **rules_of(("matmul",), labelled(_matmul_labels)),
}
