"""How many stages a pipeline has."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

from gt_pipeline.errors import StageLayoutError
from gt_pipeline.split import ScheduleLayout, find_schedule_layout, pipeline_metadata
from gt_pipeline.split.metadata import PipelineMetadata
from gt_pipeline.split.schedule_layout import SCHEDULE_LAYOUTS


def test_a_schedule_with_one_stage_a_rank_has_as_many_stages_as_ranks():
    assert pipeline_metadata(32, schedule="1F1B", pp_degree=4) == PipelineMetadata(
        num_layers=32,
        num_stages=4,
        pp_degree=4,
        stages_per_rank=1,
        style="loop",
        input_weight=1,
        output_weight=1,
    )


def test_other_schedules_have_two_stages_a_rank_unless_layers_per_stage_says_more():
    assert pipeline_metadata(30, schedule="interleaved1f1b", pp_degree=4).num_stages == 8
    metadata = pipeline_metadata(30, schedule="Interleaved1F1B", pp_degree=4, layers_per_stage=2)
    assert (metadata.num_stages, metadata.stages_per_rank) == (16, 4)


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV"])
def test_v_schedules_place_stages_in_a_v(name: str):
    assert pipeline_metadata(30, schedule=name, pp_degree=4).style == "v"


def test_a_schedule_that_torch_does_not_have_is_described_by_its_layout():
    layout = ScheduleLayout(style="loop", min_stages_per_rank=3, max_stages_per_rank=3)
    assert pipeline_metadata(10, schedule=layout, pp_degree=2).num_stages == 6


@pytest.mark.parametrize("name", SCHEDULE_LAYOUTS)
def test_layouts_say_of_each_schedule_what_torch_says(name: str):
    schedule = schedules.get_schedule_class(name)
    layout = find_schedule_layout(name)
    is_single = issubclass(schedule, schedules.PipelineScheduleSingle)
    assert (layout.max_stages_per_rank == 1) is is_single
    is_v = schedule in (schedules.ScheduleZBVZeroBubble, schedules.ScheduleDualPipeV)
    assert (layout.style == "v") is is_v


def test_every_schedule_that_torch_names_has_a_layout():
    with pytest.raises(ValueError, match="valid options") as caught:
        schedules.get_schedule_class("none of them")
    for name in SCHEDULE_LAYOUTS:
        assert repr(name) in str(caught.value)
    assert str(caught.value).count("'") == 2 + 2 * (len(SCHEDULE_LAYOUTS) + 2)  # two are abstract


@settings(deadline=None)
@given(
    num_layers=st.integers(1, 130),
    pp_degree=st.integers(1, 16),
    layers_per_stage=st.integers(1, 20),
    weights=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    name=st.sampled_from(sorted(SCHEDULE_LAYOUTS)),
)
def test_what_is_accepted_fits_and_what_is_refused_says_what_would(
    num_layers: int, pp_degree: int, layers_per_stage: int, weights: tuple[int, int], name: str
):
    options = {
        "schedule": name,
        "pp_degree": pp_degree,
        "input_weight": weights[0],
        "output_weight": weights[1],
    }
    try:
        metadata = pipeline_metadata(num_layers, layers_per_stage=layers_per_stage, **options)
    except StageLayoutError as error:
        [advice] = [text for text in error.problems if text.startswith("layers_per_stage that fit")]
        fitting = advice.partition(": ")[2].partition(" (")[0]
        for value in [] if fitting == "none" else fitting.split(", "):
            pipeline_metadata(num_layers, layers_per_stage=int(value), **options)
        return
    layout = SCHEDULE_LAYOUTS[name]
    assert metadata.num_stages == metadata.stages_per_rank * pp_degree
    assert metadata.stages_per_rank >= layout.min_stages_per_rank
    assert metadata.stages_per_rank <= (layout.max_stages_per_rank or metadata.stages_per_rank)
    counted = num_layers + sum(weights)
    assert (metadata.num_stages - 1) * layers_per_stage < counted
    assert counted <= metadata.num_stages * layers_per_stage


@pytest.mark.parametrize(
    ("num_layers", "options", "text"),
    [
        (
            32,
            {"schedule": "ZBVZeroBubble", "pp_degree": 4, "layers_per_stage": 5},
            (
                "32 layers on 4 pipeline ranks by ZBVZeroBubble, layers_per_stage=5:\n"
                "  - 7 stages do not divide among 4 ranks\n"
                "  - layers_per_stage that fit: none (34 layers with input_weight=1 and "
                "output_weight=1)"
            ),
        ),
        (
            30,
            {"schedule": "1F1B", "pp_degree": 4, "layers_per_stage": 4},
            (
                "30 layers on 4 pipeline ranks by 1F1B, layers_per_stage=4:\n"
                "  - the schedule has at most 1 stage on a rank, not 2\n"
                "  - layers_per_stage that fit: 8, 9, 10 (32 layers with input_weight=1 and "
                "output_weight=1)"
            ),
        ),
        (
            30,
            {"schedule": "Interleaved1F1B", "pp_degree": 4, "layers_per_stage": 8},
            (
                "30 layers on 4 pipeline ranks by Interleaved1F1B, layers_per_stage=8:\n"
                "  - the schedule has at least 2 stages on a rank, not 1\n"
                "  - layers_per_stage that fit: 1, 2, 4 (32 layers with input_weight=1 and "
                "output_weight=1)"
            ),
        ),
        (
            0,
            {
                "schedule": "GPipe",
                "pp_degree": 0,
                "layers_per_stage": 0,
                "input_weight": -1,
                "output_weight": -2,
            },
            (
                "0 layers on 0 pipeline ranks by GPipe:\n"
                "  - num_layers is 0, must be at least 1\n"
                "  - pp_degree is 0, must be at least 1\n"
                "  - layers_per_stage is 0, must be at least 1\n"
                "  - input_weight is -1, must be at least 0\n"
                "  - output_weight is -2, must be at least 0"
            ),
        ),
        (
            4,
            {"schedule": "ZBV", "pp_degree": 2},
            (
                "schedule 'ZBV':\n"
                "  - it is none of GPipe, 1F1B, Interleaved1F1B, InterleavedZeroBubble, "
                "ZBVZeroBubble, DualPipeV, LoopedBFS; describe another one by a ScheduleLayout"
            ),
        ),
    ],
)
def test_refuses_numbers_that_do_not_fit_and_says_which_would(
    num_layers: int, options: dict, text: str
):
    with pytest.raises(StageLayoutError) as caught:
        pipeline_metadata(num_layers, **options)
    assert str(caught.value) == text
