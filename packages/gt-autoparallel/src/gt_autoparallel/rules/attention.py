"""Fused scaled dot product attention: batch and heads, and query rows where nothing is causal.

Each batch entry and each head is a computation of its own. With fewer key-value heads than heads,
both are cut into the same number of pieces, so that a piece has the heads that share its keys. A
query row sees all keys: it may be sharded with keys and values replicated, whose gradients are then
sums, unless the kernel masks by the row's number itself (``is_causal``) or pads its rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from gt_autoparallel.graph.options import AxisOption
from gt_autoparallel.rules.dim_labels import REPLICATE, DimLabels, Labels, axis_options
from gt_autoparallel.rules.operator_call import OperatorCall
from gt_autoparallel.rules.operator_rule import Rules, rules_of
from gt_autoparallel.rules.pointwise import broadcast_labels

_LIKE_QUERIES = ("grad_out", "grad_out_", "query", "out", "logsumexp")
_LIKE_KEYS = ("key", "value")
_MASKS = ("attn_mask", "attn_bias")
_SEPARATE_ROWS = "_scaled_dot_product_flash_attention_for_cpu"
"""Prefix of the kernels whose rows may be sharded."""


def _attention(call: OperatorCall) -> Iterator[AxisOption]:
    queries, keys = _labels(call)
    if "out" in call.arguments:
        yield from axis_options(
            DimLabels(
                operands=_operand_labels(call, queries, keys),
                outputs=_present(call, (queries, keys, keys, _mask_labels(call, queries))),
                summed=frozenset(queries),
            )
        )
        return
    # What else the forward gives is of dropout or debugging: the same on every rank.
    labels = DimLabels(
        operands=_operand_labels(call, queries, keys), outputs=(queries, queries[:3])
    )
    others = tuple(None if spec is None else REPLICATE for spec in call.outputs[2:])
    for option in axis_options(labels):
        yield dataclasses.replace(option, outputs=(*option.outputs, *others))


def _labels(call: OperatorCall) -> tuple[Labels, Labels]:
    """Labels of (batch, heads, rows, width): those of queries, then those of keys and values."""
    name = str(call.target).split(".")[1]
    rows = "rows" if name.startswith(_SEPARATE_ROWS) and not call.arguments["is_causal"] else None
    return ("batch", "heads", rows, None), ("batch", "heads", None, None)


def _operand_labels(call: OperatorCall, queries: Labels, keys: Labels) -> tuple[Labels, ...]:
    labels: list[Labels] = [(None,) * len(spec.shape) for spec in call.operands]
    for names, of_names in ((_LIKE_QUERIES, queries), (_LIKE_KEYS, keys)):
        for index in (call.index(name) for name in names):
            if index is not None:
                labels[index] = of_names[: len(call.operands[index].shape)]
    for index in (call.index(name) for name in _MASKS):
        if index is not None:
            labels[index] = _mask_labels(call, queries)
    return tuple(labels)


def _mask_labels(call: OperatorCall, queries: Labels) -> Labels:
    """A mask broadcasts to (batch, heads, rows, columns)."""
    index = next((i for name in _MASKS if (i := call.index(name)) is not None), None)
    if index is None:
        return ()
    scores = (*call.spec("query").shape[:3], call.spec("key").shape[2])
    places = broadcast_labels(call.operands[index].shape, scores)
    return tuple(None if place is None else (*queries[:3], None)[place] for place in places)


def _present(call: OperatorCall, labels: tuple[Labels, ...]) -> tuple[Labels | None, ...]:
    return tuple(
        None if spec is None else of_output
        for spec, of_output in zip(call.outputs, labels, strict=False)
    )


RULES: Rules = {
    **rules_of(
        tuple(
            f"_scaled_dot_product_{kernel}{suffix}"
            for kernel in (
                "cudnn_attention",
                "efficient_attention",
                "flash_attention",
                "flash_attention_for_cpu",
            )
            for suffix in ("", "_backward")
        ),
        _attention,
    ),
}
