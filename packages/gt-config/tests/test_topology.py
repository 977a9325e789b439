"""The topology's flags."""

import dataclasses

from gt_config import Topology
from gt_config.topology import TOPOLOGY_FLAGS


def test_every_field_has_the_name_by_which_a_user_sets_it():
    assert set(TOPOLOGY_FLAGS) == {field.name for field in dataclasses.fields(Topology)}


def test_a_single_process_needs_only_its_extents():
    single = Topology(world=1, batch_size=8, seq_len=2048)
    degrees = (single.dp_replicate, single.dp_shard, single.cp, single.tp, single.ep, single.pp)
    assert degrees == (1, 1, 1, 1, 1, 1)
