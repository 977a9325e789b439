"""What FlexAttention does to chunks of samples, proven from the functions that it is given.

Samples do not see each other, but scores and masks are functions of a sample's *number*, and in a
chunk samples are numbered from zero. A mask of packed documents looks its numbers up in tensors of
the whole batch; in a chunk's part of them, the chunk's numbers find the same. So a function may use
the number as the first index of such tensors, of which each chunk is given its part, and for
nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from gt_passes.analysis.node_calls import subgraph_of
from gt_passes.ep_overlap.chunk_rules import Dims, follow
from gt_passes.ep_overlap.chunk_states import Local, Sharded
from gt_passes.ep_overlap.rule_calls import NotProvenError, RuleCall, RuleOutcome, rule

__all__: list[str] = []

aten: Any = torch.ops.aten

_SHAPED_LIKE_AN_INDEX = frozenset(
    {
        aten.new_ones.default,
        aten.new_zeros.default,
        aten.new_full.default,
        aten.new_empty.default,
        aten.ones_like.default,
        aten.zeros_like.default,
        aten.full_like.default,
    }
)
"""Constants for which an operand gives a shape and a device, and nothing of its value."""

_NUM_MASK_INDICES = 4
"""Sample, head, query, key; tensors of the mask follow."""

_BATCH = "batch"


@rule(torch.ops.higher_order.flex_attention)
def _forward(call: RuleCall) -> RuleOutcome:
    q, k, v, score, block_mask, _, _, score_tensors, mask_tensors = call.node.args
    _check_scores(call, [score], score_tensors)
    operands = [*_of_samples([q, k, v]), *_mask_operands(call, block_mask, mask_tensors)]
    return follow(call, operands, [[_BATCH]] * len(call.results))


@rule(torch.ops.higher_order.flex_attention_backward)
def _backward(call: RuleCall) -> RuleOutcome:
    *tensors, score, joint, block_mask, _, _, score_tensors, mask_tensors = call.node.args
    _check_scores(call, [score, joint], score_tensors)
    *gradients, of_score_tensors = call.results
    if any(gradient is not None for gradient in of_score_tensors):
        raise NotProvenError("its scores are computed from tensors that need gradients")
    operands = [*_of_samples(tensors), *_mask_operands(call, block_mask, mask_tensors)]
    outcome = follow(call, operands, [[_BATCH]] * len(gradients))
    assert isinstance(outcome.state, tuple)
    return RuleOutcome(state=(*outcome.state, Local()), cuts=outcome.cuts)


def _of_samples(values: Any) -> list[tuple[Node, Dims]]:
    """The tensors among some values, each with the samples in front."""
    return [
        (value, [_BATCH, *[None] * (value.meta["val"].ndim - 1)])
        for value in values
        if isinstance(value, Node)
    ]


def _mask_operands(call: RuleCall, block_mask: Any, tensors: Any) -> list[tuple[Node, Dims]]:
    """The tensors of a mask that belong to samples: of blocks, and what its function looks up."""
    *blocks, mask_function = block_mask
    graph_module = subgraph_of(mask_function)
    assert graph_module is not None  # FlexAttention always has a mask function
    parameters = graph_module.graph.find_nodes(op="placeholder")
    sample, own = parameters[0], parameters[_NUM_MASK_INDICES:]
    lookups = [user for user in sample.users if user.target not in _SHAPED_LIKE_AN_INDEX]
    for lookup in lookups:
        if not _looks_up_a_sample(lookup, sample) or lookup.args[0] not in own:
            raise NotProvenError(
                "its mask function uses the number of a sample for other things than to look it "
                f"up in a tensor of the batch: {lookup.target}"
            )
    looked_up = {lookup.args[0] for lookup in lookups}
    found = _of_samples(blocks)
    for parameter, tensor in zip(own, tensors, strict=True):
        if not isinstance(tensor, Node):
            continue  # a number
        if parameter not in looked_up:
            _check_same_for_all(call, tensor, "its mask function")
        elif all(_looks_up_a_sample(user, sample) for user in parameter.users):
            found += _of_samples([tensor])
        else:
            raise NotProvenError(
                f"its mask function reads {tensor.name} for its own sample, and for others"
            )
    return found


def _looks_up_a_sample(user: Node, sample: Node) -> bool:
    """Whether a node is ``tensor[sample, ...]``, and reads the number of the sample there alone."""
    if user.target is not aten.index.Tensor:
        return False
    _, indices = user.args
    assert isinstance(indices, (list, tuple))
    return indices[0] is sample and all(index is not sample for index in indices[1:])


def _check_scores(call: RuleCall, functions: list[Any], tensors: Any) -> None:
    """Refuse scores that depend on which sample they are of."""
    for function in functions:
        graph_module = subgraph_of(function)
        assert isinstance(graph_module, GraphModule)
        sample = graph_module.graph.find_nodes(op="placeholder")[1]  # behind the score
        used = [user for user in sample.users if user.target not in _SHAPED_LIKE_AN_INDEX]
        if used:
            raise NotProvenError(
                f"its score function uses the number of a sample: {used[0].target}"
            )
    for tensor in tensors:
        if isinstance(tensor, Node):
            _check_same_for_all(call, tensor, "its score function")


def _check_same_for_all(call: RuleCall, tensor: Node, reader: str) -> None:
    if isinstance(call.state(tensor), (Sharded, Local)):
        raise NotProvenError(f"{reader} reads {tensor.name}, of which each chunk has a part")
