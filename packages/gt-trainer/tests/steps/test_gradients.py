"""Gradients that a captured step returned become ``param.grad`` as autograd would leave it."""

import torch
from torch import nn

from gt_trace import trace_step
from gt_trainer.steps.program_step import accumulate_gradients


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
