"""Alike stages have one document, which each reads with its own numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gt_trace.errors import ArtifactError
from gt_trainer.artifacts.stage_names import StageNames


def names(stage_index: int, *layers: int) -> StageNames:
    return StageNames(stage_index=stage_index, num_stages=8, layers=layers)


def document(stage_index: int, first: int, second: int) -> dict[str, object]:
    """What stands in the document of a stage of two layers."""
    return {
        "stage_index": stage_index,
        "state": [f"layers.{first}.w", f"layers.{second}.w", "norm.layers.w"],
        "nodes": [["p", f"layers_{first}_w", f"layers_{second}_w_1", ["layers", first]]],
        "values": [["d", ["gt.pipeline", ["d", ["stage_index", stage_index], ["slot", 0]]]]],
        "elsewhere": ["layers.99.w", "sublayers.9", "players_10", "layers10"],
    }


def test_alike_stages_have_one_document_and_each_reads_its_own():
    first, second = names(1, 9, 10), names(2, 11, 12)
    # A number that stands alone is no name: whoever stores it makes stages unlike.
    stored = first.without({**document(1, 9, 10), "nodes": []})
    assert stored == second.without({**document(2, 11, 12), "nodes": []})
    assert stored["stage_index"] == 0
    assert stored["state"][:2] == ["layers.#0.w", "layers.#1.w"]
    assert second.restored(stored) == {**document(2, 11, 12), "nodes": []}


@given(layers=st.sets(st.integers(0, 120), min_size=2, max_size=2), index=st.integers(0, 7))
def test_what_was_stored_comes_back(layers: set[int], index: int):
    own = names(index, *sorted(layers))
    written = document(index, *sorted(layers))
    assert own.restored(own.without(written)) == written


def test_names_that_are_kept_for_stored_stages_are_refused():
    with pytest.raises(ArtifactError, match=r"names like 'layers\.#0' are kept"):
        names(0, 0).without({"state": ["layers.#0.w"]})


def test_a_stored_stage_of_more_layers_is_refused():
    stored = names(1, 3, 4).without({"state": ["layers.3.w", "layers.4.w"]})
    with pytest.raises(ArtifactError, match="a stored stage has a layer 1 of its own, and this"):
        names(2, 5).restored(stored)


def test_a_module_is_called_by_the_place_of_its_layer():
    own = names(1, 9, 10)
    assert own.of_module("layers.10.attention.layers.10") == "layers.1.attention.layers.10"
    assert [own.of_module(each) for each in ("layers.9", "layers", "norm.weight")] == [
        "layers.0",
        "layers",
        "norm.weight",
    ]


@pytest.mark.parametrize(
    ("options", "found"),
    [(["layers.*", "layers"], False), ([{"fqn": "layers.3.moe"}], True), (["layers_3"], True)],
)
def test_options_of_passes_may_name_a_layer(options: list[object], found: bool):
    assert names(0, 1).names_a_layer(options) is found


def test_layers_are_those_of_the_part():
    part = nn.Module()
    part.layers = nn.ModuleDict({"10": nn.Linear(1, 1, device=torch.device("meta"))})
    part.layers["9"] = nn.Linear(1, 1, device=torch.device("meta"))
    assert StageNames.of(part, stage_index=2, num_stages=8) == names(2, 9, 10)
