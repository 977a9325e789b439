"""The even division of layers among stages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from split_models import DECODER_NAMING, Decoder

from gt_pipeline.errors import StageLayoutError, StageNamesError
from gt_pipeline.split import (
    HUGGING_FACE_NAMING,
    TORCHTITAN_NAMING,
    LayerNaming,
    find_naming,
    module_names_per_stage,
)

ROTARY = LayerNaming(first=("a",), layers="blocks", last=("z",), every_stage=("rotary",))


def test_first_and_last_parts_count_as_layers():
    assert module_names_per_stage(6, num_stages=4, naming=TORCHTITAN_NAMING) == (
        ("tok_embeddings", "layers.0"),
        ("layers.1", "layers.2"),
        ("layers.3", "layers.4"),
        ("layers.5", "norm", "lm_head"),
    )


def test_heavier_ends_get_fewer_layers():
    assert module_names_per_stage(
        7, num_stages=2, naming=TORCHTITAN_NAMING, input_weight=1, output_weight=4
    ) == (
        ("tok_embeddings", *(f"layers.{index}" for index in range(5))),
        ("layers.5", "layers.6", "norm", "lm_head"),
    )


def test_one_stage_has_everything():
    assert module_names_per_stage(2, num_stages=1, naming=ROTARY, input_weight=9) == (
        ("a", "blocks.0", "blocks.1", "z", "rotary"),
    )


def test_what_every_stage_needs_is_on_every_stage():
    names = module_names_per_stage(4, num_stages=3, naming=ROTARY)
    assert all(stage[-1] == "rotary" for stage in names)


@settings(deadline=None)
@given(
    num_layers=st.integers(1, 140),
    num_stages=st.integers(1, 40),
    input_weight=st.integers(0, 4),
    output_weight=st.integers(0, 4),
)
def test_each_layer_is_on_one_stage_in_order_and_stages_are_balanced(
    num_layers: int, num_stages: int, input_weight: int, output_weight: int
):
    try:
        names = module_names_per_stage(
            num_layers,
            num_stages=num_stages,
            naming=ROTARY,
            input_weight=input_weight,
            output_weight=output_weight,
        )
    except StageLayoutError:
        least = (num_layers + input_weight + output_weight) // num_stages
        assert num_stages > 1
        assert least == 0 or max(input_weight, output_weight) > least
        return
    assert len(names) == num_stages
    in_order = [name for stage in names for name in stage if name != "rotary"]
    assert in_order == ["a", *(f"blocks.{index}" for index in range(num_layers)), "z"]
    counted = [sum(name.startswith("blocks.") for name in stage) for stage in names]
    counted[0] += input_weight
    counted[-1] += output_weight
    assert max(counted) - min(counted) <= 1
    assert counted == sorted(counted, reverse=True)


@pytest.mark.parametrize(
    ("num_layers", "options", "text"),
    [
        (
            2,
            {"num_stages": 5},
            (
                "2 layers in 5 stages:\n"
                "  - there are only 4 layers counted with input_weight and output_weight: at most 4 "
                "stages"
            ),
        ),
        (
            4,
            {"num_stages": 4, "input_weight": 4, "output_weight": 5},
            (
                "4 layers in 4 stages:\n"
                "  - input_weight is 4, more than the 3 that a stage has of 13 layers counted with "
                "input_weight and output_weight\n"
                "  - output_weight is 5, more than the 3 that a stage has of 13 layers counted with "
                "input_weight and output_weight"
            ),
        ),
        (
            0,
            {"num_stages": 0, "input_weight": -1, "output_weight": -1},
            (
                "0 layers in 0 stages:\n"
                "  - num_layers is 0, must be at least 1\n"
                "  - num_stages is 0, must be at least 1\n"
                "  - input_weight is -1, must be at least 0\n"
                "  - output_weight is -1, must be at least 0"
            ),
        ),
    ],
)
def test_refuses_divisions_that_leave_a_stage_empty(num_layers: int, options: dict, text: str):
    with pytest.raises(StageLayoutError) as caught:
        module_names_per_stage(num_layers, naming=ROTARY, **options)
    assert str(caught.value) == text


def test_names_of_layers_are_read_from_the_model():
    assert DECODER_NAMING.layer_names_of(Decoder(3)) == ("layers.0", "layers.1", "layers.2")
    assert DECODER_NAMING.names_of(Decoder(1, dict_like=False)) == (
        "embed",
        "layers.0",
        "norm",
        "head",
    )


def test_a_naming_that_does_not_fit_says_what_the_model_has():
    with pytest.raises(StageNamesError) as caught:
        LayerNaming(first=("embedding",), layers="blocks").names_of(Decoder(1))
    assert str(caught.value) == (
        "parts of the model:\n"
        "  - there is no 'embedding': Decoder has embed, layers, norm, head; did you mean "
        "'embed'?\n"
        "  - there is no 'blocks': Decoder has embed, layers, norm, head"
    )
    with pytest.raises(StageNamesError, match="there is no 'blocks'"):
        LayerNaming(layers="blocks").layer_names_of(Decoder(1))


def test_the_naming_of_a_model_is_found_among_known_ones():
    known = {"hugging face": HUGGING_FACE_NAMING, "ours": DECODER_NAMING}
    assert find_naming(Decoder(1), known=known) is DECODER_NAMING


def test_a_model_that_no_naming_fits_is_refused_with_what_each_misses():
    with pytest.raises(StageNamesError) as caught:
        find_naming(Decoder(1), known={"titan": TORCHTITAN_NAMING})
    assert str(caught.value) == (
        "naming of Decoder:\n"
        "  - titan: there is no 'tok_embeddings': Decoder has embed, layers, norm, head\n"
        "  - titan: there is no 'lm_head': Decoder has embed, layers, norm, head; did you mean "
        "'head'?"
    )


def test_a_model_that_two_namings_fit_is_refused():
    known = {"one": DECODER_NAMING, "two": LayerNaming(layers="layers")}
    with pytest.raises(StageNamesError, match="one, two all fit: choose one"):
        find_naming(Decoder(1), known=known)
