"""What recordings keep: shared by the lifetime of what is in it, and said in the report."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from memory_models import Captured, Mlp, capture_stack, run
from pass_graphs import capture, node_of, run_pass, same_bits
from recorded_step_cases import ON_CPU

from gt_config.node_keys import ResidencyAnnotation
from gt_passes import CanonicalizeViews, CudaGraphs, OffloadTagged, RemoveDeadCode
from gt_passes.analysis.host_copies import OFFLOAD
from gt_passes.analysis.outlined_region import nodes_with_bodies
from gt_passes.cuda_graphs.piece_memory import PieceMemory, Place
from gt_passes.testing import FakeRecorder
from gt_trace.node_metadata import write_annotation

X = torch.linspace(-1, 1, 256).reshape(16, 16)
NUM_BYTES = 16 * 16 * 4


def recording(recorder: FakeRecorder) -> CudaGraphs:
    return CudaGraphs(target=ON_CPU, new_recorder=lambda: recorder, min_kernels=2)


def chain(x: torch.Tensor, count: torch.Tensor) -> tuple[object, ...]:
    """x -> [sin cos] ITEM [sin cos] ITEM ...: what crosses is read by the next piece alone."""
    numbers = []
    for _ in range(6):
        x = x.sin().cos()
        numbers.append(count.item())
    return x, *numbers


def test_results_that_nobody_reads_any_more_give_their_memory_to_later_pieces():
    """What is read by the next piece alone takes the room of two, however many pieces there are."""
    recorder, count = FakeRecorder(), torch.tensor(3)
    graph_module = capture(chain, X, count)
    report = run_pass(recording(recorder), graph_module)
    assert report.counts["pieces"] == 6
    assert report.counts["bytes_between_pieces"] == 2 * NUM_BYTES
    for number in range(5):
        assert same_bits(graph_module(X + number, count)[0], chain(X + number, count)[0])
    assert recorder.bytes_of_results == report.counts["bytes_between_pieces"]


def test_results_that_are_read_at_the_end_keep_their_memory():
    def step(x, count):
        results = []
        for _ in range(4):
            x = x.sin().cos()
            results.append(x)
            count.item()
        return sum(results)

    recorder, count = FakeRecorder(), torch.tensor(3)
    graph_module = capture(step, X, count)
    report = run_pass(recording(recorder), graph_module)
    for number in range(5):
        assert same_bits(graph_module(X + number, count), step(X + number, count))
    assert report.counts["bytes_between_pieces"] == 5 * NUM_BYTES
    assert recorder.bytes_of_results <= 5 * NUM_BYTES


def test_inputs_are_copied_to_memory_that_all_pieces_share():
    """Each read, by one piece, of something that was made on its own."""

    def step(x):
        results = []
        for _ in range(5):
            made_outside = torch.ops.gt_passes_test.unknown(x)
            results.append((made_outside.sin() * 2).sum())
        return results

    with torch.library._scoped_library("gt_passes_test", "DEF") as library:
        library.define("unknown(Tensor x) -> Tensor")
        library.impl("unknown", lambda x: x + 1, "CompositeExplicitAutograd")
        recorder = FakeRecorder()
        graph_module = capture(step, X)
        report = run_pass(recording(recorder), graph_module)
        assert report.counts["pieces"] == 5
        assert report.counts["bytes_of_copied_inputs"] == NUM_BYTES
        for number in range(5):
            assert same_bits(graph_module(X + number), step(X + number))
        assert recorder.memory_bytes == NUM_BYTES


def test_an_input_of_which_a_result_is_a_view_keeps_a_place_of_its_own():
    def step(x, y, count):
        first, view = (x.sin() * 2).cos(), x[1:]
        count.item()
        second = (y.sin() * 2).cos()
        count.item()
        return (view.sum() + first.sum()) * second.sum()

    recorder, count = FakeRecorder(), torch.tensor(3)
    graph_module = capture(step, X, X + 1, count)
    report = run_pass(recording(recorder), graph_module)
    assert report.counts["pieces"] == 3
    assert report.counts["bytes_of_copied_inputs"] == 2 * NUM_BYTES
    for number in range(5):
        assert same_bits(graph_module(X, X + number, count), step(X, X + number, count))


def test_an_input_that_repeats_its_elements_is_copied_as_it_is_stored():
    def step(x, count):
        return (x.sin() * 2).cos() + count.item()

    recorder, count = FakeRecorder(), torch.tensor(3)
    rows = torch.linspace(-1, 1, 16).expand(16, 16)
    graph_module = capture(step, rows, count)
    run_pass(recording(recorder), graph_module)
    for number in range(4):
        repeated = (torch.linspace(-1, 1, 16) + number).expand(16, 16)
        assert same_bits(graph_module(repeated, count), step(repeated, count))


def offloaded_stack(num_layers: int = 4) -> Captured:
    """A training step that keeps the first product of two layers in host memory."""
    captured = capture_stack([Mlp(4) for _ in range(num_layers)])
    run(captured, RemoveDeadCode(), CanonicalizeViews())
    for name in ("mm", "mm_2"):
        annotation = ResidencyAnnotation(residency="offload")
        write_annotation(node_of(captured.graph_module, name), annotation)
    (record,) = run(captured, OffloadTagged()).records
    assert record.report.counts["tensors_offloaded"] == 2
    return captured


def test_a_step_with_offload_is_recorded_as_one_piece_with_host_memory_that_stays():
    recorder = FakeRecorder()
    captured = offloaded_stack()
    plain = copy.deepcopy(captured.graph_module)
    (record,) = run(captured, recording(recorder)).records
    assert record.report.refusals == ()
    assert record.report.counts["pieces"] == 1
    offloaded = node_of(plain, "mm").meta["val"]
    assert record.report.counts["host_bytes"] == 2 * 512 >= 2 * offloaded.numel() * 4
    assert any(node.target is OFFLOAD for node in nodes_with_bodies(captured.graph_module))
    expected = captured.step.bind(captured.model, executable=plain)
    replayed = captured.step.bind(captured.model)
    for number in range(4):
        inputs = [value + number for value in captured.args]
        assert same_bits(replayed(*inputs), expected(*inputs))
    assert recorder.num_recorded == 1


def test_a_copy_whose_wait_is_in_another_piece_is_not_recorded():
    def step(x, count):
        y = x.sin()
        started = OFFLOAD(y)
        count.item()
        host = torch.ops.gt_passes.wait_copy(started, y)
        back = torch.ops.gt_passes.wait_copy(torch.ops.gt_passes.reload(host, X.device), host)
        return (back.cos() * 2).sum()

    recorder, count = FakeRecorder(), torch.tensor(3)
    graph_module = capture(step, X, count)
    report = run_pass(recording(recorder), graph_module)
    reasons = {refusal.node_name: refusal.reason for refusal in report.refusals}
    between = "_local_scalar_dense, which is not recorded,"
    assert reasons["offload"] == f"{between} stands between it and its wait"
    assert reasons["wait_copy"] == f"{between} stands between offload and its wait"
    assert reasons["reload"] == "it copies wait_copy, whose address changes"
    assert "cos" not in reasons
    for number in range(4):
        assert same_bits(graph_module(X + number, count), step(X + number, count))


def test_what_waits_on_the_host_crosses_from_one_piece_to_another():
    def step(x, count):
        y = x.sin()
        host = torch.ops.gt_passes.wait_copy(OFFLOAD(y), y)
        z = y.cos()
        count.item()
        back = torch.ops.gt_passes.wait_copy(torch.ops.gt_passes.reload(host, X.device), host)
        return (back * z).sum()

    recorder, count = FakeRecorder(), torch.tensor(3)
    graph_module = capture(step, X, count)
    report = run_pass(recording(recorder), graph_module)
    assert report.counts["pieces"] == 2
    assert [refusal.node_name for refusal in report.refusals] == ["_local_scalar_dense"]
    for number in range(4):
        assert same_bits(graph_module(X + number, count), step(X + number, count))


@pytest.mark.parametrize(
    ("shape", "strides"), [((4, 6), (6, 1)), ((4, 6), (1, 4)), ((3, 2), (5, 1)), ((0, 3), (3, 1))]
)
def test_places_do_not_overlap_and_keep_strides(shape, strides):
    dtypes = (torch.bfloat16, torch.int64, torch.bool)
    places: list[Place] = []
    for dtype in dtypes:
        tensor = torch.empty_strided(shape, strides, dtype=dtype)
        places.append(Place.of(tensor, offset=places[-1].end if places else 0))
    memory = torch.zeros(places[-1].end, dtype=torch.uint8)
    for number, place in enumerate(places):
        view = place.view(memory)
        assert (tuple(view.shape), view.stride(), view.dtype) == (shape, strides, dtypes[number])
        view.fill_(1)
    for first, second in itertools.pairwise(places):
        assert first.end <= second.offset
    assert all(bool((place.view(memory) == 1).all()) for place in places)


def test_a_piece_without_inputs_of_its_own_needs_no_memory():
    body = capture(lambda x: (x.sin(),), X)
    assert PieceMemory.of(body, static_inputs={0}) == PieceMemory(
        shared_inputs=(), own_inputs=(), rooms=()
    )
