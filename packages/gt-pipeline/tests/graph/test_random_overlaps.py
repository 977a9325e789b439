"""Overlapped pairs of random stages, with collectives in random places, give the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from exchange_stages import Exchange
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_models import ACTIVATION, RandomStage
from torch import Tensor

from gt_passes import Verifier
from gt_pipeline.graph import capture_stage, cut_stage, exposed_collectives
from gt_pipeline.graph.action_graph import ActionGraph
from gt_pipeline.graph.overlapped_actions import concatenate_actions, overlap_actions


class ExchangingStage(RandomStage):
    """A random stage; one of its pieces exchanges rows, of which this only rank keeps all."""

    PIECES = ("block", "scale", "count", "add", "multiply", "exchange", "exchange")

    def _piece(self, piece: str, index: int, x: Tensor, other: Tensor) -> Tensor:
        if piece != "exchange":
            return super()._piece(piece, index, x, other)
        rows = [x.shape[0]]
        return Exchange.apply(x * self.vectors[index], rows, rows, dist.group.WORLD.group_name)


pieces = st.lists(
    st.tuples(st.sampled_from(ExchangingStage.PIECES), st.integers(0, 5)), min_size=1, max_size=6
)


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@settings(max_examples=6, deadline=None)
@given(
    forward_pieces=pieces,
    backward_pieces=pieces,
    whole=st.booleans(),
    same_stage=st.booleans(),
)
def test_random_pairs_compute_the_same_bits_and_expose_no_more_than_a_sequence(
    forward_pieces: list[tuple[str, int]],
    backward_pieces: list[tuple[str, int]],
    whole: bool,
    same_stage: bool,
) -> None:
    first = cut_stage(
        capture_stage(
            ExchangingStage(forward_pieces, num_inputs=1, num_outputs=1),
            stage_index=1,
            num_stages=4,
            activations=[ACTIVATION],
        )
    )
    second = first
    if not same_stage:
        second = cut_stage(
            capture_stage(
                ExchangingStage(backward_pieces, num_inputs=1, num_outputs=1),
                stage_index=2,
                num_stages=4,
                activations=[ACTIVATION],
                fake_mode=first.capture.traced.fake_mode,
            )
        )
    backward = second.full_backward if whole else second.backward_input
    assert backward is not None
    pair = overlap_actions(first.forward, backward)
    sequence = concatenate_actions(first.forward, backward)
    assert Verifier().verify(pair.action.graph_module).problems == ()
    inputs = [
        torch.randn(node.meta["val"].shape)
        for node in pair.action.graph_module.graph.find_nodes(op="placeholder")
    ]
    assert _same(_run(pair.action, inputs), _run(sequence.action, inputs))
    assert len(exposed_collectives(pair.action.graph_module)) <= len(
        exposed_collectives(sequence.action.graph_module)
    )


def _run(action: ActionGraph, inputs: list[Tensor]) -> list[Tensor]:
    copies = [each.clone() for each in inputs]
    with torch.no_grad():
        return [*action.graph_module(*copies), *copies]


def _same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True)
    )
