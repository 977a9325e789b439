"""The proof that a split loses no parameter and doubles none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from split_models import DECODER_NAMING, Decoder, Nested
from torch import nn

from gt_pipeline.errors import StageLayoutError, StageNamesError, TiedParametersError
from gt_pipeline.split import SharedGroup, check_cover, module_names_per_stage, stage_modules
from gt_pipeline.split.shared_groups import tied_parameters

TIED = SharedGroup(("embed.weight", "head.weight"))


def tied_decoder() -> Decoder:
    model = Decoder(2)
    model.head.weight = model.embed.weight
    return model


def test_each_parameter_is_told_with_its_stage():
    cover = check_cover(Decoder(2), [["embed", "layers.0"], ["layers.1", "norm", "head"]])
    assert cover == {
        "embed.weight": (0,),
        "layers.0.linear.weight": (0,),
        "layers.0.linear.bias": (0,),
        "layers.1.linear.weight": (1,),
        "layers.1.linear.bias": (1,),
        "norm.weight": (1,),
        "norm.bias": (1,),
        "head.weight": (1,),
    }


@settings(deadline=None, max_examples=40)
@given(num_layers=st.integers(1, 12), num_stages=st.integers(1, 8), dict_like=st.booleans())
def test_stages_of_any_number_of_layers_hold_the_state_of_the_model_once(
    num_layers: int, num_stages: int, dict_like: bool
):
    with torch.device("meta"):
        model = Decoder(num_layers, width=2, vocabulary=2, dict_like=dict_like)
    try:
        names = module_names_per_stage(num_layers, num_stages=num_stages, naming=DECODER_NAMING)
    except StageLayoutError:
        assert num_stages > num_layers + 2
        return
    stages = stage_modules(model, names, range(num_stages))
    in_stages = [name for stage in stages.values() for name in stage.state_dict()]
    assert in_stages == list(model.state_dict())


def test_what_is_on_no_stage_and_on_two_is_all_listed():
    with pytest.raises(StageNamesError) as caught:
        check_cover(
            Nested(),
            [["towers.left.0", "towers.right"], ["towers.left.1", "towers.right.0"]],
        )
    assert str(caught.value) == (
        "Nested on 2 stages:\n"
        "  - parameter 'position' is on no stage\n"
        "  - 'towers.left.2' (Linear, 2 parameters) is on no stage\n"
        "  - 'dropout' (Dropout, no parameters) is on no stage: list it on each stage that needs "
        "it\n"
        "  - parameter 'towers.right.0.weight' is on stages 0 and 1: list it once, or declare "
        "SharedGroup(('towers.right.0.weight',))\n"
        "  - parameter 'towers.right.0.bias' is on stages 0 and 1: list it once, or declare "
        "SharedGroup(('towers.right.0.bias',))"
    )


def test_modules_without_parameters_may_be_on_several_stages():
    cover = check_cover(
        Nested(),
        [["position", "towers.left", "dropout"], ["towers.right", "dropout"]],
    )
    assert cover["position"] == (0,)


def test_wrong_names_of_every_stage_are_listed_first():
    with pytest.raises(StageNamesError) as caught:
        check_cover(Decoder(1), [["embed", "layer"], [], ["head", "head"]])
    assert str(caught.value) == (
        "Decoder on 3 stages:\n"
        "  - stage 0: there is no 'layer': Decoder has embed, layers, norm, head; did you mean "
        "'layers'?\n"
        "  - stage 1 lists no name\n"
        "  - stage 2: 'head' is listed 2 times"
    )


class TestTies:
    def test_tied_parameters_are_found_by_identity_and_by_memory(self):
        model = tied_decoder()
        assert tied_parameters(model) == (("embed.weight", "head.weight"),)
        model.head.weight = nn.Parameter(model.embed.weight.data)
        assert tied_parameters(model) == (("embed.weight", "head.weight"),)
        assert tied_parameters(Decoder(2)) == ()

    def test_parameters_without_memory_are_tied_only_by_identity(self):
        with torch.device("meta"):
            model = Decoder(2)
        assert tied_parameters(model) == ()
        model.head.weight = model.embed.weight
        assert tied_parameters(model) == (("embed.weight", "head.weight"),)

    def test_on_two_stages_they_are_named_with_their_stages(self):
        with pytest.raises(TiedParametersError) as caught:
            check_cover(tied_decoder(), [["embed", "layers"], ["norm", "head"]])
        assert str(caught.value) == (
            "Decoder on 2 stages:\n"
            "  - 'embed.weight' on stage 0, 'head.weight' on stage 1 are one parameter: put them "
            "on one stage, or declare SharedGroup(('embed.weight', 'head.weight'))"
        )

    def test_beside_other_mistakes_they_are_listed_too(self):
        with pytest.raises(StageNamesError) as caught:
            check_cover(tied_decoder(), [["embed", "layers"], ["head"]])
        assert [problem.partition(" ")[0] for problem in caught.value.problems] == [
            "'norm'",
            "'embed.weight'",
        ]

    def test_on_one_stage_they_may_stay(self):
        cover = check_cover(tied_decoder(), [["layers"], ["embed", "norm", "head"]])
        assert cover["embed.weight"] == cover["head.weight"] == (1,)

    def test_in_a_declared_group_they_may_be_on_two(self):
        names = [["embed", "layers"], ["norm", "head"]]
        cover = check_cover(tied_decoder(), names, shared_groups=[TIED])
        assert (cover["embed.weight"], cover["head.weight"]) == ((0,), (1,))

    def test_two_groups_do_not_tie_what_is_one(self):
        groups = [SharedGroup(("embed.weight",)), SharedGroup(("head.weight",))]
        with pytest.raises(TiedParametersError):
            check_cover(
                tied_decoder(), [["embed", "layers"], ["norm", "head"]], shared_groups=groups
            )

    def test_one_parameter_may_be_on_many_stages_if_declared(self):
        names = [["embed", "layers", "norm"], ["norm", "head"]]
        groups = [SharedGroup(("norm.weight",)), SharedGroup(("norm.bias",))]
        cover = check_cover(Decoder(1), names, shared_groups=groups)
        assert cover["norm.weight"] == (0, 1)

    def test_groups_that_are_none_are_refused(self):
        groups = [
            SharedGroup(("embed.weight", "norm.weight")),
            SharedGroup(("norm.weight", "nothing")),
            SharedGroup(()),
        ]
        with pytest.raises(StageNamesError) as caught:
            check_cover(Decoder(1), [["embed", "layers", "norm", "head"]], shared_groups=groups)
        assert str(caught.value) == (
            "Decoder on 1 stages:\n"
            "  - shared group ('embed.weight', 'norm.weight'): its parameters differ: "
            "embed.weight (16, 8) torch.float32, norm.weight (8,) torch.float32\n"
            "  - shared group ('norm.weight', 'nothing'): 'nothing' is no parameter\n"
            "  - a shared group has no names\n"
            "  - 'norm.weight' is in shared groups 2 times"
        )
