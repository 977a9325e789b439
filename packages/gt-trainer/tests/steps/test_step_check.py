"""What is not finite ends the run: gradients on CPU before their update, on a GPU before it is saved."""

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

from gt_trainer.device_transfer import HostCopy, copy_to_host
from gt_trainer.steps import step_check
from gt_trainer.steps.step_check import NonFiniteGradientsError, NonFiniteLossError, StepCheck

CPU = torch.device("cpu")
LOSS = torch.tensor(2.5)


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
    StepCheck(CPU).check(parameters, LOSS, step=3)
    StepCheck(CPU).check([], LOSS, step=3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_element_that_is_not_finite_is_refused_with_the_step(one_rank, value):
    parameters = with_gradients(one_rank, torch.ones(3), torch.tensor([1.0, value]))
    with pytest.raises(NonFiniteGradientsError) as refused:
        StepCheck(CPU).check(parameters, LOSS, step=3)
    assert str(refused.value) == (
        "step 3: gradients are not finite (NaN or infinite). Its update was not made, and nothing "
        "of this step was saved.\n"
        "  Often the learning rate is too high (--optimizer.param_groups.0.optimizer_kwargs.lr),\n"
        "  or its warm-up too short (--lr_scheduler.warmup_steps)"
    )


class Event:
    """A device's event that is reached when it is waited for."""

    def __init__(self):
        self.num_waits = 0

    def query(self):
        return self.num_waits > 0

    def synchronize(self):
        self.num_waits += 1


@pytest.fixture
def verdicts(monkeypatch):
    """The events of verdicts that come from a device, in order."""
    events = []

    def copy(values):
        ready = copy_to_host(values)
        events.append(Event())
        return HostCopy(names=ready.names, numbers=ready.numbers, copied=events[-1])

    monkeypatch.setattr(step_check, "copy_to_host", copy)
    return events


def test_on_a_gpu_a_step_is_judged_before_the_update_of_the_next(one_rank, verdicts):
    check = StepCheck(CPU)
    check.check(with_gradients(one_rank, torch.ones(3)), LOSS, step=1)
    check.check(with_gradients(one_rank, torch.tensor([math.nan])), LOSS, step=2)
    assert [event.num_waits for event in verdicts] == [1, 0]
    with pytest.raises(NonFiniteGradientsError, match="step 2: gradients are not finite"):
        check.check(with_gradients(one_rank, torch.ones(3)), LOSS, step=3)


def test_on_a_gpu_settling_judges_the_last_step_once(one_rank, verdicts):
    check = StepCheck(CPU)
    check.check(with_gradients(one_rank, torch.tensor([math.inf])), LOSS, step=7)
    with pytest.raises(NonFiniteGradientsError) as refused:
        check.settle()
    assert str(refused.value).startswith(
        "step 7: gradients are not finite (NaN or infinite). Nothing of this step was saved.\n"
    )
    check.settle()
    assert verdicts[0].num_waits == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_loss_that_is_not_finite_is_refused_with_the_step(one_rank, value):
    with pytest.raises(NonFiniteLossError) as refused:
        StepCheck(CPU).check(with_gradients(one_rank, torch.ones(3)), torch.tensor(value), step=2)
    assert str(refused.value) == (
        "step 2: the loss is not finite (NaN or infinite), though its gradients are. Its update was "
        "not made, and nothing of this step was saved."
    )


def test_on_a_gpu_a_loss_is_judged_with_its_gradients(one_rank, verdicts):
    check = StepCheck(CPU)
    check.check(with_gradients(one_rank, torch.ones(3)), torch.tensor(math.inf), step=1)
    assert verdicts[0].num_waits == 0
    with pytest.raises(NonFiniteLossError, match=r"step 1: the loss .* Nothing of this step was"):
        check.check(with_gradients(one_rank, torch.ones(3)), LOSS, step=2)


def test_gradients_of_a_step_are_named_before_its_loss(one_rank, verdicts):
    check = StepCheck(CPU)
    gradients = with_gradients(one_rank, torch.tensor([math.nan]))
    check.check(gradients, torch.tensor(math.nan), step=1)
    with pytest.raises(NonFiniteGradientsError, match="step 1: gradients"):
        check.settle()
    check.settle()


def test_settling_finite_gradients_passes(one_rank, verdicts):
    check = StepCheck(CPU)
    check.settle()
    check.check(with_gradients(one_rank, torch.ones(3)), LOSS, step=1)
    check.settle()
    assert [event.num_waits for event in verdicts] == [1]


@pytest.mark.parametrize("bad", ["gradient", "loss"])
def test_all_ranks_stop_when_one_has_such_a_gradient_or_loss(tmp_path, bad):
    program = """
        import os, sys
        from pathlib import Path
        from gt_trainer.launcher import launch, prepare_environment
        prepare_environment(os.environ, num_ranks=3)
        import torch
        from gt_trainer.steps.step_check import NonFiniteGradientsError, NonFiniteLossError, StepCheck

        def run():
            torch.distributed.init_process_group("gloo")
            parameter = torch.zeros(2, requires_grad=True)
            values = {"gradient": 2.0, "loss": 3.0}
            if os.environ["RANK"] == "1":
                values[sys.argv[2]] = float("nan")
            parameter.grad = torch.tensor([1.0, values["gradient"]])
            try:
                check = StepCheck(torch.device("cpu"))
                check.check([parameter], torch.tensor(values["loss"]), step=3)
            except (NonFiniteGradientsError, NonFiniteLossError) as error:
                Path(sys.argv[1], os.environ["RANK"]).write_text(str(error))

        sys.exit(launch(run, num_ranks=3, log_folder=Path(sys.argv[1])))
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path), bad]
    subprocess.run(command, check=True, timeout=300)
    (text,) = {(tmp_path / rank).read_text() for rank in "012"}
    assert bad in text
