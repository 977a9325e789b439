"""What passes did, as data that JSON can hold, so that a stored graph can tell it when loaded.

Times and files are left out: they are of the process that ran the passes. Data are read with
suspicion, since they come from a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from gt_passes.contract import PassReport, Refusal
from gt_passes.errors import PassReportDataError
from gt_passes.pass_manager_report import Elapsed, PassManagerReport, PassRecord
from gt_passes.verifier.declared_bounds import GraphSize
from gt_passes.verifier.repropagation import UnverifiedNode

_Kind = TypeVar("_Kind", bound=object)


def pass_report_as_data(report: PassManagerReport) -> dict[str, Any]:
    """A report as mappings, lists, texts, integers and booleans."""
    return {
        "verified": report.verified,
        "unverified": [
            {"node_name": each.node_name, "target": each.target, "reason": each.reason}
            for each in report.unverified
        ],
        "records": [_record_as_data(record) for record in report.records],
    }


def pass_report_from_data(data: object) -> PassManagerReport:
    """The report in data that ``pass_report_as_data`` made; its times are zero.

    Raises:
        PassReportDataError: the data are no such report; names the field.
    """
    fields = _fields(data, "report", {"verified", "unverified", "records"})
    return PassManagerReport(
        records=tuple(
            _record(record, f"records[{index}]")
            for index, record in enumerate(_of_kind(fields["records"], list, "records"))
        ),
        verified=_of_kind(fields["verified"], bool, "verified"),
        unverified=tuple(
            UnverifiedNode(**_texts(node, f"unverified[{index}]", UnverifiedNode.__slots__))
            for index, node in enumerate(_of_kind(fields["unverified"], list, "unverified"))
        ),
        capture_verification=Elapsed(),
        complete_verification=Elapsed(),
        recompilation=Elapsed(),
    )


def _record_as_data(record: PassRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "only_cleans_up": record.only_cleans_up,
        "changed": record.report.changed,
        "counts": dict(record.report.counts),
        "refusals": [
            {"node_name": each.node_name, "reason": each.reason} for each in record.report.refusals
        ],
        "before": _size_as_data(record.before),
        "after": _size_as_data(record.after),
        "op_count_differences": dict(record.op_count_differences),
    }


def _size_as_data(size: GraphSize) -> dict[str, int | None]:
    return {name: getattr(size, name) for name in GraphSize.__slots__}


def _record(data: object, path: str) -> PassRecord:
    fields = _fields(
        data,
        path,
        {
            "name",
            "only_cleans_up",
            "changed",
            "counts",
            "refusals",
            "before",
            "after",
            "op_count_differences",
        },
    )
    refusals = _of_kind(fields["refusals"], list, f"{path}.refusals")
    return PassRecord(
        name=_of_kind(fields["name"], str, f"{path}.name"),
        only_cleans_up=_of_kind(fields["only_cleans_up"], bool, f"{path}.only_cleans_up"),
        report=PassReport(
            changed=_of_kind(fields["changed"], bool, f"{path}.changed"),
            counts=_counts(fields["counts"], f"{path}.counts"),
            refusals=tuple(
                Refusal(**_texts(each, f"{path}.refusals[{index}]", Refusal.__slots__))
                for index, each in enumerate(refusals)
            ),
        ),
        before=_size(fields["before"], f"{path}.before"),
        after=_size(fields["after"], f"{path}.after"),
        op_count_differences=_counts(
            fields["op_count_differences"], f"{path}.op_count_differences"
        ),
        elapsed=Elapsed(),
        verification=Elapsed(),
    )


def _size(data: object, path: str) -> GraphSize:
    fields = dict(_fields(data, path, set(GraphSize.__slots__)))
    peak = fields.pop("peak_memory_bytes")
    if peak is not None:
        peak = _of_kind(peak, int, f"{path}.peak_memory_bytes")
    return GraphSize(**_counts(fields, path), peak_memory_bytes=peak)


def _counts(data: object, path: str) -> dict[str, int]:
    counts = _of_kind(data, dict, path)
    return {name: _of_kind(counts[name], int, f"{path}.{name}") for name in counts}


def _texts(data: object, path: str, names: object) -> dict[str, str]:
    assert isinstance(names, tuple)
    fields = _fields(data, path, set(names))
    return {name: _of_kind(fields[name], str, f"{path}.{name}") for name in names}


def _fields(data: object, path: str, names: set[str]) -> Mapping[str, Any]:
    fields = _of_kind(data, dict, path)
    if set(fields) != names:
        raise PassReportDataError(
            f"{path} has the fields {sorted(map(str, fields))}, and not {sorted(names)}"
        )
    return fields


def _of_kind(value: object, kind: type[_Kind], path: str) -> _Kind:
    if type(value) is not kind:  # a bool is no int here
        raise PassReportDataError(f"{path} is {value!r}, and not of type {kind.__name__}")
    return value
