"""What RemoveDeadCode removes, what it keeps, and that nothing else changes."""

from __future__ import annotations

import copy

import pytest
import torch
from expecttest import assert_expected_inline
from pass_graphs import capture_dead, collectives, program, run_pass, same_bits, unshard
from torch import nn
from torch.fx import GraphModule

from gt_config import CompileConfig
from gt_passes import RemoveDeadCode, optimize
from gt_trace import trace_step

aten = torch.ops.aten
X = torch.arange(12, dtype=torch.float32).reshape(3, 4)


def some_dead_code() -> GraphModule:
    def step(x):
        dead = x.exp()
        return x.cos(), dead.sin(), dead.split(2, dim=1)[0]

    return capture_dead(step, X, alive=1)


def test_removes_dead_nodes_and_what_only_they_used():
    graph_module = some_dead_code()
    report = run_pass(RemoveDeadCode(), graph_module)
    assert_expected_inline(
        program(graph_module),
        """\
cos = aten.cos.default(x_1)
return [cos]
""",
    )
    assert report.counts == {"removed": 5}  # exp, sin, split and both of its items
    assert report.changed


def test_running_again_changes_nothing():
    graph_module = some_dead_code()
    run_pass(RemoveDeadCode(), graph_module)
    before = program(graph_module)
    report = run_pass(RemoveDeadCode(), graph_module)
    assert not report.changed
    assert report.counts == {}
    assert program(graph_module) == before


def test_results_keep_every_bit():
    graph_module = some_dead_code()
    reference = copy.deepcopy(graph_module)
    run_pass(RemoveDeadCode(), graph_module)
    assert same_bits(graph_module(X), reference(X))


def test_keeps_inputs_that_nothing_reads():
    graph_module = capture_dead(lambda x, y: (x.cos(), y.cos()), X, X, alive=1)
    run_pass(RemoveDeadCode(), graph_module)
    assert len(graph_module.graph.find_nodes(op="placeholder")) == 2


def test_keeps_writes_to_an_input():
    graph_module = capture_dead(lambda x: (x.cos(), x.add_(1)), X.clone(), alive=1)
    report = run_pass(RemoveDeadCode(), graph_module)
    assert not report.changed
    x = X.clone()
    graph_module(x)
    assert same_bits(x, X + 1)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.rand_like(x),
        lambda x: torch.nn.functional.dropout(x, 0.5),
        lambda x: aten.native_dropout(x, 0.5, True)[0],
        lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    ],
    ids=["rand_like", "dropout", "native_dropout", "bernoulli"],
)
def test_keeps_dead_draws_so_that_later_draws_stay_the_same(draw):
    def step(x):
        dead = draw(x)
        return torch.rand_like(x), dead

    graph_module = capture_dead(step, X, alive=1)
    reference = copy.deepcopy(graph_module)
    run_pass(RemoveDeadCode(), graph_module)
    torch.manual_seed(7)
    expected = reference(X)
    torch.manual_seed(7)
    assert same_bits(graph_module(X), expected)


def test_keeps_asserts_on_values_and_sizes():
    def step(x):
        torch._assert_async(x.sum() > 0)
        size = x.nonzero().shape[0]
        torch._check(size >= 2)
        aten._assert_scalar(size >= 2, "at least two")
        return (x.cos(), x.sin())

    graph_module = capture_dead(step, X, alive=1)
    assert run_pass(RemoveDeadCode(), graph_module).counts == {"removed": 1}
    assert {"aten._assert_async.default", "aten._assert_scalar.default"} <= {
        str(node.target) for node in graph_module.graph.nodes
    }


def test_keeps_a_function_of_which_nothing_is_known():
    calls = []

    def log(x):
        calls.append(x)

    graph_module = capture_dead(lambda x: (x.cos(),), X, alive=1)
    with graph_module.graph.inserting_before(graph_module.graph.output_node()):
        graph_module.graph.call_function(log, (next(iter(graph_module.graph.nodes)),))
    assert not RemoveDeadCode().run(graph_module, None).changed
    graph_module.recompile()
    graph_module(X)
    assert len(calls) == 1


def test_keeps_an_operator_that_returns_nothing():
    with torch.library._scoped_library("gt_passes_test", "DEF") as library:
        library.define("log(Tensor x) -> ()")
        library.impl("log", lambda x: None, "CompositeExplicitAutograd")

        def step(x):
            torch.ops.gt_passes_test.log(x)
            return (x.cos(), x.sin())

        graph_module = capture_dead(step, X, alive=1)
        assert "gt_passes_test.log.default" in program(graph_module)
        run_pass(RemoveDeadCode(), graph_module)
        assert "gt_passes_test.log.default" in program(graph_module)


def dead_unshard() -> GraphModule:
    def step(w, x):
        return x.cos(), unshard(w, group="fsdp", num_ranks=2, dtype=torch.bfloat16).sin()

    return capture_dead(step, X, X, alive=1)


def test_can_remove_a_dead_unshard_with_its_cast():
    graph_module = dead_unshard()
    report = run_pass(RemoveDeadCode(), graph_module)
    assert report.counts == {"removed": 4, "collectives_removed": 1}
    assert_expected_inline(
        program(graph_module),
        """\
cos = aten.cos.default(x_1)
return [cos]
""",
    )


def test_cannot_remove_a_dead_unshard_when_told_to_keep_collectives():
    graph_module = dead_unshard()
    report = run_pass(RemoveDeadCode(dead_collectives="keep"), graph_module)
    assert report.counts == {"removed": 1}
    assert [refusal.node_name for refusal in report.refusals] == ["wait_tensor"]


def test_cannot_remove_a_dead_collective_that_another_rank_may_read():
    def step(x):
        metric = collectives.wait_tensor(collectives.all_reduce(x, "sum", "dp"))
        return x.cos(), metric.sin()

    graph_module = capture_dead(step, X, alive=1)
    report = run_pass(RemoveDeadCode(), graph_module)
    assert_expected_inline(
        program(graph_module),
        """\
all_reduce = _c10d_functional.all_reduce.default(x_1, sum, dp)
wait_tensor = _c10d_functional.wait_tensor.default(all_reduce)
cos = aten.cos.default(x_1)
return [cos]
""",
    )
    assert_expected_inline(
        "\n".join(map(str, report.refusals)),
        """wait_tensor: nobody reads this collective here, but another rank may, and would hang""",
    )


def test_cannot_remove_the_wait_of_a_collective_in_place():
    def step(x):
        return x.cos(), collectives.wait_tensor(collectives.all_reduce_(x, "sum", "dp"))

    graph_module = capture_dead(step, X.clone(), alive=1)
    report = run_pass(RemoveDeadCode(), graph_module)
    assert not report.changed
    assert_expected_inline(
        "\n".join(map(str, report.refusals)),
        """wait_tensor: a dead wait on something other than a pure collective""",
    )


def test_can_remove_one_of_two_waits_for_a_collective():
    def step(x):
        reduced = collectives.all_reduce(x, "sum", "dp")
        return collectives.wait_tensor(reduced), collectives.wait_tensor(reduced)

    graph_module = capture_dead(step, X, alive=1)
    assert run_pass(RemoveDeadCode(), graph_module).counts == {"removed": 1}


def test_removes_an_lstm_whose_results_are_unused():
    lstm = nn.LSTM(4, 4, batch_first=True)

    def step(x):
        lstm(x)
        return x * 2

    x = torch.randn(2, 3, 4)
    traced = trace_step(step, module=lstm)(x)
    optimize(traced, CompileConfig(memory_policy="save_all"))  # which verifies
    assert "mkldnn_rnn_layer" not in traced.graph_module.code
    assert torch.equal(traced.bind(lstm)(x), step(x))
