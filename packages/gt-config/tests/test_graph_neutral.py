"""The mark that takes a field out of the fingerprint."""

import dataclasses

import pytest

from gt_config import AutoParallelConfig, CompileConfig, EpOverlapConfig, Topology
from gt_config.graph_neutral import graph_neutral, is_graph_neutral


def test_a_field_is_not_neutral_unless_marked():
    @dataclasses.dataclass
    class Example:
        counts: int = 0
        marked: int = dataclasses.field(default=0, metadata=graph_neutral("only a label"))
        other: int = dataclasses.field(default=0, metadata={"unit": "MiB"})

    neutral = {f.name: is_graph_neutral(f) for f in dataclasses.fields(Example)}
    assert neutral == {"counts": False, "marked": True, "other": False}


def test_refuses_a_mark_without_a_reason():
    with pytest.raises(ValueError, match="needs the reason why the field cannot affect the graph"):
        graph_neutral(" ")


def test_exactly_these_fields_opt_out():
    # verify_passes counts: a verified run must not take a graph that nobody verified.
    neutral = {
        f"{cls.__name__}.{field.name}"
        for cls in (CompileConfig, AutoParallelConfig, EpOverlapConfig, Topology)
        for field in dataclasses.fields(cls)
        if is_graph_neutral(field)
    }
    assert neutral == {
        f"CompileConfig.{name}"
        for name in (
            "artifacts",
            "artifacts_max_gib",
            "debug_graph_passes",
            "on_shape_change",
            "require_float8",
        )
    } | {
        # What a plan decides has a digest of its own.
        f"AutoParallelConfig.{name}"
        for name in ("plan", "relative_gap", "time_limit_seconds")
    }
