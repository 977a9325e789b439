"""Where a graph is cut into recordable pieces."""

from __future__ import annotations

import torch
from device_graphs import capture_on
from hypothesis import given
from hypothesis import strategies as st
from pass_graphs import collectives

from gt_passes.cuda_graphs.cuda_graph_safety import CaptureTarget
from gt_passes.cuda_graphs.cuda_graphs import _Spans, partition

X = torch.empty(4, 4, device="meta")
CUDA = CaptureTarget(backend_of_group={"tp": "nccl"}.get)


def cut(graph_module, min_kernels=1, num_static_inputs=0):
    parts = partition(
        graph_module, CUDA, num_static_inputs=num_static_inputs, min_kernels=min_kernels
    )
    pieces = [" ".join(node.name for node in piece) for piece in parts.pieces]
    return pieces, {obstacle.node.name: obstacle.reason for obstacle in parts.obstacles}


def gather(x):
    return collectives.all_gather_into_tensor(x, 2, "tp")


def synchronize(x):
    return x.sum().item()


def test_a_graph_without_obstacles_is_one_piece():
    pieces, obstacles = cut(capture_on(lambda x: x.sin().cos().exp(), X))
    assert pieces == ["sin cos exp"]
    assert obstacles == {}


def test_an_obstacle_cuts():
    pieces, obstacles = cut(capture_on(lambda x: (x.sin().cos(), synchronize(x), x.exp()), X))
    assert pieces == ["sin cos sum_1", "exp"]
    assert list(obstacles) == ["_local_scalar_dense"]


def test_small_pieces_are_left_alone():
    def step(x):
        return x.sin().cos().tan(), synchronize(x), x.exp().view(-1)

    pieces, obstacles = cut(capture_on(step, X), min_kernels=2)
    assert pieces == ["sin cos tan sum_1"]
    assert obstacles["exp"] == "fewer than 2 kernels stand together here"
    assert obstacles["view"] == "fewer than 2 kernels stand together here"


def test_a_collective_whose_wait_is_in_the_same_piece_is_recorded():
    def step(x):
        launched = gather(x)
        y = x.sin()
        return collectives.wait_tensor(launched), y, synchronize(x)

    pieces, _ = cut(capture_on(step, X))
    assert pieces == ["all_gather_into_tensor sin wait_tensor sum_1"]


def test_a_collective_around_an_obstacle_runs_on_its_own():
    """
    sin  all-gather  cos  ITEM  exp  wait  tan   =>   [sin] all-gather [cos] ITEM [exp] wait [tan]
    """

    def step(x):
        y = x.sin()
        launched = gather(x)
        z = y.cos()
        n = z.sum().item()
        return z.exp(), collectives.wait_tensor(launched).tan(), n

    pieces, obstacles = cut(capture_on(step, X))
    assert pieces == ["sin", "cos sum_1", "exp", "tan"]
    assert obstacles == {
        "all_gather_into_tensor": "_local_scalar_dense, which is not recorded, stands between it and its wait",
        "_local_scalar_dense": "aten::_local_scalar_dense brings a result of the device to the host",
        "wait_tensor": "_local_scalar_dense, which is not recorded, stands between all_gather_into_tensor and its wait",
    }  # fmt: skip


def test_prefetches_that_overlap_fall_one_after_the_other():
    """
    a launched, ITEM, b launched, a awaited, c launched, b awaited, c awaited
    """

    def step(x):
        a = gather(x)
        n = synchronize(x)
        b = gather(x + 1)
        a = collectives.wait_tensor(a)
        c = gather(x + 2)
        b = collectives.wait_tensor(b)
        c = collectives.wait_tensor(c)
        later = collectives.wait_tensor(gather(x + 3))
        return a, b, c, n, later

    pieces, obstacles = cut(capture_on(step, X))
    names = [name for name in obstacles if "gather" in name or "wait" in name]
    assert names == [
        "all_gather_into_tensor", "all_gather_into_tensor_1", "wait_tensor",
        "all_gather_into_tensor_2", "wait_tensor_1", "wait_tensor_2",
    ]  # fmt: skip
    assert pieces[-1] == "add_2 all_gather_into_tensor_3 wait_tensor_3"


def test_a_write_to_what_runs_on_its_own_runs_on_its_own():
    def step(x):
        launched = gather(x)
        n = synchronize(x)
        gathered = collectives.wait_tensor(launched)
        gathered.add_(1)
        return gathered.sin(), n

    _, obstacles = cut(capture_on(step, X))
    assert (
        obstacles["add_"] == "it reads wait_tensor, which is written to and whose address changes"
    )
    assert "sin" in obstacles


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=20),
    st.lists(st.integers(0, 30), max_size=5),
)
def test_the_spans_around_a_position_are_those_a_search_of_all_finds(spans, positions):
    spans.sort()
    left = dict(enumerate(spans))
    found = _Spans(spans)
    for position in positions:
        expected = [number for number, (start, end) in left.items() if start < position < end]
        assert sorted(found.take_around(position)) == expected
        for number in expected:
            del left[number]
