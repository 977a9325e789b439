"""What of a device mesh its shape remembers."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gt_autoparallel.graph.layouts import MeshShape
from gt_trace.testing import fake_world


@pytest.mark.parametrize("sizes", [(2, 4), (8, 1), (1, 8)])
def test_ranks_fill_a_mesh_row_by_row_unless_it_says_otherwise(sizes: tuple[int, int]) -> None:
    with fake_world(rank=5, world_size=8):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b"))
        assert MeshShape.of(mesh) == MeshShape(names=("a", "b"), sizes=sizes)


def test_axes_may_be_in_another_order_than_ranks() -> None:
    with fake_world(rank=5, world_size=8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
        turned = DeviceMesh.from_group(
            [mesh.get_group("b"), mesh.get_group("a")],
            "cpu",
            mesh.mesh.t(),
            mesh_dim_names=("b", "a"),
        )
        shape = MeshShape.of(turned)
    assert shape == MeshShape(names=("b", "a"), sizes=(4, 2), strides=(1, 4))
    assert [shape.ranks_of_axis(axis) for axis in range(2)] == [(0, 1, 2, 3), (0, 4)]
