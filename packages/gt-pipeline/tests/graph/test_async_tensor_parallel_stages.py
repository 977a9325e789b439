"""Collectives of tensor parallelism are fused with their products in each action of a stage."""

from __future__ import annotations

from token_parallel_stages import differences_of_fused_stages, fusing, token_parallel_stage

from gt_trace.testing import GlooWorkers, fake_world


def test_each_action_fuses_its_own() -> None:
    """dW has no collective of its own: what it reads was gathered for dI."""
    counts: dict[str, dict[str, int]] = {}
    with fake_world(rank=0, world_size=2):
        stage = token_parallel_stage(fusing(counts))
        stage.prepare_overlap(stage, "FULL_BACKWARD")
    once = {"all_gathers_fused": 1, "reduce_scatters_fused": 1}
    assert counts == {
        "FORWARD": once,
        "FULL_BACKWARD": once,
        "BACKWARD_INPUT": once,
        "BACKWARD_WEIGHT": {},
        "OVERLAP_F_B": dict.fromkeys(once, 2),
    }


def test_fused_actions_mean_the_same(two: GlooWorkers) -> None:
    for differences in two.run(differences_of_fused_stages):
        assert len(differences) == 9
        assert max(differences) < 1e-5
