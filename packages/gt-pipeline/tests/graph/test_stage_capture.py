"""One microbatch's shapes are enough to capture a stage; what has not the form of one is refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from stage_models import ACTIVATION, Block, squared_error
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from gt_pipeline.errors import StageCaptureError
from gt_pipeline.graph import ActivationPlacement, capture_stage, cut_stage
from gt_pipeline.runner import ActivationSignature, MicrobatchInputs
from gt_trace import CaptureError
from gt_trace.testing import fake_world


class Returns(nn.Module):
    """Returns what a function makes of its inputs and its one parameter."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.weight, *args, **kwargs)


def middle(function: Any, **options: Any) -> Any:
    options = {"stage_index": 1, "num_stages": 3, "activations": [ACTIVATION], **options}
    return capture_stage(Returns(function), **options)


def test_what_goes_in_and_out_has_names() -> None:
    capture = capture_stage(
        Block(),
        stage_index=2,
        num_stages=3,
        activations=[ACTIVATION],
        inputs=MicrobatchInputs(target=torch.zeros(4, 8)),
        loss_fn=squared_error,
    )
    names = [str(slot) for slot in capture.inputs]
    assert names[:2] == ["parameter up.weight", "parameter up.bias"]
    assert names[-3:] == [
        "argument activations[0]",
        "argument target",
        "output_gradient output_gradients[0]",
    ]
    assert [str(slot) for slot in capture.results[:3]] == [
        "output outputs[0]",
        "input_gradient input_gradients[0]",
        "gradient up.weight",
    ]
    loss = ActivationSignature(shape=(), dtype=torch.float32, requires_grad=True)
    assert capture.output_signature == (loss,)


def test_no_kernel_runs_and_no_memory_is_needed() -> None:
    with torch.device("meta"):
        module = Block(hidden=2**20)
    capture = capture_stage(module, stage_index=1, num_stages=3, activations=[ACTIVATION])
    assert capture.traced.example_inputs[0].device.type == "cpu"
    assert all(parameter.is_meta for parameter in module.parameters())


def test_buffers_and_the_random_stream_are_as_before() -> None:
    module = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5))
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    state = torch.get_rng_state()
    capture_stage(module, stage_index=1, num_stages=3, activations=[ACTIVATION])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], buffer) for name, buffer in module.named_buffers())


def test_outputs_without_gradient_get_none_and_need_none() -> None:
    capture = middle(lambda w, x: (x * w, (x.detach() > 0)))
    assert [each.requires_grad for each in capture.output_signature] == [True, False]
    assert sum(slot.kind == "output_gradient" for slot in capture.inputs) == 1


def test_what_a_loss_returns_beside_it_has_no_gradient() -> None:
    capture = middle(
        lambda w, x: x * w,
        stage_index=2,
        inputs=MicrobatchInputs(target=torch.zeros(4, 8)),
        loss_fn=lambda output, target: (squared_error(output, target), output.mean()),
    )
    assert [each.requires_grad for each in capture.output_signature] == [True, False]


def test_a_frozen_stage_is_captured_without_parameter_gradients() -> None:
    module = Block().requires_grad_(False)
    capture = capture_stage(module, stage_index=1, num_stages=3, activations=[ACTIVATION])
    assert [slot.kind for slot in capture.results if slot] == ["output", "input_gradient"]


@pytest.mark.parametrize(
    ("options", "problems"),
    [
        (
            {"stage_index": 3, "activations": []},
            [
                "stage_index is 3; allowed: 0 to 2",
                "no activations were given; the stage before it sends some",
            ],
        ),
        (
            {"stage_index": 0},
            [
                "it is the first stage and was given 1 activations; give inputs=MicrobatchInputs(args=...)"
            ],
        ),
        ({"loss_fn": squared_error}, ["it has a loss and is not the last of 3 stages"]),
    ],
)
def test_refuses_a_place_that_does_not_fit(options: dict[str, Any], problems: list[str]) -> None:
    with pytest.raises(StageCaptureError) as caught:
        middle(lambda w, x: x, **options)
    assert list(caught.value.problems) == problems


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda w, x: (x * w, 3), "it returns a int; return tensors, alone or in tuples"),
        (lambda w, x: (), "it returns nothing"),
    ],
)
def test_refuses_outputs_that_are_no_tensors(function: Any, problem: str) -> None:
    with pytest.raises(StageCaptureError) as caught:
        middle(function)
    assert caught.value.problems == (problem,)


def test_refuses_a_loss_of_more_than_one_number() -> None:
    with pytest.raises(StageCaptureError) as caught:
        middle(
            lambda w, x: x * w,
            stage_index=2,
            inputs=MicrobatchInputs(target=torch.zeros(4, 8)),
            loss_fn=lambda output, target: output - target,
        )
    assert str(caught.value) == (
        "stage 2 cannot be captured:\n"
        "  - the loss is of shape [4, 8]; reduce it to one number of shape ()"
    )


def test_refuses_an_assignment_to_the_data_of_a_parameter() -> None:
    class Clipped(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data = self.weight.data.clamp(-0.1, 0.1)
            return super().forward(x)

    with pytest.raises(CaptureError, match="parameter weight is given other memory"):
        capture_stage(Clipped(4, 4), stage_index=1, num_stages=3, activations=[torch.ones(2, 4)])


def test_refuses_dynamic_sizes() -> None:
    def first(w: Tensor, tokens: Tensor) -> Tensor:
        return tokens * w

    tokens = torch.zeros(4, 8)
    torch._dynamo.mark_dynamic(tokens, 0)
    with pytest.raises(StageCaptureError) as caught:
        capture_stage(
            Returns(first), stage_index=0, num_stages=3, inputs=MicrobatchInputs(args=(tokens,))
        )
    assert caught.value.problems == ("args[0] has a dynamic size; microbatches are alike",)


def test_a_distributed_activation_travels_as_its_local_tensor() -> None:
    with fake_world(rank=0, world_size=2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        first = capture_stage(
            Returns(lambda w, x: DTensor.from_local(x * w, mesh, [Shard(1)])),
            stage_index=0,
            num_stages=2,
            inputs=MicrobatchInputs(args=(torch.zeros(4, 8),)),
        )
        (placement,) = first.output_placements
        assert placement == ActivationPlacement(
            mesh_axes=("tp",), placements=(Shard(1),), shape=(4, 16)
        )
        sent = pickle.loads(pickle.dumps(placement))
        last = capture_stage(
            Returns(lambda w, x: x.full_tensor().sum() * w.sum()),
            stage_index=1,
            num_stages=2,
            activations=[sent.example(first.output_signature[0], mesh)],
        )
        assert last.input_signature == first.output_signature == (ACTIVATION,)
        graphs = cut_stage(last)
        assert graphs.full_backward is not None
        assert graphs.full_backward.result_nodes()[0].meta["val"].shape == (4, 8)
