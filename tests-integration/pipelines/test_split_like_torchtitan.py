"""Where torchtitan's core splits a model, gt_pipeline.split gives the same; where not, it says why.

The peer is torchtitan/distributed/pipeline_parallel.py. What its functions ask of configuration
objects is given as plain namespaces.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchtitan.distributed import pipeline_parallel as peer
from torchtitan.distributed.utils import set_spmd_backend

from gt_pipeline.split import (
    TORCHTITAN_NAMING,
    check_cover,
    find_naming,
    find_schedule_layout,
    module_names_per_stage,
    pipeline_metadata,
    split_module,
    stage_indices_of_rank,
)
from gt_pipeline.split.schedule_layout import SCHEDULE_LAYOUTS

WEIGHTS = st.integers(0, 4)
SCHEDULES = st.sampled_from(sorted(SCHEDULE_LAYOUTS))


@settings(deadline=None, max_examples=300)
@given(
    num_layers=st.integers(1, 64),
    num_stages=st.integers(1, 40),
    input_weight=WEIGHTS,
    output_weight=WEIGHTS,
)
def test_layers_are_divided_alike_and_the_same_divisions_refused(
    num_layers: int, num_stages: int, input_weight: int, output_weight: int
):
    def ours() -> list[list[str]]:
        stages = module_names_per_stage(
            num_layers,
            num_stages=num_stages,
            naming=TORCHTITAN_NAMING,
            input_weight=input_weight,
            output_weight=output_weight,
        )
        return [list(names) for names in stages]

    def theirs() -> list[list[str]]:
        return peer._generate_llm_fqn_per_model_part(
            num_stages, num_layers, input_weight, output_weight
        )

    assert result_or_error(ours) == result_or_error(theirs)


@settings(deadline=None, max_examples=300)
@given(
    num_layers=st.integers(1, 64),
    pp_degree=st.integers(1, 8),
    layers_per_stage=st.none() | st.integers(1, 16),
    weights=st.tuples(WEIGHTS, WEIGHTS),
    schedule=SCHEDULES,
)
def test_numbers_of_stages_are_alike(
    num_layers: int,
    pp_degree: int,
    layers_per_stage: int | None,
    weights: tuple[int, int],
    schedule: str,
):
    def ours() -> tuple[int, ...]:
        metadata = pipeline_metadata(
            num_layers,
            schedule=schedule,
            pp_degree=pp_degree,
            layers_per_stage=layers_per_stage,
            input_weight=weights[0],
            output_weight=weights[1],
        )
        return (
            metadata.num_stages,
            metadata.num_layers,
            metadata.input_weight,
            metadata.output_weight,
        )

    def theirs() -> tuple[int, ...]:
        numbers = peer._get_pipeline_metadata(
            SimpleNamespace(pp=pp_degree),
            SimpleNamespace(
                pipeline_parallel_schedule=schedule,
                pipeline_parallel_layers_per_stage=layers_per_stage,
                pipeline_parallel_first_stage_less_layers=weights[0],
                pipeline_parallel_last_stage_less_layers=weights[1],
            ),
            SimpleNamespace(layers=[None] * num_layers),
        )
        # It finds out that a V has two stages on a rank only when it places them: here.
        stages_of_rank_0(numbers[0], pp_degree, schedule)
        return numbers

    def stages_of_rank_0(num_stages: int, pp_degree: int, schedule: str) -> None:
        try:
            peer._get_pp_rank_to_stage_indices_mapping(0, pp_degree, schedule, num_stages)
        except AssertionError as error:
            raise ValueError from error

    assert result_or_error(ours) == result_or_error(theirs)


@settings(deadline=None)
@given(pp_degree=st.integers(1, 8), stages_per_rank=st.integers(1, 4), schedule=SCHEDULES)
def test_stages_lie_on_ranks_alike(pp_degree: int, stages_per_rank: int, schedule: str):
    num_stages = pp_degree * stages_per_rank
    style = find_schedule_layout(schedule).style
    for rank in range(pp_degree):
        if style == "v" and stages_per_rank != 2:
            with pytest.raises(AssertionError):
                peer._get_pp_rank_to_stage_indices_mapping(rank, pp_degree, schedule, num_stages)
            with pytest.raises(ValueError, match="style 'v' has 2 stages on a rank"):
                stage_indices_of_rank(rank, pp_degree, num_stages, style=style)
            continue
        assert stage_indices_of_rank(
            rank, pp_degree, num_stages, style=style
        ) == peer._get_pp_rank_to_stage_indices_mapping(rank, pp_degree, schedule, num_stages)


@pytest.mark.parametrize(
    ("module", "name"),
    [("llama3", "llama3_debugmodel"), ("deepseek_v3", "deepseek_v3_debugmodel")],
)
def test_its_models_split_alike(module: str, name: str):
    config = getattr(importlib.import_module(f"gt_trainer.models.{module}"), name)()
    specification = config.model_spec.model
    specification.update_from_config(config=config)
    set_spmd_backend("partial_dtensor")
    with torch.device("meta"):
        model = specification.build()
    naming = find_naming(model)
    num_layers = len(naming.layer_names_of(model))
    names = module_names_per_stage(num_layers, num_stages=4, naming=naming)
    check_cover(model, names)
    for listed in names:
        ours, theirs = split_module(model, listed), peer._split_module(model, list(listed))
        assert list(ours.state_dict()) == list(theirs.state_dict())
        assert structure(ours) == structure(theirs)


def test_names_in_a_module_list_survive_here_and_not_there():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(4)])
    listed = ["layers.2", "layers.3"]
    assert list(split_module(model, listed).state_dict()) == ["layers.2.weight", "layers.3.weight"]
    assert list(peer._split_module(model, listed).state_dict()) == [
        "layers.0.weight",
        "layers.1.weight",
    ]


def structure(model: nn.Module) -> dict[str, str | None]:
    """Types of children, also of those that are None, by name."""
    found: dict[str, str | None] = {}
    for name, module in model.named_modules():
        for child_name, child in module._modules.items():
            found[f"{name}.{child_name}"] = None if child is None else type(child).__name__
    return found


def result_or_error(function):
    try:
        return function()
    except ValueError:
        return "refused"
