"""A captured optimizer steps as in eager, with the hyperparameters that it has, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop, lr_scheduler

from gt_trace import CaptureError, StateMismatchError, trace_step

INPUTS = [torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]


class SignDescent(Optimizer):
    """An optimizer of the user's own, with a momentum."""

    def __init__(self, parameters: Any, lr: float | Tensor) -> None:
        super().__init__(parameters, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                if not state:
                    state["average"] = torch.zeros_like(each)
                state["average"].lerp_(each.grad, 1 - group["beta"])
                each.sub_(state["average"].sign() * group["lr"])


def rate() -> Tensor:
    return torch.tensor(0.1)


def halves(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": parameters[:1], "lr": rate()},
        {"params": parameters[1:], "lr": rate(), "weight_decay": 0.0},
    ]


WITH_TENSORS = {
    "adamw": lambda p: AdamW(p, lr=rate(), fused=True),
    "adamw of two groups": lambda p: AdamW(halves(p), fused=True),
    "amsgrad": lambda p: Adam(p, lr=rate(), fused=True, amsgrad=True, maximize=True),
    "sgd": lambda p: SGD(p, lr=rate(), momentum=0.9, fused=True),
    "sgd, not fused": lambda p: SGD(p, lr=rate(), momentum=0.9, nesterov=True),
    "adagrad": lambda p: Adagrad(p, lr=rate(), fused=True),
    "sign descent": lambda p: SignDescent(p, rate()),
}
WITH_NUMBERS = {
    "adamw": lambda p: AdamW(p, lr=0.1, foreach=False),
    "adamw, foreach": lambda p: AdamW(p, lr=0.1, foreach=True),
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "rmsprop": lambda p: RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "sign descent": lambda p: SignDescent(p, 0.1),
}


@dataclass
class Training:
    """A model that was trained for a step, so that its optimizer has its state."""

    model: nn.Module
    optimizer: Optimizer
    step: Callable[[Tensor], Tensor]

    @classmethod
    def of(
        cls,
        make: Callable[[list[nn.Parameter]], Optimizer],
        *,
        clears: bool = True,
        afterwards: Callable[[Optimizer], Any] = lambda _: None,
    ) -> Training:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = make(list(model.parameters()))

        def step(x: Tensor) -> Tensor:
            if clears:
                optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            afterwards(optimizer)
            return loss

        step(INPUTS[0])
        return cls(model, optimizer, step)

    def captured(self) -> Callable[[Tensor], Tensor]:
        traced = trace_step(self.step, module=self.model, optimizer=self.optimizer)(INPUTS[0])
        return traced.bind(self.model, self.optimizer)

    def tensors(self) -> list[Tensor]:
        parameters = list(self.model.parameters())
        states = [self.optimizer.state[each] for each in parameters]
        held = [v for state in states for v in state.values() if isinstance(v, Tensor)]
        return [*parameters, *held]


def require_equal(eager: Training, mine: Training, run: Any, inputs: list[Tensor]) -> None:
    for x in inputs:
        assert torch.equal(run(x), eager.step(x))
    assert all(map(torch.equal, mine.tensors(), eager.tensors()))


def fill(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"].fill_(0.02)


def replace_one(optimizer: Optimizer) -> None:
    optimizer.param_groups[-1]["lr"] = torch.tensor(0.03)


def load(optimizer: Optimizer) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for each in state["state"].values():
        each.update({key: value * 0.5 for key, value in each.items() if value.dim()})
    optimizer.load_state_dict(state)


def schedule(optimizer: Optimizer) -> None:
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    scheduler.step()


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("name", WITH_TENSORS)
def test_tensors_in_groups_are_state(name):
    eager, mine = (Training.of(WITH_TENSORS[name]) for _ in range(2))
    run = mine.captured()
    require_equal(eager, mine, run, INPUTS[1:3])
    for change in (fill, replace_one, load, schedule):
        change(eager.optimizer)
        change(mine.optimizer)
        require_equal(eager, mine, run, INPUTS[3:5])


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_another_number_is_refused(name):
    eager, mine = (Training.of(WITH_NUMBERS[name]) for _ in range(2))
    run = mine.captured()
    require_equal(eager, mine, run, INPUTS[1:3])
    mine.optimizer.param_groups[0]["lr"] = 0.05
    with pytest.raises(StateMismatchError) as error:
        run(INPUTS[3])
    assert str(error.value) == (
        "this is not as it was when it was captured:\n  group 0 of the optimizer has lr 0.05, "
        "captured with 0.1; pass a tensor if it must vary, or capture again"
    )
    mine.optimizer.param_groups[0]["lr"] = 0.1
    require_equal(eager, mine, run, INPUTS[3:4])


def _change(group: int, key: str, value: object) -> Callable[[Optimizer], None]:
    return lambda optimizer: optimizer.param_groups[group].update({key: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _change(1, "weight_decay", 0.5),
            "group 1 of the optimizer has weight_decay 0.5, captured",
        ),
        (
            _change(0, "betas", (0.5, 0.6)),
            r"group 0 .* has betas \(0.5, 0.6\), captured with \(0.9",
        ),
        (_change(0, "eps", 0.5), "group 0 of the optimizer has eps 0.5, captured with 1e-08"),
        (_change(1, "maximize", True), "has maximize True, captured with False"),
        (_change(1, "another", 1), "has another 1, captured with a tensor or nothing"),
        (_change(1, "lr", 0.1), "has lr 0.1, captured with a tensor or nothing"),
        (lambda o: o.param_groups.pop(), "has 1 parameter groups, captured with 2"),
        (
            lambda o: o.param_groups[1]["params"].pop(),
            "group 1 of the optimizer has the parameters",
        ),
        (lambda o: o.param_groups[1]["params"].reverse(), "group 1 of the optimizer has the param"),
        (lambda o: o.state.clear(), "missing: .*0.weight:exp_avg"),
    ],
)
def test_another_group_is_refused(change, message):
    mine = Training.of(WITH_TENSORS["adamw of two groups"])
    run = mine.captured()
    change(mine.optimizer)
    with pytest.raises(StateMismatchError, match=message):
        run(INPUTS[1])


def test_a_rate_that_is_a_buffer_too_is_one_input():
    lr = rate()

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return AdamW(parameters, lr=lr, fused=True)

    mine = Training.of(make)
    mine.model.register_buffer("lr", lr)
    traced = trace_step(mine.step, module=mine.model, optimizer=mine.optimizer)(INPUTS[0])
    assert sum(each.names == ("lr",) for each in traced.state) == 1
    run = traced.bind(mine.model, mine.optimizer)
    lr.fill_(0.0)
    before = [each.clone() for each in mine.model.parameters()]
    run(INPUTS[1])
    assert all(map(torch.equal, mine.model.parameters(), before))


def test_a_rate_that_groups_shared_must_stay_one_tensor():
    mine = Training.of(lambda p: AdamW([{"params": p[:1]}, {"params": p[1:]}], rate(), fused=True))
    run = mine.captured()
    replace_one(mine.optimizer)
    with pytest.raises(StateMismatchError, match=r"one tensor: \['group 0:lr', 'group 1:lr'\]"):
        run(INPUTS[1])


def decay(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"].mul_(0.5)


def test_a_step_may_change_a_rate_by_operators():
    eager, mine = (Training.of(WITH_TENSORS["sgd"], afterwards=decay) for _ in range(2))
    require_equal(eager, mine, mine.captured(), INPUTS[1:4])


def _scheduled(make: Callable[..., Optimizer]) -> Training:
    schedulers: list[Any] = []
    mine = Training.of(make, afterwards=lambda _: [each.step() for each in schedulers])
    schedulers.append(lr_scheduler.StepLR(mine.optimizer, 1, 0.5))
    return mine


def test_schedulers_inside_of_the_step_are_refused():
    with pytest.raises(CaptureError, match=r"as a learning rate scheduler does(.|\n)*group 0:lr"):
        _scheduled(WITH_TENSORS["adamw"]).captured()
    mine = _scheduled(WITH_NUMBERS["sgd"])
    with pytest.raises(CaptureError, match=r"changes its optimizer(.|\n)*has lr 0.05, captured"):
        mine.captured()
    assert mine.optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("clears_before", [False, True])
def test_gradients_of_the_step_before_are_refused(clears_before):
    mine = Training.of(WITH_TENSORS["sgd"], clears=False)
    if clears_before:
        mine.optimizer.zero_grad()
    with pytest.raises(CaptureError, match=r"reads gradients that the step before has left") as e:
        mine.captured()
    assert "clear them in the step (optimizer.zero_grad()):\n  0.weight.grad\n" in str(e.value)


@pytest.mark.parametrize("options", [{}, {"set_to_none": False}])
def test_cleared_gradients_are_not(options):
    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=rate(), fused=True)

    def clear(optimizer: Optimizer) -> None:
        optimizer.zero_grad(**options)

    eager, mine = (Training.of(make, clears=False, afterwards=clear) for _ in range(2))
    require_equal(eager, mine, mine.captured(), INPUTS[1:4])


@pytest.mark.parametrize("clears_at_end", [False, True])
def test_no_gradient_of_an_earlier_step_remains_after_a_call(clears_at_end: bool) -> None:
    model = nn.Linear(4, 4)
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        if clears_at_end:
            optimizer.zero_grad()
        return loss

    step(torch.ones(2, 4))
    run = trace_step(step, module=model, optimizer=optimizer)(torch.ones(2, 4))
    assert run.written_gradients == ("weight", "bias")
    bound = run.bind(model, optimizer)
    model.weight.grad = torch.ones(4, 4)
    if clears_at_end:  # whether it clears at the beginning, too, was not seen
        with pytest.raises(StateMismatchError, match="may add to them: weight"):
            bound(torch.ones(2, 4))
        model.weight.grad = None
    bound(torch.ones(2, 4))
    assert model.weight.grad is None


def test_an_optimizer_that_was_not_given_is_refused():
    mine = Training.of(lambda p: SGD(p, lr=0.1), clears=False, afterwards=lambda o: o.zero_grad())
    with pytest.raises(CaptureError, match=r"SGD steps inside of the step, so that its hyper"):
        trace_step(mine.step, module=mine.model)(INPUTS[0])


def test_gradients_of_parameters_that_the_optimizer_does_not_hold_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    trace = trace_step(step, module=model, optimizer=optimizer)
    with pytest.raises(CaptureError, match=r"1\.weight\.grad, 1\.bias\.grad were written, and a"):
        trace(torch.ones(2, 4))
    model[1].requires_grad_(False)
    trace(torch.ones(2, 4))


def test_a_scheduler_that_cycles_momentum_is_refused_with_what_to_give_it() -> None:
    mine = Training.of(lambda p: SGD(p, lr=rate(), momentum=0.9))
    scheduler = lr_scheduler.OneCycleLR(mine.optimizer, max_lr=0.2, total_steps=10)
    run = mine.captured()
    scheduler.step()
    with pytest.raises(
        StateMismatchError, match=r"momentum .*; give a scheduler cycle_momentum=Fal"
    ):
        run(INPUTS[1])

    eager, mine = (Training.of(lambda p: SGD(p, lr=rate(), momentum=0.9)) for _ in range(2))
    schedulers = [
        lr_scheduler.OneCycleLR(each.optimizer, max_lr=0.2, total_steps=10, cycle_momentum=False)
        for each in (eager, mine)
    ]
    run = mine.captured()
    for x in INPUTS[1:4]:
        require_equal(eager, mine, run, [x])
        for each in schedulers:
            each.step()


@pytest.mark.parametrize("kind", ["RAdam", "ASGD", "Adafactor"])
def test_optimizers_that_decide_by_their_state_are_refused(kind: str) -> None:
    mine = Training.of(lambda p: getattr(torch.optim, kind)(p))
    with pytest.raises(
        CaptureError, match=r"(?s)optimizer\.step\(\)\nThe optimizer decides by num"
    ):
        mine.captured()
