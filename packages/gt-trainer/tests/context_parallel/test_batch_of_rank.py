"""Which tokens a rank has of a sequence that it shares, and whom they may attend to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gt_trainer.context_parallel.batch_of_rank import batch_of_rank
from gt_trainer.context_parallel.token_order import (
    ROUND_ROBIN_BLOCK,
    load_balancer_of,
    token_order,
)
from gt_trainer.decoder.attention import AttentionMaskError, document_causal_mask

BALANCERS = (None, "headtail", "ptrr")


def positions_of(*lengths):
    """(1, L), for documents of these lengths."""
    return torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)


def ranks(num_ranks):
    """What of a mesh is read."""
    return [
        SimpleNamespace(size=lambda: num_ranks, get_local_rank=lambda rank=rank: rank)
        for rank in range(num_ranks)
    ]


def test_without_a_balancer_ranks_have_one_part_after_the_other():
    order = token_order(positions_of(5, 3), num_ranks=2, load_balancer=None)
    assert order.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_headtail_gives_each_rank_a_part_of_the_head_and_its_mirror_image_of_the_tail():
    order = token_order(positions_of(8).expand(2, 8), num_ranks=2, load_balancer="headtail")
    assert order.tolist() == [[0, 1, 6, 7, 2, 3, 4, 5]] * 2


def test_ptrr_gives_ranks_as_many_blocks_with_keys_in_every_sample():
    blocks = 4
    length = blocks * ROUND_ROBIN_BLOCK
    half = length // 2
    positions = torch.cat([positions_of(length), positions_of(half, half)])
    order = token_order(positions, num_ranks=2, load_balancer="ptrr")
    firsts = order[:, ::ROUND_ROBIN_BLOCK] // ROUND_ROBIN_BLOCK
    # Blocks have 1, 2, 3 and 4 blocks of keys in the first sample, 1, 2, 1 and 2 in the second.
    assert firsts.tolist() == [[0, 3, 1, 2], [1, 2, 0, 3]]
    assert all(sorted(sample) == list(range(length)) for sample in order.tolist())


@pytest.mark.parametrize("balancer", BALANCERS)
def test_the_parts_of_all_ranks_are_the_batch_and_its_mask(balancer):
    length = 4 * ROUND_ROBIN_BLOCK
    positions = torch.cat([positions_of(length - 70, 70), positions_of(100, length - 100)])
    tokens = torch.arange(2 * length).reshape(2, length)
    parts = [
        batch_of_rank(
            {"input": tokens, "positions": positions}, tokens + 1, mesh, load_balancer=balancer
        )
        for mesh in ranks(2)
    ]
    order = token_order(positions, num_ranks=2, load_balancer=balancer)
    inputs = torch.cat([part[0] for part in parts], dim=1)
    assert torch.equal(inputs, tokens.gather(1, order))
    assert torch.equal(torch.cat([part[1] for part in parts], dim=1), inputs + 1)
    extra = [part[2] for part in parts]
    assert torch.equal(
        torch.cat([each["positions"] for each in extra], dim=1), positions.gather(1, order)
    )
    mask = torch.cat([each["attention_masks"] for each in extra], dim=2)
    assert mask.shape == (2, 1, length, length)
    back = torch.argsort(order, dim=1)
    for sample, whole in enumerate(document_causal_mask(positions)):
        in_order = mask[sample, 0][back[sample]][:, back[sample]]
        assert torch.equal(in_order, whole[0])


def test_a_batch_without_positions_is_an_error():
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(AttentionMaskError, match="the batch holds no 'positions'"):
        batch_of_rank({"input": tokens}, tokens, ranks(2)[0], load_balancer=None)


def test_an_unknown_balancer_is_an_error():
    assert [load_balancer_of(name) for name in BALANCERS] == list(BALANCERS)
    with pytest.raises(ValueError, match="no load balancer 'best'; allowed: None, headtail, ptrr"):
        load_balancer_of("best")
