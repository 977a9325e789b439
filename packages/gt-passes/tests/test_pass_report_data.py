"""A report of passes survives being stored as JSON, and data that are none are refused by field."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_graphs import capture_dead

from gt_passes import (
    CanonicalizeViews,
    PassContext,
    PassManager,
    PassManagerReport,
    Refusal,
    RemoveDeadCode,
    pass_report_as_data,
    pass_report_from_data,
)
from gt_passes.errors import PassReportDataError
from gt_passes.pass_manager_report import Elapsed
from gt_passes.verifier.repropagation import UnverifiedNode


def made_report() -> PassManagerReport:
    graph_module = capture_dead(
        lambda x: (torch.ops.aten.alias(x).cos(), x.sin()), torch.ones(4, 6), alive=1
    )
    context = PassContext.from_graph(graph_module)
    return PassManager([RemoveDeadCode(), CanonicalizeViews()], context=context).run(graph_module)


def stored(report: PassManagerReport) -> PassManagerReport:
    return pass_report_from_data(json.loads(json.dumps(pass_report_as_data(report))))


def test_everything_but_times_and_files_survives():
    made = made_report()
    loaded = stored(made)
    assert pass_report_as_data(loaded) == pass_report_as_data(made)
    assert loaded.differences() == made.differences()
    assert loaded.total == Elapsed()
    for before, after in zip(made.records, loaded.records, strict=True):
        for name in ("name", "only_cleans_up", "report", "before", "after", "op_count_differences"):
            assert getattr(before, name) == getattr(after, name)


def test_refusals_and_unverified_nodes_survive():
    data = pass_report_as_data(made_report())
    data["unverified"] = [{"node_name": "f", "target": "g", "reason": "unknown"}]
    data["records"][0]["refusals"] = [{"node_name": "cos", "reason": "may not"}]
    loaded = pass_report_from_data(data)
    assert loaded.unverified == (UnverifiedNode(node_name="f", target="g", reason="unknown"),)
    assert loaded.records[0].report.refusals == (Refusal(node_name="cos", reason="may not"),)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data.pop("verified"), "report has the fields"),
        (lambda data: data.update(more=1), "report has the fields"),
        (lambda data: data.update(verified=1), "verified is 1, and not of type bool"),
        (lambda data: data.update(records={}), "records is {}, and not of type list"),
        (
            lambda data: data["records"][0]["before"].update(num_ops=True),
            r"records\[0\].before.num_ops is True, and not of type int",
        ),
        (
            lambda data: data["records"][1]["counts"].update(views_folded="1"),
            r"records\[1\].counts.views_folded is '1'",
        ),
        (
            lambda data: data["records"][0].update(refusals=[{"node_name": "x"}]),
            r"records\[0\].refusals\[0\] has the fields \['node_name'\]",
        ),
    ],
)
def test_data_that_are_no_report_are_refused_by_field(
    damage: Callable[[Any], object], message: str
):
    data = copy.deepcopy(pass_report_as_data(made_report()))
    damage(data)
    with pytest.raises(PassReportDataError, match=message):
        pass_report_from_data(data)
