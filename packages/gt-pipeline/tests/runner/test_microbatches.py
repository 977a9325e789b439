"""Splitting inputs into microbatches: what is split how, and what is refused."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from gt_pipeline.errors import MicrobatchError
from gt_pipeline.runner import MicrobatchDims
from gt_pipeline.runner.microbatches import split_microbatches


class _Pair(NamedTuple):
    left: Tensor
    right: Tensor


def test_tensors_split_along_their_first_dimension_unless_told() -> None:
    tokens, mask = torch.arange(8).view(4, 2), torch.arange(12).view(3, 4)
    first, second = split_microbatches(
        (tokens,),
        {"mask": mask},
        torch.arange(4),
        num_microbatches=2,
        dims=MicrobatchDims(kwargs={"mask": 1}),
    )
    assert first.args[0].tolist() == [[0, 1], [2, 3]]
    assert second.args[0].tolist() == [[4, 5], [6, 7]]
    assert second.kwargs["mask"].tolist() == [[2, 3], [6, 7], [10, 11]]
    assert (first.target.tolist(), second.target.tolist()) == ([0, 1], [2, 3])


def test_microbatches_are_views() -> None:
    tokens = torch.arange(4)
    _, second = split_microbatches((tokens,), {}, None, num_microbatches=2, dims=MicrobatchDims())
    assert second.args[0].data_ptr() == tokens[2:].data_ptr()


def test_none_passes_an_input_whole_to_every_microbatch() -> None:
    positions = torch.arange(3)
    parts = split_microbatches(
        (positions, torch.zeros(2)),
        {},
        None,
        num_microbatches=2,
        dims=MicrobatchDims(args=(None, 0)),
    )
    assert all(part.args[0] is positions for part in parts)


def test_containers_keep_their_type_and_numbers_are_repeated() -> None:
    pair = _Pair(torch.arange(2), torch.arange(4))
    first, second = split_microbatches(
        (pair, [torch.arange(2), 3]),
        {"options": {"a": torch.arange(2), "b": "text", "c": None}},
        None,
        num_microbatches=2,
        dims=MicrobatchDims(),
    )
    assert isinstance(first.args[0], _Pair)
    assert first.args[0].right.tolist() == [0, 1]
    assert second.args[1] == [torch.tensor([1]), 3]
    assert second.kwargs["options"] == {"a": torch.tensor([1]), "b": "text", "c": None}


def test_no_inputs_make_empty_microbatches() -> None:
    parts = split_microbatches((), {}, None, num_microbatches=3, dims=MicrobatchDims())
    assert [(part.args, part.kwargs, part.target) for part in parts] == [((), {}, None)] * 3


def test_refuses_all_that_does_not_split_at_once() -> None:
    with pytest.raises(MicrobatchError) as caught:
        split_microbatches(
            (torch.zeros(6), torch.tensor(1.0)),
            {"mask": object(), "nested": [torch.zeros(0)]},
            torch.zeros(4, 7),
            num_microbatches=4,
            dims=MicrobatchDims(target=1),
        )
    assert str(caught.value) == "\n".join(
        [
            "these inputs do not split into 4 microbatches:",
            (
                "  - argument 0 has size 6 along dimension 0, which is no multiple of 4; "
                "numbers of microbatches that divide it: [1, 2, 3, 6]"
            ),
            (
                "  - argument 1 has shape (), so there is no dimension 0 to split: "
                "give it another, or None to pass it whole to every microbatch"
            ),
            (
                "  - argument 'mask' is a object, which has no known dimensions: "
                "give it None to pass it whole to every microbatch, or split it before"
            ),
            (
                "  - argument 'nested'[0] has size 0 along dimension 0, which is no multiple of 4; "
                "numbers of microbatches that divide it: none"
            ),
            (
                "  - the target has size 7 along dimension 1, which is no multiple of 4; "
                "numbers of microbatches that divide it: [1, 7]"
            ),
        ]
    )


def test_refuses_dimensions_of_arguments_that_are_not_there() -> None:
    with pytest.raises(MicrobatchError) as caught:
        split_microbatches(
            (torch.zeros(2),),
            {"mask": torch.zeros(2)},
            None,
            num_microbatches=2,
            dims=MicrobatchDims(args=(0, 0), kwargs={"msak": 0}),
        )
    assert caught.value.problems == (
        "the dimensions are those of 2 positional arguments, and there are 1",
        (
            "dimensions are given for keyword arguments ['msak'], which are not passed; "
            "passed are ['mask']"
        ),
    )
