"""Gradients that a captured step returned become ``param.grad`` as autograd would leave it."""

import math
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from gt_trace import trace_step
from gt_trainer.steps.gradients import (
    NonFiniteGradientsError,
    accumulate_gradients,
    refuse_non_finite_gradients,
)


def test_first_gradient_is_taken_and_later_ones_are_added_in_place():
    parameter = nn.Parameter(torch.zeros(3))
    first = torch.ones(3)
    accumulate_gradients([parameter], [first])
    assert parameter.grad is first
    accumulate_gradients([parameter], [torch.full((3,), 2.0)])
    assert parameter.grad is first
    assert torch.equal(parameter.grad, torch.full((3,), 3.0))


def test_gradient_of_another_layout_is_copied_into_the_parameters():
    parameter = nn.Parameter(torch.zeros(2, 3))
    accumulate_gradients([parameter], [torch.arange(6.0).reshape(3, 2).t()])
    assert parameter.grad.stride() == (3, 1)
    assert torch.equal(parameter.grad, torch.arange(6.0).reshape(3, 2).t())


def test_parameter_that_the_loss_does_not_depend_on_keeps_no_gradient():
    parameter = nn.Parameter(torch.zeros(3))
    accumulate_gradients([parameter], [None])
    assert parameter.grad is None


def test_parameters_with_one_and_the_same_gradient_get_memory_of_their_own():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.ones(3))
            self.b = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return ((self.a + self.b) * x).sum()

    model = Sum()

    def step(x):
        loss = model(x)
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    x = torch.arange(3.0)
    _, gradients = trace_step(step, module=model)(x).bind(model)(x)
    assert gradients[0].data_ptr() == gradients[1].data_ptr()
    parameters = list(model.parameters())
    accumulate_gradients(parameters, gradients)
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    for parameter in parameters:
        assert torch.allclose(parameter.grad, x / norm)


def test_gradient_that_is_the_parameter_itself_is_copied():
    parameter = nn.Parameter(torch.ones(3))
    accumulate_gradients([parameter], [parameter.detach()])
    parameter.grad.mul_(5)
    assert torch.equal(parameter, torch.ones(3))


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def with_gradients(mesh, *gradients):
    parameters = []
    for gradient in gradients:
        parameter = nn.Parameter(DTensor.from_local(torch.zeros_like(gradient), mesh, [Shard(0)]))
        parameter.grad = DTensor.from_local(gradient, mesh, [Shard(0)])
        parameters.append(parameter)
    return [*parameters, nn.Parameter(torch.zeros(2))]  # the last has no gradient


def test_finite_gradients_pass_with_empty_shards_and_parameters_without_one(one_rank):
    parameters = with_gradients(one_rank, torch.full((2,), 1e30), torch.zeros(0))
    refuse_non_finite_gradients(parameters, step=3, device=torch.device("cpu"))
    refuse_non_finite_gradients([], step=3, device=torch.device("cpu"))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_element_that_is_not_finite_is_refused_with_the_step(one_rank, value):
    parameters = with_gradients(one_rank, torch.ones(3), torch.tensor([1.0, value]))
    with pytest.raises(NonFiniteGradientsError) as refused:
        refuse_non_finite_gradients(parameters, step=3, device=torch.device("cpu"))
    assert str(refused.value) == (
        "step 3: gradients are not finite (NaN or infinite). Their update was not made, and nothing "
        "of this step was saved.\n"
        "  Often the learning rate is too high (--optimizer.param_groups.0.optimizer_kwargs.lr),\n"
        "  or its warm-up too short (--lr_scheduler.warmup_steps)"
    )


def test_all_ranks_stop_when_one_has_such_a_gradient(tmp_path):
    program = """
        import os, sys
        from pathlib import Path
        from gt_trainer.launcher import launch, prepare_environment
        prepare_environment(os.environ, num_ranks=3)
        import torch
        from gt_trainer.steps.gradients import NonFiniteGradientsError, refuse_non_finite_gradients

        def run():
            torch.distributed.init_process_group("gloo")
            parameter = torch.zeros(2, requires_grad=True)
            parameter.grad = torch.tensor([1.0, float("nan" if os.environ["RANK"] == "1" else "2")])
            try:
                refuse_non_finite_gradients([parameter], step=3, device=torch.device("cpu"))
            except NonFiniteGradientsError as error:
                Path(sys.argv[1], os.environ["RANK"]).write_text(str(error))

        sys.exit(launch(run, num_ranks=3, log_folder=Path(sys.argv[1])))
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    subprocess.run(command, check=True, timeout=300)
    assert len({(tmp_path / rank).read_text() for rank in "012"}) == 1
