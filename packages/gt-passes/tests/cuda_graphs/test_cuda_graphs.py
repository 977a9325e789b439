"""What CudaGraphs puts in the place of nodes, on recordings that behave as those of a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from device_graphs import capture_on
from expecttest import assert_expected_inline
from inductor_cases import COMPILER, Model, captured_step, run_on
from pass_graphs import capture, collectives, node_of, program, run_pass, same_bits
from recorded_step_cases import ON_CPU, outputs_captured_and_replayed

from gt_config.node_keys import PipelineAnnotation
from gt_passes import (
    CompileRegions,
    CompileWholeGraph,
    CudaGraphs,
    DescribeOnly,
    PassContext,
    PassManager,
    release_cuda_graphs,
)
from gt_passes.cuda_graphs.whole_recording import whole_recording
from gt_passes.testing import FakeRecorder
from gt_trace.node_metadata import write_annotation
from gt_trace.testing import GlooWorkers

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def recording(recorder=None):
    def new_recorder():
        return FakeRecorder() if recorder is None else recorder

    return CudaGraphs(target=ON_CPU, new_recorder=new_recorder, min_kernels=2)


def test_pieces_are_replayed_and_what_leaves_the_step_is_copied():
    def step(x, count):
        y = x.sin().cos()
        n = count.item()
        return (y * y).exp(), n, x

    graph_module = capture(step, X, torch.tensor(3))
    report = run_pass(recording(), graph_module)
    assert_expected_inline(
        program(graph_module),
        """\
run_region = run_region(cuda_graph_0, x_1)
getitem = getitem(run_region, 0)
_local_scalar_dense = aten._local_scalar_dense.default(count_1)
run_region_1 = run_region(cuda_graph_1, getitem)
getitem_1 = getitem(run_region_1, 0)
clone_default = aten.clone.default(getitem_1)
return [clone_default, _local_scalar_dense, x_1]
""",
    )
    assert report.counts == {
        "pieces": 2,
        "nodes": 4,
        "outputs_copied": 1,
        "bytes_between_pieces": 2 * 4 * 8 * 4,
        "bytes_of_copied_inputs": 512,
    }
    assert_expected_inline(
        "\n".join(map(str, report.refusals)),
        """_local_scalar_dense: aten::_local_scalar_dense brings a result of the device to the host""",
    )


def test_items_of_a_tuple_that_a_pass_set_apart_are_results_of_the_piece():
    """A recording has tensors at addresses, and no tuples."""

    def step(x, count):
        values, indices = x.sin().topk(2)
        n = count.item()
        return (values * values).exp(), indices + 1, n

    graph_module = capture(step, X, torch.tensor(3))
    expected = graph_module(X, torch.tensor(3))
    sync = node_of(graph_module, "_local_scalar_dense")
    for item in node_of(graph_module, "topk").users:
        sync.append(item)
    report = run_pass(recording(), graph_module)
    assert report.counts["pieces"] == 2
    assert program(graph_module).count("aten.topk") == 0
    for _ in range(3):  # as it is, recorded, replayed
        found = graph_module(X, torch.tensor(3))
        assert all(map(same_bits, expected[:2], found[:2]))


def test_pieces_write_to_one_buffer_one_after_the_other():
    """The second reads what the first gives: the buffer itself, no copy of it."""

    def step(total, x, count):
        total.add_(x.sin().sum(0))
        n = count.item()
        total.mul_(2).add_(x.cos().sum(0))
        return x.sum(), n

    total = torch.zeros(8)
    graph_module = capture(step, total, X, torch.tensor(3))
    writes = [node for node in graph_module.graph.nodes if "_." in str(node.target)]
    assert [node.args[0].op for node in writes].count("placeholder") < len(writes)
    expected = total.clone()
    context = PassContext.from_graph(graph_module, static_input_names=("total",))
    PassManager([recording()], context=context).run(graph_module)
    for _ in range(3):
        graph_module(total, X, torch.tensor(3))
        expected = (expected + X.sin().sum(0)) * 2 + X.cos().sum(0)
        assert torch.allclose(total, expected)


def test_a_graph_without_operators_stays_as_it_is():
    assert not run_pass(recording(), capture(lambda x: x, X)).changed


def test_a_machine_without_cuda_is_named():
    graph_module = capture_on(lambda x: x.sin().cos().exp().tan(), X.to("meta"))
    before = program(graph_module)
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    report = run_pass(CudaGraphs(), graph_module)
    assert_expected_inline(
        "\n".join(map(str, report.refusals)),
        """the graph: this machine has no CUDA, so nothing of the graph can be recorded""",
    )
    assert program(graph_module) == before


def test_running_again_changes_nothing():
    graph_module = capture(lambda x: x.sin().cos(), X)
    run_pass(recording(), graph_module)
    before = program(graph_module)
    assert not run_pass(recording(), graph_module).changed
    assert program(graph_module) == before


def test_a_replayed_step_keeps_every_bit_and_updates_buffers():
    torch.manual_seed(0)
    model = Model()
    reference_model = copy.deepcopy(model)
    step = captured_step(model, X)
    _, before = run_on(recording(), step)
    replayed = step.bind(model)
    captured = step.bind(reference_model, executable=before)
    for number in range(1, 6):
        inputs = torch.randn(4, 8)
        assert all(map(same_bits, _flat(replayed(inputs)), _flat(captured(inputs))))
        assert model.num_steps.item() == number


def _accumulated(bound, batches):
    """Gradients summed over microbatches as a trainer does: the first becomes ``.grad``."""
    sums = None
    for batch in batches:
        _, gradients = bound(batch)
        if sums is None:
            sums = list(gradients)
        else:
            for total, gradient in zip(sums, gradients, strict=True):
                total.add_(gradient)
    return sums


def test_gradients_kept_from_one_microbatch_to_the_next_are_those_of_that_microbatch():
    """pytorch issue 96693: a replay overwrites the gradients that were to be added to."""
    model = Model()
    batches = [torch.randn(4, 8) for _ in range(3)]
    step = captured_step(model, X)
    _, before = run_on(recording(), step)
    expected = _accumulated(step.bind(model, executable=before), batches)
    replayed = step.bind(model)
    for _ in range(3):  # runs, records, replays
        replayed(X)
    assert all(map(same_bits, _accumulated(replayed, batches), expected))


def test_without_the_copies_accumulated_gradients_would_be_wrong():
    """That the test above can fail: the fake recordings overwrite what they returned."""
    model = Model()
    step = captured_step(model, X)
    run_on(recording(), step)
    graph = step.graph_module.graph
    for copied in graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        copied.replace_all_uses_with(copied.args[0])
    step.graph_module.recompile()
    replayed = step.bind(model)
    for _ in range(3):
        replayed(X)
    _, kept = replayed(X)
    first = [gradient.clone() for gradient in kept]
    replayed(X + 1)
    assert not all(map(same_bits, first, kept))


def test_collectives_are_replayed(one_rank_group):
    def step(w, x):
        gathered = collectives.wait_tensor(collectives.all_gather_into_tensor(w, 1, one_rank_group))
        return (x @ gathered).relu()

    w = torch.randn(8, 8)
    graph_module = capture(step, w, X)
    context = PassContext.from_graph(graph_module, static_input_names=("w",))
    report = recording().run(graph_module, context)
    graph_module.recompile()
    assert (report.counts["pieces"], report.counts["nodes"]) == (1, 4)
    for number in range(4):
        assert same_bits(graph_module(w, X + number), step(w, X + number))


def test_regions_of_a_compiler_are_recorded_whole():
    model = Model()
    step = captured_step(model, X)
    patterns = ("layers.*.feed_forward",)
    run_on(CompileRegions(module_patterns=patterns, compiler=DescribeOnly()), step)
    report, before = run_on(recording(), step)
    assert report.refusals == ()
    assert report.counts["pieces"] == 1
    replayed, captured = step.bind(model), step.bind(copy.deepcopy(model), executable=before)
    for number in range(4):
        assert all(map(same_bits, _flat(replayed(X + number)), _flat(captured(X + number))))


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.mark.slow  # compiles with Inductor
def test_a_step_that_is_compiled_as_a_whole_is_recorded(own_cache):
    """It is one call, and counts as the kernels that it was made of."""
    model = Model()
    step = captured_step(model, X)
    run_on(CompileWholeGraph(compiler=COMPILER), step)
    compiled = copy.deepcopy(step.graph_module)
    report, _ = run_on(CudaGraphs(target=ON_CPU, new_recorder=FakeRecorder), step)
    assert report.refusals == ()
    assert report.counts["pieces"] == 1
    replayed = step.bind(model)
    expected = step.bind(copy.deepcopy(model), executable=compiled)
    for number in range(4):
        assert all(map(same_bits, _flat(replayed(X + number)), _flat(expected(X + number))))
        assert model.num_steps.item() == number + 1


def test_a_small_compiled_region_is_left_alone():
    graph_module = capture(lambda x: x.sin().cos().view(-1), X)
    run_pass(CompileWholeGraph(compiler=DescribeOnly()), graph_module)
    report = run_pass(CudaGraphs(target=ON_CPU, new_recorder=FakeRecorder), graph_module)
    assert not report.changed
    assert report.refusals[0].reason == "fewer than 4 kernels stand together here"


def test_recordings_can_be_released():
    graph_module = capture(lambda x: x.sin().cos(), X)
    recorder = FakeRecorder()
    run_pass(recording(recorder), graph_module)
    for _ in range(3):
        graph_module(X)
    num_resets = recorder.num_resets
    release_cuda_graphs(graph_module)
    assert recorder.num_resets == num_resets + 1
    assert same_bits(graph_module(X), X.sin().cos())


def test_a_sharded_step_keeps_every_bit_on_two_ranks():
    with GlooWorkers(2) as workers:
        for captured, replayed, num_pieces in workers.run(outputs_captured_and_replayed):
            assert num_pieces == 1
            assert len(captured) == len(replayed) == 16
            assert all(map(torch.equal, captured, replayed))


def _flat(outputs):
    loss, gradients = outputs
    return [loss, *gradients]


def marked(action, step, min_kernels=2):
    """What the pass says of an action's graph, and the mark that it left."""
    graph_module = capture(step, X, torch.tensor(3))
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            write_annotation(node, PipelineAnnotation(stage_index=0, action=action, slot=0))
    before = program(graph_module)
    recording = CudaGraphs(target=ON_CPU, new_recorder=FakeRecorder, min_kernels=min_kernels)
    report = run_pass(recording, graph_module)
    assert not report.changed
    assert program(graph_module) == before
    return report, whole_recording(graph_module)


def test_an_action_is_marked_to_be_recorded_by_whoever_runs_it():
    report, mark = marked("FORWARD", lambda x, count: x.sin().cos())
    assert mark is not None
    assert mark.alone
    assert report.counts == {"actions_recorded": 1, "nodes": 2}


@pytest.mark.parametrize("action", ["UNSHARD", "REDUCE_GRAD"])
def test_what_gathers_or_reduces_is_recorded_with_a_whole_step_only(action):
    report, mark = marked(action, lambda x, count: x.sin().cos())
    assert mark is not None
    assert not mark.alone
    assert report.counts == {"nodes": 2}
    assert report.refusals == ()


def test_a_small_action_is_recorded_with_a_whole_step_only():
    report, mark = marked("FORWARD", lambda x, count: x.sin().cos(), min_kernels=3)
    assert mark is not None
    assert not mark.alone
    assert_expected_inline(
        "\n".join(map(str, report.refusals)), """sin: fewer than 3 kernels stand together here"""
    )


def test_an_action_that_waits_for_the_device_is_not_marked():
    report, mark = marked("FORWARD", lambda x, count: x.sin().cos() * count.item())
    assert mark is None
    assert report.counts == {}
    assert "brings a result of the device to the host" in str(report.refusals[0])
