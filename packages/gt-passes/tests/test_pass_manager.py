"""The pass manager runs passes in order, verifies after each, and reports what they did."""

from __future__ import annotations

import gc
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from edited_graphs import EditGraph
from expecttest import assert_expected_inline
from pass_graphs import capture, capture_dead, collectives, node_of, program, unshard
from torch.fx import GraphModule

from gt_passes import (
    CanonicalizeViews,
    ChangeBounds,
    GraphPass,
    PassContext,
    PassManager,
    PassManagerReport,
    PassReport,
    RemoveDeadCode,
    ShareAllGathers,
    VerificationError,
    default_recipe,
    pass_report_as_data,
    pass_report_from_data,
)
from gt_passes.errors import PassDeclarationError

X = torch.ones(4, 6)


def run(graph_module: GraphModule, *passes: GraphPass, **options: object) -> PassManagerReport:
    context = PassContext.from_graph(graph_module)
    return PassManager(list(passes), context=context, **options).run(graph_module)


def small_step() -> GraphModule:
    return capture_dead(lambda x: (torch.ops.aten.alias(x).cos(), x.sin()), X, alive=1)


def retype(graph_module: GraphModule) -> None:
    """A bug: the node now computes another dtype than is recorded."""
    cos = node_of(graph_module, "cos")
    cos.target = torch.ops.aten.gt.Scalar
    cos.args = (cos.args[0], 0)


def test_reports_each_pass_as_data():
    graph_module = small_step()
    report = run(graph_module, RemoveDeadCode(), CanonicalizeViews())
    dead, views = report.records
    assert [dead.name, views.name] == ["remove-dead-code", "canonicalize-views"]
    assert dead.op_count_differences == {"aten.sin.default": -1}
    assert views.op_count_differences == {"aten.alias.default": -1}
    assert [dead.before.num_ops, dead.after.num_ops, views.after.num_ops] == [3, 2, 1]
    assert dead.report.counts == {"removed": 1}
    for record in report.records:
        assert record.elapsed.wall_ns > 0
        assert record.verification.wall_ns > 0
    # Passes that only remove, or read the same memory by another view, need no estimate.
    assert dead.before.peak_memory_bytes is views.after.peak_memory_bytes is None
    assert report.verified
    assert report.unverified == ()
    assert report.total.wall_ns >= sum(record.elapsed.wall_ns for record in report.records)
    assert report.total.cpu_ns >= 0


def test_recompiles_once_at_the_end():
    graph_module = small_step()
    before = graph_module.code
    seen = []
    look = EditGraph(edit=lambda edited: seen.append(edited.code))
    run(graph_module, RemoveDeadCode(), look)
    assert seen == [before]
    assert "sin" in before
    assert "sin" not in graph_module.code


def test_prints_a_table():
    text = str(run(small_step(), RemoveDeadCode(), CanonicalizeViews()))
    assert_expected_inline(
        re.sub(r" +\d+\.\d", lambda match: "0.0".rjust(len(match[0])), text),
        """\
pass                            ops    cpu ms  verify ms  done
(capture)                                 0.0        0.0
remove-dead-code             3 -> 2       0.0        0.0  removed 1
canonicalize-views           2 -> 1       0.0        0.0  views_folded 1
(all passes)                              0.0        0.0
(recompilation)                           0.0        0.0""",
    )


def test_the_table_says_when_the_verifier_was_off():
    report = run(small_step(), RemoveDeadCode(), verify=False)
    assert not report.verified
    assert "The verifier was off." in str(report)
    assert report.records[0].verification.wall_ns == 0


def test_the_table_names_operators_that_could_not_be_verified():
    with torch.library._scoped_library("gt_passes_test", "DEF") as library:
        library.define("opaque(Tensor x) -> Tensor")
        library.impl("opaque", lambda x: x.clone(), "CPU")
        graph_module = capture(lambda x: x.cos().sin(), X)
        node_of(graph_module, "cos").target = torch.ops.gt_passes_test.opaque.default
        report = run(graph_module, RemoveDeadCode())
    assert (
        "1 nodes could not be re-propagated on fake values: gt_passes_test.opaque.default"
        in str(report)
    )


def test_a_pass_that_breaks_the_graph_is_named():
    graph_module = small_step()
    with pytest.raises(VerificationError) as error:
        run(graph_module, RemoveDeadCode(), EditGraph(edit=retype))
    assert_expected_inline(
        str(error.value),
        """\
after the pass edit-graph, the graph has 1 problem:
  1. [fake re-propagation] node cos (aten.gt.Scalar)
     its recorded fake value is not what its operator gives on its inputs
     expected shape [4, 6], stride [6, 1], dtype torch.bool, device cpu
     got      shape [4, 6], stride [6, 1], dtype torch.float32, device cpu
to reproduce: run EditGraph() on the captured graph after remove-dead-code
  PassManager(dump_directory=...) writes the graph before and after it""",
    )
    assert error.value.after == "the pass edit-graph"
    assert error.value.problems[0].node_name == "cos"
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_no_pass_is_blamed_for_a_graph_that_was_broken_before():
    graph_module = small_step()
    retype(graph_module)
    with pytest.raises(VerificationError) as error:
        run(graph_module, RemoveDeadCode())
    assert error.value.after == "capture"


def test_without_the_verifier_a_broken_graph_passes():
    graph_module = small_step()
    report = run(graph_module, EditGraph(edit=retype), verify=False)
    assert len(report.records) == 1


def test_a_long_list_of_problems_is_cut_in_the_message_only():
    def untype(graph_module: GraphModule) -> None:
        for node in graph_module.graph.nodes:
            if node.op == "call_function":
                del node.meta["val"]

    def many(x):
        for _ in range(15):
            x = x.cos()
        return x

    with pytest.raises(VerificationError, match="more, in VerificationError") as error:
        run(capture(many, X), EditGraph(edit=untype))
    assert len(error.value.problems) > 10


def gathered() -> GraphModule:
    def step(w, x):
        y = x @ unshard(w, group="fsdp", num_ranks=2).t()
        return y @ unshard(w, group="fsdp", num_ranks=2)

    return capture(step, X, X.clone())


def drop_all_gather(graph_module: GraphModule) -> None:
    second = node_of(graph_module, "wait_tensor_1")
    second.replace_all_uses_with(node_of(graph_module, "wait_tensor"))
    launch = second.args[0]
    graph_module.graph.erase_node(second)
    graph_module.graph.erase_node(launch)


def add_all_reduce(graph_module: GraphModule) -> None:
    mm = node_of(graph_module, "mm")
    with graph_module.graph.inserting_after(mm):
        launch = graph_module.graph.call_function(collectives.all_reduce.default, (mm, "sum", "dp"))
    with graph_module.graph.inserting_after(launch):
        wait = graph_module.graph.call_function(collectives.wait_tensor.default, (launch,))
    launch.meta["val"] = wait.meta["val"] = mm.meta["val"]


def test_a_pass_that_loses_collectives_must_have_said_so():
    with pytest.raises(VerificationError) as error:
        run(gathered(), EditGraph(edit=drop_all_gather))
    assert_expected_inline(
        str(error.value.problems[0]),
        """\
[declared bounds] the graph
edit-graph changed the bytes given to collectives
expected 384 bytes
got      192 bytes""",
    )
    allowed = ChangeBounds(collective_bytes_may_shrink=True)
    report = run(gathered(), EditGraph(edit=drop_all_gather, allowed=allowed))
    (record,) = report.records
    assert record.before.collective_bytes == 2 * record.after.collective_bytes == 2 * 8 * 6 * 4


def test_a_pass_that_moves_more_bytes_must_have_said_so():
    with pytest.raises(VerificationError, match="changed the bytes given to collectives"):
        run(gathered(), EditGraph(edit=add_all_reduce))
    run(gathered(), EditGraph(edit=add_all_reduce, allowed=ChangeBounds(collective_bytes_growth=1)))


def test_a_pass_is_held_to_its_bound_on_peak_memory():
    def estimate(graph_module: GraphModule) -> int:
        return 1000 * (1 + ("add" in program(graph_module)))

    def add(graph_module: GraphModule) -> None:
        cos = node_of(graph_module, "cos")
        with graph_module.graph.inserting_after(cos):
            more = graph_module.graph.call_function(torch.ops.aten.add.Tensor, (cos, cos))
        more.meta["val"] = cos.meta["val"]

    with pytest.raises(VerificationError) as error:
        run(small_step(), EditGraph(edit=add), estimate_peak_bytes=estimate)
    assert_expected_inline(
        str(error.value.problems[0]),
        """\
[declared bounds] the graph
edit-graph raised the estimated peak memory
expected at most 1000 bytes
got      2000 bytes""",
    )
    for growth in (1.0, None):
        allowed = ChangeBounds(peak_memory_growth=growth)
        (record,) = run(
            small_step(), EditGraph(edit=add, allowed=allowed), estimate_peak_bytes=estimate
        ).records
        assert record.after.peak_memory_bytes == 2000


def compute_sin_first(graph_module: GraphModule) -> None:
    node_of(graph_module, "alias").prepend(node_of(graph_module, "sin"))


def test_peak_memory_is_estimated_only_where_somebody_asks(tmp_path: Path):
    def peaks(growth: float | None, **options: object) -> list[int | None]:
        allowed = ChangeBounds(peak_memory_growth=growth)
        changed = EditGraph(edit=compute_sin_first, allowed=allowed)
        (record,) = run(small_step(), changed, **options).records
        return [record.before.peak_memory_bytes, record.after.peak_memory_bytes]

    assert peaks(None) == peaks(0.0, verify=False) == [None, None]
    # Of 96 bytes each: x, what is returned, and before the pass the dead sine beside it.
    assert peaks(0.0) == peaks(None, dump_directory=tmp_path) == [288, 192]
    nothing = EditGraph(edit=lambda edited: None)
    (record,) = run(small_step(), nothing).records
    assert record.before.peak_memory_bytes is None


def test_a_pass_is_held_to_its_bound_by_the_lifetimes_of_storages():
    def keep_for_long(graph_module: GraphModule) -> None:
        sin = node_of(graph_module, "sin")
        for node in ("exp", "tanh"):
            sin.append(node_of(graph_module, node))

    def step(x):
        return x.sin().sum(), x.exp().sum(), x.tanh().sum()

    graph_module = capture(step, torch.ones(64, 64))
    with pytest.raises(VerificationError, match="raised the estimated peak memory"):
        run(graph_module, EditGraph(edit=keep_for_long))


def test_less_than_a_block_of_the_allocator_is_no_growth_of_memory():
    def estimate(graph_module: GraphModule) -> int:
        return 1000 + num_more * ("neg" in program(graph_module))

    def negate(graph_module: GraphModule) -> None:
        cos = node_of(graph_module, "cos")
        with graph_module.graph.inserting_after(cos):
            more = graph_module.graph.call_function(torch.ops.aten.neg.default, (cos,))
        more.meta["val"] = cos.meta["val"]

    num_more = 64
    run(small_step(), EditGraph(edit=negate), estimate_peak_bytes=estimate)
    num_more = 512
    with pytest.raises(VerificationError, match="raised the estimated peak memory"):
        run(small_step(), EditGraph(edit=negate), estimate_peak_bytes=estimate)


def test_writes_the_graph_before_and_after_each_pass(tmp_path: Path):
    directory = tmp_path / "made" / "here"
    report = run(small_step(), RemoveDeadCode(), CanonicalizeViews(), dump_directory=directory)
    names = sorted(path.name for path in directory.iterdir())
    assert names == [
        "00-remove-dead-code-after.txt",
        "00-remove-dead-code-before.txt",
        "01-canonicalize-views-after.txt",
        "01-canonicalize-views-before.txt",
        "summary.txt",
    ]
    dead, views = report.records
    assert "sin" in dead.dump_before.read_text()
    assert "sin" not in dead.dump_after.read_text()
    assert dead.dump_after.read_text() == views.dump_before.read_text()


def test_an_error_points_to_the_dumps(tmp_path: Path):
    with pytest.raises(VerificationError) as error:
        run(small_step(), EditGraph(edit=retype), dump_directory=tmp_path)
    before, after = (tmp_path / f"00-edit-graph-{moment}.txt" for moment in ("before", "after"))
    assert f"compare {before} with {after}" in str(error.value)
    assert after.exists()


def test_an_exception_inside_a_pass_names_the_pass():
    def fail(graph_module: GraphModule) -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError) as error:
        run(small_step(), EditGraph(edit=fail))
    assert error.value.__notes__ == ["raised by the graph pass edit-graph: EditGraph()"]


def test_garbage_collection_is_on_again_after_a_run_also_one_that_failed():
    seen = []
    run(small_step(), EditGraph(edit=lambda graph_module: seen.append(gc.isenabled())))
    assert seen == [False]
    assert gc.isenabled()
    with pytest.raises(VerificationError):
        run(small_step(), EditGraph(edit=retype))
    assert gc.isenabled()


def test_refuses_a_pass_that_breaks_the_contract():
    class NotAPass(GraphPass):
        def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
            return PassReport(changed=False)

    with pytest.raises(PassDeclarationError):
        run(small_step(), NotAPass())


def test_passes_run_in_the_order_given():
    graph_module = small_step()
    first = EditGraph(edit=lambda edited: None)
    report = run(graph_module, first, RemoveDeadCode())
    assert [record.name for record in report.records] == ["edit-graph", "remove-dead-code"]
    report = run(graph_module, RemoveDeadCode(), first)
    assert [record.name for record in report.records] == ["remove-dead-code", "edit-graph"]


@dataclass(frozen=True, kw_only=True)
class WriteCode(EditGraph):
    """Stands for a pass after which a graph cannot be stored."""

    name: ClassVar[str] = "write-code"
    keeps_dataflow: ClassVar[bool] = False
    generates_code: ClassVar[bool] = True


def write_code(graph_module: GraphModule) -> None:
    """Stands for a compiled cosine."""
    node_of(graph_module, "cos").target = torch.ops.aten.tan.default


def without_times(report: PassManagerReport) -> PassManagerReport:
    return pass_report_from_data(pass_report_as_data(report))


def test_passes_that_generate_code_can_run_later_with_the_same_report():
    at_once, in_two = small_step(), small_step()
    passes = [RemoveDeadCode(), WriteCode(edit=write_code), CanonicalizeViews()]
    whole = run(at_once, *passes)
    manager = PassManager(passes, context=PassContext.from_graph(in_two))
    earlier = manager.run_before_code(in_two)
    assert [record.name for record in earlier.records] == ["remove-dead-code"]
    assert "sin" not in in_two.code  # recompiled
    assert "tan" not in in_two.code
    later = manager.run_from_code(in_two, earlier=earlier, is_verified=True)
    assert without_times(later) == without_times(whole)
    assert program(in_two) == program(at_once)


def test_a_summary_is_made_before_all_passes_and_before_code_is_generated():
    graph_module = small_step()
    passes = [RemoveDeadCode(), WriteCode(edit=write_code)]
    manager = PassManager(
        passes,
        context=PassContext.from_graph(graph_module),
        summarize=lambda summarized: [
            name for name in ("sin", "tan") if name in str(summarized.graph)
        ],
    )
    earlier = manager.run_before_code(graph_module)
    assert (earlier.summary_before, earlier.summary_after) == (["sin"], [])
    report = manager.run_from_code(graph_module, earlier=earlier, is_verified=True)
    assert (report.summary_before, report.summary_after) == (["sin"], [])
    at_once = manager.run(small_step())
    assert (at_once.summary_before, at_once.summary_after) == (["sin"], [])
    loaded = pass_report_from_data(pass_report_as_data(earlier))
    assert manager.run_from_code(graph_module, earlier=loaded).summary_before is None


def test_without_a_pass_that_generates_code_nothing_is_left_to_run():
    graph_module = small_step()
    manager = PassManager([RemoveDeadCode()], context=PassContext.from_graph(graph_module))
    earlier = manager.run_before_code(graph_module)
    assert manager.run_from_code(graph_module, earlier=earlier, is_verified=True) is earlier


def test_a_graph_that_comes_from_elsewhere_is_verified_before_code_is_generated():
    graph_module = small_step()
    passes = [RemoveDeadCode(), WriteCode(edit=write_code)]
    manager = PassManager(passes, context=PassContext.from_graph(graph_module))
    earlier = manager.run_before_code(graph_module)
    retype(graph_module)
    with pytest.raises(VerificationError, match=r"after capture"):
        manager.run_from_code(graph_module, earlier=earlier)
    assert "tan" not in program(graph_module)


def test_dumps_of_passes_that_run_later_go_on_counting(tmp_path: Path):
    graph_module = small_step()
    passes = [RemoveDeadCode(), WriteCode(edit=write_code)]
    context = PassContext.from_graph(graph_module)
    manager = PassManager(passes, context=context, dump_directory=tmp_path)
    manager.run_from_code(graph_module, earlier=manager.run_before_code(graph_module))
    assert [path.name[:13] for path in sorted(tmp_path.glob("*-before.txt"))] == [
        "00-remove-dea",
        "01-write-code",
    ]
    assert "write-code" in (tmp_path / "summary.txt").read_text()


def test_the_same_graph_gives_the_same_result():
    first, second = gathered(), gathered()
    for graph_module in (first, second):
        run(graph_module, RemoveDeadCode(), CanonicalizeViews(), ShareAllGathers())
    assert program(first) == program(second)


def test_a_whole_recipe_keeps_every_bit_of_a_training_step():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(11, 8), torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16),
        torch.nn.Dropout(0.25), torch.nn.Linear(16, 11),
    )  # fmt: skip
    names = tuple(name for name, _ in model.named_parameters())

    def step(*args):
        *parameters, tokens = args
        parameters = [parameter.detach().requires_grad_() for parameter in parameters]
        logits = torch.func.functional_call(
            model, dict(zip(names, parameters, strict=True)), (tokens,)
        )
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )
        return (loss, *torch.autograd.grad(loss, parameters))

    args = [
        *(parameter.detach() for parameter in model.parameters()),
        torch.arange(22).view(2, 11) % 11,
    ]
    graph_module = capture(step, *args)
    torch.manual_seed(3)
    captured = graph_module(*args)
    context = PassContext.from_graph(graph_module, static_input_names=names)
    report = default_recipe(context=context).run(graph_module)
    torch.manual_seed(3)
    passed = graph_module(*args)
    torch.manual_seed(3)
    eager = step(*args)
    assert report.records[-1].after.num_ops < report.records[0].before.num_ops
    for ours, theirs, reference in zip(passed, captured, eager, strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(ours, reference)
