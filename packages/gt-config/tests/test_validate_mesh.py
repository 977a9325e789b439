"""Rules of the mesh and the batch, one by one, with the exact text."""

import dataclasses

import pytest
from asked import found, mesh, only
from hypothesis import given
from hypothesis import strategies as st

from gt_config import Topology, Violation


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize(
    "field",
    [f.name for f in dataclasses.fields(Topology) if f.name != "sequence_parallel"],
)
def test_refuses_degrees_and_extents_below_one(field, value):
    # One violation: no rule is run on a degree that is wrong by itself.
    violation = only(topology=mesh(**{field: value}))
    assert (violation.value, violation.allowed) == (value, "1 or more")


def test_suggests_the_shard_degree_that_would_fill_the_world():
    assert only(topology=mesh(world=8, dp_shard=2, tp=2)) == Violation(
        flag="world size",
        value=8,
        allowed="dp_replicate 1 * dp_shard 2 * cp 1 * tp 2 * pp 1 = 4",
        fix="start 4 processes, or change a degree (for example "
        "--parallelism.data_parallel_shard_degree 4)",
    )


degrees = st.integers(1, 6)


@given(dp_replicate=degrees, dp_shard=degrees, cp=degrees, tp=degrees, pp=degrees, ep=degrees)
def test_accepts_exactly_the_meshes_that_fit(dp_replicate, dp_shard, cp, tp, pp, ep):
    world = dp_replicate * dp_shard * cp * tp * pp
    topology = Topology(
        world=world,
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
        cp=cp,
        tp=tp,
        pp=pp,
        ep=ep,
        batch_size=1,
        seq_len=2 * cp * tp,
    )
    fits = (dp_shard * cp * tp) % ep == 0
    assert (found(topology=topology) == ()) == fits
    too_large = dataclasses.replace(topology, world=world + 1)
    assert "world size" in {violation.flag for violation in found(topology=too_large)}


@pytest.mark.parametrize(
    ("changes", "allowed", "fix"),
    [
        (
            {"world": 4, "tp": 4, "seq_len": 10},
            "a multiple of 4 (tp 4)",
            "use 12, or smaller degrees",
        ),
        (
            {"world": 2, "cp": 2, "seq_len": 6},
            "a multiple of 4 (2 * cp 2)",
            "use 8, or smaller degrees",
        ),
        (
            {"world": 6, "cp": 2, "tp": 3, "seq_len": 20},
            "a multiple of 12 (tp 3 * 2 * cp 2)",
            "use 24, or smaller degrees",
        ),
    ],
)
def test_refuses_a_sequence_that_does_not_divide(changes, allowed, fix):
    violation = only(topology=mesh(**changes))
    assert violation.flag == "--training.seq_len"
    assert (violation.allowed, violation.fix) == (allowed, fix)


def test_without_sequence_parallelism_the_sequence_need_not_divide_over_tp():
    topology = mesh(world=4, tp=4, seq_len=10, sequence_parallel=False)
    assert found(topology=topology) == ()
