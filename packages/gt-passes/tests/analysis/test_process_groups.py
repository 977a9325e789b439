"""Whether two process groups are axes of one mesh."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from gt_passes.analysis.process_groups import are_axes_of_one_mesh, place_in_group
from gt_trace.testing import fake_world


@pytest.mark.parametrize("rank", [0, 5])
def test_axes_of_a_mesh_are_and_so_are_axes_flattened_with_others(rank):
    with fake_world(rank=rank, world_size=8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "fsdp", "tp"))
        axes = [mesh[name] for name in ("dp", "fsdp", "tp")]
        axes += [mesh["dp", "fsdp"]._flatten("dp_fsdp"), mesh["fsdp", "tp"]._flatten("fsdp_tp")]
        names = [axis.get_group().group_name for axis in axes]
        for first in names:
            assert are_axes_of_one_mesh(first, first)
            for second in names:
                if {first, second} != {names[3], names[4]}:  # these overlap
                    assert are_axes_of_one_mesh(first, second)


@pytest.mark.parametrize(
    ("first", "second"),
    [((0, 1, 2), (0, 2)), ((0, 1, 2), (0, 4)), ((0, 3, 5), (0, 1)), ((0, 2, 4), (0, 3))],
)
def test_groups_that_cut_ranks_across_each_other_are_not(first, second):
    with fake_world(rank=0, world_size=12):
        names = [dist.new_group(list(ranks)).group_name for ranks in (first, second)]
        assert not are_axes_of_one_mesh(*names)
        assert not are_axes_of_one_mesh(*reversed(names))


def test_of_groups_that_this_process_has_not_nothing_is_known():
    assert not are_axes_of_one_mesh("fsdp", "tp")


def test_a_process_has_its_place_in_the_groups_that_it_is_in():
    assert place_in_group("0") is None
    with fake_world(rank=5, world_size=8):
        mine = dist.new_group([3, 5, 7]).group_name
        assert place_in_group(mine) == 1
        assert place_in_group("of nobody") is None
