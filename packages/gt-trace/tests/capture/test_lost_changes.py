"""Python objects that a step changes: undone after a capture, and refused where a replay loses it."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trace_models import assert_same

from gt_trace import CaptureError, trace_step
from gt_trace._torch_internals import is_fake
from gt_trace.joint import export_joint_graph, partition
from gt_trace.stamping import trace_step_by_stamping

SEEN: list[Any] = []
TOTAL: Any = 0


@dataclass
class Notes:
    losses: list[Any] = field(default_factory=list)
    last: Any = None


class Slotted:
    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: Any = None


Forward = Callable[["Keeping", Tensor], Tensor]


class Keeping(nn.Module):
    """A layer with places in which a forward can keep something."""

    shared: Any = None

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.run = forward
        self.h: Any = None
        self.calls = 0
        self.cache: dict[str, Any] = {}
        self.recent: deque[Any] = deque(maxlen=3)
        self.kinds: set[Any] = set()
        self.notes, self.slotted = Notes(), Slotted()

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def recurrent(model: Keeping, x: Tensor) -> Tensor:
    y: Tensor = model.layer(x if model.h is None else x + model.h)
    model.h = y.detach()
    return y


def lazy_cache(model: Keeping, x: Tensor) -> Tensor:
    if "mask" not in model.cache:
        model.cache["mask"] = torch.rand(4)
    return model.layer(x) * model.cache["mask"]  # type: ignore[no-any-return]  # nn.Module's


def lazy_buffer(model: Keeping, x: Tensor) -> Tensor:
    if "scale" not in model._buffers:
        model.register_buffer("scale", torch.full((4,), 2.0))
    return model.layer(x) * model.scale  # type: ignore[no-any-return]  # nn.Module's


def auxiliary_loss(model: Keeping, x: Tensor) -> Tensor:
    y: Tensor = model.layer(x)
    model.notes.losses.append(y.square().mean())
    model.slotted.last = y
    return y


def ring(model: Keeping, x: Tensor) -> Tensor:
    model.recent.append(model.layer(x))
    return sum(model.recent)  # type: ignore[return-value]  # tensors


def counts(model: Keeping, x: Tensor) -> Tensor:
    model.calls += 1
    return model.layer(x) * model.calls  # type: ignore[no-any-return]  # nn.Module's


def counts_without_use(model: Keeping, x: Tensor) -> Tensor:
    model.notes.last = (model.notes.last or 0) + 1
    return model.layer(x)  # type: ignore[no-any-return]  # nn.Module's


def initializes_once(model: Keeping, x: Tensor) -> Tensor:
    y: Tensor = model.layer(x)
    if not model.calls:
        model.calls = 1
        model.mean.copy_(y.detach().mean(0))
    return y - model.mean


def writes_its_class(model: Keeping, x: Tensor) -> Tensor:
    Keeping.shared = model.layer(x)
    return Keeping.shared * 2  # type: ignore[no-any-return]  # a tensor


def writes_globals(model: Keeping, x: Tensor) -> Tensor:
    global TOTAL
    y: Tensor = model.layer(x)
    TOTAL = TOTAL + y.detach().mean()
    SEEN.append(y)
    return y + TOTAL


def stays_in_evaluation(model: Keeping, x: Tensor) -> Tensor:
    model.layer.eval()
    return model.layer(x)  # type: ignore[no-any-return]  # nn.Module's


def registers_a_module(model: Keeping, x: Tensor) -> Tensor:
    if not hasattr(model, "head"):
        model.head = nn.Linear(4, 4)
    return model.head(model.layer(x))  # type: ignore[no-any-return]  # nn.Module's


LOST: dict[Forward, list[str]] = {
    recurrent: ["module.h was None, and became a tensor of shape [3, 4]"],
    lazy_cache: ["module.cache['mask'] is new: a tensor of shape [4]"],
    lazy_buffer: ["module.scale is new: a tensor of shape [4]"],
    auxiliary_loss: [
        "module.notes.losses[0] is new: a tensor of shape []",
        "module.slotted.last was None, and became a tensor of shape [3, 4]",
    ],
    ring: ["module.recent[0] is new: a tensor of shape [3, 4]"],
    counts: ["module.calls was 0, and became 1"],
    counts_without_use: ["module.notes.last was None, and became 1"],
    initializes_once: ["module.calls was 0, and became 1"],
    writes_its_class: ["Keeping.shared was None, and became a tensor of shape [3, 4]"],
    writes_globals: [
        f"{__name__}.TOTAL was 0, and became a tensor of shape []",
        f"{__name__}.SEEN[0] is new: a tensor of shape [3, 4]",
    ],
    registers_a_module: ["module.head is new: a Linear"],
}


def captured_as_step(model: nn.Module) -> Any:
    return trace_step(lambda x: model(x).sum(), module=model)(torch.ones(3, 4))


def captured_jointly(model: nn.Module) -> Any:
    return export_joint_graph(model, (torch.ones(3, 4),))


def captured_by_layers(model: nn.Module) -> Any:
    return trace_step_by_stamping(lambda x: model(x).sum(), module=model)(torch.ones(3, 4))


@pytest.mark.parametrize("capture", [captured_as_step, captured_jointly])
@pytest.mark.parametrize("forward", LOST, ids=lambda forward: forward.__name__)
def test_change_that_a_replay_would_lose_is_refused_and_undone(
    forward: Forward, capture: Callable[[nn.Module], Any]
) -> None:
    model = Keeping(forward)
    with pytest.raises(CaptureError) as error:
        capture(model)
    first, *problems, remedy = str(error.value).splitlines()
    assert first == (
        "the step changes Python objects, and a replay runs no Python, so that it would lose this:"
    )
    assert remedy.startswith(
        "Return from the step what is needed after it. Keep a state in buffers"
    )
    for expected in LOST[forward]:
        assert any(problem.strip().startswith(expected) for problem in problems)
    assert len(problems) == len(LOST[forward])
    assert (model.h, model.calls, model.cache, model.recent) == (None, 0, {}, deque())
    assert (model.notes, model.slotted.last) == (Notes(), None)
    assert model.layer.training
    assert list(model._buffers) == ["mean"]
    assert list(model._modules) == ["layer"]
    assert (Keeping.shared, SEEN, TOTAL) == (None, [], 0)
    model.eval()
    assert not is_fake(forward(model, torch.ones(3, 4)))
    Keeping.shared = None
    SEEN.clear()
    globals()["TOTAL"] = 0


def test_refusal_names_the_line_that_sets_an_attribute() -> None:
    class Recurrent(nn.Linear):
        h: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.h = super().forward(x)
            return self.h

    with pytest.raises(CaptureError, match=r"h is new: a tensor of shape \[3, 4\] \(.*\.py:\d+\)"):
        captured_as_step(Recurrent(4, 4))


def test_layers_that_keep_tensors_are_refused_when_layers_are_replicated() -> None:
    model = nn.Sequential(*(Keeping(auxiliary_loss) for _ in range(6)))
    with pytest.raises(CaptureError, match=r"module\.0\.notes\.losses\[0\] is new: a tensor"):
        captured_by_layers(model)
    assert all(each.notes == Notes() for each in model)


def test_list_that_the_step_and_its_hooks_fill_is_refused_and_emptied() -> None:
    model, losses, activations = nn.Linear(4, 4), [], {}
    model.register_forward_hook(lambda _module, _args, out: activations.update(out=out))

    def step(x: Tensor) -> Tensor:
        losses.append(model(x).sum())
        return losses[-1]

    with pytest.raises(CaptureError) as error:
        trace_step(step, module=model)(torch.ones(3, 4))
    text = str(error.value)
    assert "losses (of" in text
    assert "activations (of" in text
    assert (losses, activations) == ([], {})


@pytest.mark.parametrize("size", [None, 4])
def test_tensor_that_a_cached_function_stores_is_refused_and_forgotten(size: int | None) -> None:
    @functools.lru_cache(size)
    def table(length: int) -> Tensor:
        return torch.arange(length) * 2.0

    with pytest.raises(CaptureError, match=r"the cache of .*table is new: a tensor of shape \[4\]"):
        trace_step(lambda x: (x * table(4)).sum())(torch.ones(4))
    assert type(table(4)) is Tensor


def test_objects_are_put_back_when_the_step_fails() -> None:
    def forward(model: Keeping, x: Tensor) -> Tensor:
        model.h = model.layer(x)
        model.cache["y"] = model.h
        raise RuntimeError("planted")

    model = Keeping(forward)
    with pytest.raises(RuntimeError, match="planted"):
        captured_as_step(model)
    assert (model.h, model.cache) == (None, {})


def test_argument_of_which_the_step_takes_an_entry_is_refused() -> None:
    def step(batch: dict[str, Tensor]) -> Tensor:
        labels = batch.pop("labels")
        return (batch["x"] - labels).sum()

    with pytest.raises(
        CaptureError, match=r"args\[0\]\['labels'\] was a tensor of shape \[2\], and"
    ):
        trace_step(step)({"x": torch.ones(2), "labels": torch.zeros(2)})


def test_number_in_the_state_of_an_optimizer_that_the_step_changes_is_refused() -> None:
    model = nn.Linear(4, 4)

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["num_steps"] += 1

    optimizer = Counting(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        optimizer.state[parameter]["num_steps"] = 0

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with pytest.raises(CaptureError, match=r"\['num_steps'\] was 0, and became 1"):
        trace_step(step, module=model, optimizer=optimizer)(torch.ones(3, 4))
    assert all(state["num_steps"] == 0 for state in optimizer.state.values())


def takes_it_back(model: Keeping, x: Tensor) -> Tensor:
    model.h = model.layer(x)
    model.notes.losses.append(model.h)
    model.layer.eval()
    y: Tensor = model.h * model.notes.losses.pop()
    model.h = None
    model.layer.train()
    return y


def sets_the_same(model: Keeping, x: Tensor) -> Tensor:
    model.calls = int("0")
    model.cache = {}
    model.notes = Notes()
    return model.layer(x)  # type: ignore[no-any-return]  # nn.Module's


def settles(model: Keeping, x: Tensor) -> Tensor:
    model.calls = x.shape[0]
    model.cache["length"] = (x.shape[0], "rows")
    return model.layer(x)  # type: ignore[no-any-return]  # nn.Module's


@pytest.mark.parametrize("forward", [takes_it_back, sets_the_same, settles, stays_in_evaluation])
def test_change_that_a_replay_need_not_make_is_no_refusal(forward: Forward) -> None:
    results, models = [], []
    for captured in (False, True):
        model = Keeping(forward)
        models.append(model)

        def step(x: Tensor, model: Keeping = model) -> Any:
            loss = model(x).square().mean()
            return loss, torch.autograd.grad(loss, list(model.parameters()))

        run = trace_step(step, module=model)(torch.ones(3, 4)).bind(model) if captured else step
        results.append([run(torch.full((3, 4), 0.5)) for _ in range(2)])
    for eager, replayed in zip(*results, strict=True):
        assert_same(replayed, eager)
    assert models[0].calls == models[1].calls
    assert models[0].cache == models[1].cache
    assert models[0].layer.training == models[1].layer.training


@pytest.mark.parametrize("forward", [takes_it_back, sets_the_same, settles, stays_in_evaluation])
def test_joint_graph_of_a_model_whose_changes_settle_is_captured(forward: Forward) -> None:
    model = Keeping(forward)
    bound = partition(export_joint_graph(model, (torch.ones(3, 4),))).bind(model)
    assert torch.equal(bound(torch.full((3, 4), 0.5)), model(torch.full((3, 4), 0.5)))
    assert model.calls == (3 if forward is settles else 0)


def test_cache_that_was_filled_before_the_capture_is_no_refusal() -> None:
    def forward(model: Keeping, x: Tensor) -> Tensor:
        if "scale" not in model._buffers:
            model.register_buffer("scale", torch.full((4,), 2.0))
        return model.layer(x) * model.scale  # type: ignore[no-any-return]  # nn.Module's

    model = Keeping(forward)
    x = torch.full((3, 4), 0.5)
    expected = model(x).sum()
    assert torch.equal(captured_as_step(model).bind(model)(x), expected)


@pytest.mark.parametrize("capture", [captured_as_step, captured_jointly])
def test_recurrent_layer_lists_its_own_parameters_after_a_capture(
    capture: Callable[[nn.Module], Any],
) -> None:
    class FirstOutput(nn.LSTM):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # returns the states too
            output: Tensor = super().forward(x)[0]
            return output

    model = FirstOutput(4, 4)
    capture(model)
    assert [id(each) for each in model._flat_weights] == [id(each) for each in model.parameters()]
    assert not is_fake(model(torch.ones(3, 4)))


class _Sized(nn.Module):
    """A model that settles, or counts its calls and is refused."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.linear, self.size, self.counts = nn.Linear(4, 4), 0, counts

    def forward(self, x: Tensor) -> Tensor:
        self.size = self.size + 1 if self.counts else x.shape[1]
        result: Tensor = self.linear(x)
        return result


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("joint", [False, True])
def test_no_capture_leaves_its_wrappers_on_the_model(counts: bool, joint: bool) -> None:
    model, x = nn.Sequential(_Sized(counts=counts)), torch.ones(2, 4)
    with suppress(CaptureError) if counts else nullcontext():
        if joint:
            export_joint_graph(model, (x,))
        else:
            trace_step(lambda x: model(x).sum().detach(), module=model)(x)
    assert not any("forward" in vars(each) for each in model.modules())
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.data.zero_()
    size = model[0].size
    assert torch.equal(copied(x), torch.zeros(2, 4))
    assert size == (0 if counts else 4)
