"""The node-metadata contract: keys, plain dictionaries, versions, refusals."""

import dataclasses
import json
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gt_config import node_keys
from gt_config.errors import NodeMetadataError, NodeMetadataVersionError
from gt_config.node_keys import (
    ANNOTATION_TYPES,
    NODE_METADATA_KEYS,
    NODE_METADATA_PREFIX,
    NODE_METADATA_VERSION,
    VERSION_KEY,
    ChunkAnnotation,
    CpCollectiveAnnotation,
    EpExchangeAnnotation,
    EpRegionAnnotation,
    FsdpCollectiveAnnotation,
    ModuleAnnotation,
    PhaseAnnotation,
    PipelineAnnotation,
    ResidencyAnnotation,
)

EXAMPLES = [
    ModuleAnnotation(fqn="layers.0.attention"),
    PhaseAnnotation(phase="backward"),
    FsdpCollectiveAnnotation(
        kind="unshard", parameter_names=("layers.0.wq.weight",), mesh_axis="fsdp"
    ),
    CpCollectiveAnnotation(kind="gather", mesh_axis="cp"),
    EpRegionAnnotation(kind="dispatch"),
    EpExchangeAnnotation(kind="token_exchange"),
    ChunkAnnotation(
        region_root="layers.0.moe", role="body", chunk_id=1, direction="forward", producer="eager"
    ),
    PipelineAnnotation(stage_index=3, action="BACKWARD_WEIGHT", slot=17),
    ResidencyAnnotation(residency="recompute"),
]


def _id(value: object) -> str:
    return (value if isinstance(value, type) else type(value)).__name__


def test_every_concept_has_an_example_here():
    assert tuple(type(example) for example in EXAMPLES) == ANNOTATION_TYPES


def test_keys_are_distinct_and_under_one_prefix():
    # Written out: other packages' stored graphs depend on these very strings.
    assert NODE_METADATA_KEYS == (
        "gt.version",
        "gt.module",
        "gt.phase",
        "gt.fsdp_collective",
        "gt.cp_collective",
        "gt.ep_region",
        "gt.ep_exchange",
        "gt.chunk",
        "gt.pipeline",
        "gt.residency",
    )
    assert all(key.startswith(NODE_METADATA_PREFIX) for key in NODE_METADATA_KEYS)


def test_the_module_docstring_lists_every_key_and_class():
    text = node_keys.__doc__ or ""
    assert [key for key in NODE_METADATA_KEYS if key not in text] == []
    assert [cls.__name__ for cls in ANNOTATION_TYPES if cls.__name__ not in text] == []


@pytest.mark.parametrize(
    ("alias", "values"),
    [
        ("Phase", ("forward", "loss", "backward", "optimizer")),
        ("FsdpCollectiveKind", ("unshard", "reduce_grad", "sum_parts")),
        ("EpRegionKind", ("dispatch", "compute", "combine")),
        ("EpExchangeKind", ("token_count_exchange", "token_exchange")),
        ("ChunkRole", ("split_boundary", "body", "materialization")),
        ("Direction", ("forward", "backward")),
        ("ChunkProducer", ("eager", "graph")),
        (
            "PipelineAction",
            (
                "UNSHARD",
                "FORWARD",
                "FULL_BACKWARD",
                "BACKWARD_INPUT",
                "BACKWARD_WEIGHT",
                "REDUCE_GRAD",
                "OVERLAP_F_B",
            ),
        ),
    ],
)
def test_the_words_of_the_contract(alias, values):
    assert get_args(getattr(node_keys, alias)) == values


@pytest.mark.parametrize("cls", ANNOTATION_TYPES, ids=_id)
def test_annotations_are_frozen_slotted_and_keyword_only(cls):
    assert cls.__dataclass_params__.frozen
    assert "__dict__" not in dir(cls)
    assert all(field.kw_only for field in dataclasses.fields(cls))


@pytest.mark.parametrize("example", EXAMPLES, ids=_id)
def test_writes_the_version_and_its_one_key(example):
    meta = example.to_meta()
    assert set(meta) == {VERSION_KEY, type(example).KEY}
    assert meta[VERSION_KEY] == NODE_METADATA_VERSION


@pytest.mark.parametrize("example", EXAMPLES, ids=_id)
def test_comes_back_through_json(example):
    assert type(example).from_meta(json.loads(json.dumps(example.to_meta()))) == example


@pytest.mark.parametrize("cls", ANNOTATION_TYPES, ids=_id)
def test_reads_none_where_there_is_no_annotation(cls):
    assert cls.from_meta({}) is None
    assert cls.from_meta({"nn_module_stack": {}, VERSION_KEY: NODE_METADATA_VERSION}) is None


def test_merged_dictionaries_keep_every_concept():
    merged: dict[str, object] = {"theirs": 1}
    for example in EXAMPLES:
        merged |= example.to_meta()
    assert [cls.from_meta(merged) for cls in ANNOTATION_TYPES] == EXAMPLES


@pytest.mark.parametrize("found", [NODE_METADATA_VERSION + 1, 0, "1", True, None])
def test_refuses_another_version_and_names_both(found):
    meta = ModuleAnnotation(fqn="a").to_meta() | {VERSION_KEY: found}
    with pytest.raises(NodeMetadataVersionError) as error:
        ModuleAnnotation.from_meta(meta)
    assert str(error.value) == (
        f"node metadata 'gt.module' has version {found!r}, and this gt-config reads version 1: "
        "capture the graph again instead of loading it"
    )


def test_refuses_an_annotation_without_a_version():
    meta = ModuleAnnotation(fqn="a").to_meta()
    del meta[VERSION_KEY]
    with pytest.raises(NodeMetadataVersionError, match="has version None"):
        ModuleAnnotation.from_meta(meta)


@pytest.mark.parametrize(
    ("stored", "text"),
    [
        ("layers.0", "node metadata 'gt.module' is 'layers.0', not a dictionary"),
        ({}, "node metadata 'gt.module' has the fields [], not ['fqn']"),
        (
            {"fqn": "a", "name": "b"},
            "node metadata 'gt.module' has the fields ['fqn', 'name'], not ['fqn']",
        ),
        ({"fqn": 3}, "ModuleAnnotation: fqn is 3, not a string"),
    ],
)
def test_refuses_a_malformed_annotation(stored, text):
    with pytest.raises(NodeMetadataError) as error:
        ModuleAnnotation.from_meta({VERSION_KEY: NODE_METADATA_VERSION, "gt.module": stored})
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("stage", "told"), [(True, "True, not an integer"), ([1], "(1,), not"), ({}, "{}, not")]
)
def test_refuses_what_equals_or_cannot_be_held_against_a_value_that_was_read(stage, told):
    stored = {"stage_index": 1, "action": "FORWARD", "slot": 0}
    meta = {VERSION_KEY: NODE_METADATA_VERSION, "gt.pipeline": stored}
    assert PipelineAnnotation.from_meta(meta) == PipelineAnnotation(**stored)
    wrong = {**meta, "gt.pipeline": {**stored, "stage_index": stage}}
    with pytest.raises(NodeMetadataError) as error:
        PipelineAnnotation.from_meta(wrong)
    assert f"stage_index is {told}" in str(error.value)


def test_refuses_wrong_values_all_at_once():
    with pytest.raises(NodeMetadataError) as error:
        ChunkAnnotation(region_root=3, role="body", chunk_id="1", direction="up", producer="graphs")
    assert str(error.value) == (
        "ChunkAnnotation: region_root is 3, not a string; chunk_id is '1', not an integer or None; "
        "direction is 'up', not 'forward' or 'backward'; producer is 'graphs', not 'eager' or "
        "'graph'"
    )


@pytest.mark.parametrize(
    ("role", "chunk_id", "text"),
    [
        ("body", None, "chunk_id is None, and the role 'body' needs one"),
        ("split_boundary", 0, "chunk_id is 0, and only the role 'body' has one"),
        ("materialization", 1, "chunk_id is 1, and only the role 'body' has one"),
        ("body", -1, "chunk_id is -1, not 0 or more"),
    ],
)
def test_only_the_body_of_a_chunk_has_an_id(role, chunk_id, text):
    with pytest.raises(NodeMetadataError) as error:
        ChunkAnnotation(
            region_root="layers.0",
            role=role,
            chunk_id=chunk_id,
            direction="forward",
            producer="graph",
        )
    assert str(error.value) == f"ChunkAnnotation: {text}"


def test_refuses_a_collective_without_parameters():
    with pytest.raises(NodeMetadataError, match="parameter_names is empty"):
        FsdpCollectiveAnnotation(kind="unshard", parameter_names=(), mesh_axis="fsdp")


def test_refuses_negative_pipeline_positions_together():
    with pytest.raises(NodeMetadataError) as error:
        PipelineAnnotation(stage_index=-1, action="FORWARD", slot=-2)
    assert str(error.value) == (
        "PipelineAnnotation: stage_index is -1, not 0 or more; slot is -2, not 0 or more"
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=_id)
def test_every_field_refuses_a_value_of_another_type(example):
    for name in get_type_hints(type(example)).keys() - {"KEY"}:
        with pytest.raises(NodeMetadataError, match=f"{name} is "):
            dataclasses.replace(example, **{name: object()})


@given(
    names=st.lists(st.text(min_size=1), min_size=1).map(tuple),
    kind=st.sampled_from(["unshard", "reduce_grad"]),
    axis=st.text(),
)
def test_any_collective_comes_back_equal(names, kind, axis):
    annotation = FsdpCollectiveAnnotation(kind=kind, parameter_names=names, mesh_axis=axis)
    stored = json.loads(json.dumps(annotation.to_meta()))
    assert FsdpCollectiveAnnotation.from_meta(stored) == annotation
