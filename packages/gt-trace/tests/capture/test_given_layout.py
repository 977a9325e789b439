"""A step runs on the strides of its capture: slices of whole numbers are copied, others refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gt_trace import BoundStep, CaptureError, InputMismatchError, StateMismatchError, trace_step
from gt_trace.joint import export_joint_graph, partition


def bound(step: Callable[..., Any], *args: Any, module: nn.Module | None = None) -> BoundStep:
    return trace_step(step, module=module)(*args).bind(module)


def total(x: Tensor) -> Tensor:
    return x.view(-1).cumsum(0)


def strided(x: Tensor) -> Tensor:
    return x.as_strided((3, 2), (x.stride(0), 2)) * 2


def spectrum(x: Tensor) -> Tensor:
    window = torch.ones(8)
    return torch.stft(x, 8, 4, window=window, center=False, return_complex=True).abs()


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(torch.arange(27).view(3, 9)[:, 1:5], id="sliced"),
        pytest.param(torch.arange(24).view(6, 4)[::2], id="every second"),
        pytest.param(torch.arange(3).view(3, 1).expand(3, 4), id="expanded"),
        pytest.param(torch.arange(24)[12:].view(3, 4), id="offset"),
        pytest.param(torch.arange(27).view(3, 9)[:, 1:5] > 4, id="booleans"),
    ],
)
def test_a_slice_of_whole_numbers_is_copied_and_read_as_it_was_given(given: Tensor) -> None:
    model = nn.Embedding(30, 4)

    def step(x: Tensor) -> Tensor:
        return model(x.reshape(-1).long()).cumsum(0) + (x > 2).float().sum()

    run = bound(step, torch.zeros_like(given, memory_format=torch.contiguous_format), module=model)
    assert torch.equal(run(given), step(given))


@pytest.mark.parametrize(
    ("step", "given", "problem"),
    [
        pytest.param(
            total,
            torch.randn(4, 3).t(),
            r"x: strides \[1, 3\], captured with \[4, 1\]; sums over such memory may round "
            r"otherwise; pass \.contiguous\(\), or capture with such an input",
            id="transposed",
        ),
        pytest.param(total, torch.randn(3, 9)[:, 1:5], "may round otherwise", id="sliced"),
        pytest.param(total, torch.randn(3, 1).expand(3, 4), "may round otherwise", id="expanded"),
        pytest.param(strided, torch.randn(4, 3).t(), "may round otherwise", id="as_strided"),
        pytest.param(spectrum, torch.randn(32, 3).t(), "may round otherwise", id="stft"),
        pytest.param(
            total, torch.arange(12).view(4, 3).t(), "with the dims in another order", id="tokens"
        ),
        pytest.param(
            total,
            torch.randn(3, 4, dtype=torch.complex64).t().contiguous().t(),
            "may round",
            id="c",
        ),
    ],
)
def test_an_input_of_other_strides_on_which_results_may_depend_is_refused(
    step: Callable[[Tensor], Tensor], given: Tensor, problem: str
) -> None:
    run = bound(step, torch.zeros(given.shape, dtype=given.dtype))
    with pytest.raises(InputMismatchError, match=problem):
        run(given)
    assert torch.equal(run(given.contiguous()), step(given.contiguous()))


def test_an_offset_in_memory_changes_nothing() -> None:
    given = torch.randn(24)[12:].view(3, 4)
    assert torch.equal(bound(strided, torch.randn(3, 4))(given), strided(given))


def test_the_captured_memory_format_is_asked_for() -> None:
    def step(x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1).view(-1).cumsum(0)

    last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    run = bound(step, last)
    assert torch.equal(run(last), step(last))
    with pytest.raises(InputMismatchError, match="pass a tensor with the captured strides, or"):
        run(last.contiguous())


def test_tokens_and_labels_cut_from_one_batch_are_read_where_they_lie_or_copied() -> None:
    model = nn.Embedding(10, 4)

    def step(tokens: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.reshape(-1) % 4)
        return loss, *torch.autograd.grad(loss, list(model.parameters()))

    example = torch.zeros(2, 3, 8, dtype=torch.long)
    run = bound(step, *example, module=model)
    batch = torch.randint(0, 10, (3, 9))
    for found, wanted in zip(
        run(batch[:, :-1], batch[:, 1:]), step(batch[:, :-1], batch[:, 1:]), strict=True
    ):
        assert torch.equal(found, wanted)


def test_strides_of_dims_of_size_1_and_of_empty_tensors_need_no_copy() -> None:
    run = bound(lambda x: x.mul_(2), torch.randn(1, 4))
    given = torch.randn(1, 4).as_strided((1, 4), (77, 1))
    wanted = given * 2
    run(given)
    assert torch.equal(given, wanted)
    run = bound(lambda x: x.view(-1) * 2, torch.randn(0, 4))
    assert run(torch.randn(4, 0).t()).shape == (0,)


def write(x: Tensor) -> Tensor:
    return x.mul_(2).sum()


def give_back(x: Tensor) -> Tensor:
    return x.view(-1)


def at_an_offset(x: Tensor) -> Tensor:
    return x.as_strided((2,), (1,), x.storage_offset() + 3) * 2


def beyond(x: Tensor) -> Tensor:
    return x.as_strided((6,), (1,)) * 2


@pytest.mark.parametrize(
    ("step", "example", "given", "problem"),
    [
        (
            write,
            torch.ones(3, 4),
            torch.ones(4, 3).t(),
            r"x: strides \[1, 3\], captured with \[4, 1\]; it cannot be copied, because the step wri",
        ),
        (
            give_back,
            torch.ones(3, 4),
            torch.ones(4, 3).t(),
            "because the step returns a view of it",
        ),
        (at_an_offset, torch.ones(3, 4), torch.ones(4, 3).t(), "because the step reads its memory"),
        (
            at_an_offset,
            torch.ones(8),
            torch.ones(16)[8:],
            r"x: storage offset 8, captured with 0; .*reads its memory by as_strided; pass \.clone",
        ),
        (beyond, torch.ones(6)[:4], torch.ones(8)[::2], "because the step reads its memory"),
        (
            total,
            torch.ones(1).expand(4),
            torch.arange(4.0),
            r"strides \[1\], captured with \[0\], where elements share memory; pass an expanded",
        ),
    ],
)
def test_an_input_that_a_copy_would_not_stand_for_is_refused(
    step: Callable[[Tensor], Tensor], example: Tensor, given: Tensor, problem: str
) -> None:
    run = bound(step, example)
    assert torch.equal(run(example.clone()) if step is write else run(example), step(example))
    with pytest.raises(InputMismatchError, match=problem):
        run(given)


def test_conjugated_and_negated_views_are_refused() -> None:
    run = bound(lambda x: torch.view_as_real(x) * 2, torch.ones(3, dtype=torch.complex64))
    given = torch.randn(3, dtype=torch.complex64)
    with pytest.raises(InputMismatchError, match=r"pass \.resolve_conj\(\)\.resolve_neg\(\)"):
        run(given.conj())
    imaginary = given.conj().imag
    assert imaginary.is_neg()
    with pytest.raises(InputMismatchError, match=r"pass \.resolve_conj\(\)\.resolve_neg\(\)"):
        bound(lambda x: x * 2, torch.ones(3))(imaginary)
    with pytest.raises(InputMismatchError, match="conjugated or negated view; it cannot be copied"):
        bound(lambda x: x.mul_(2), torch.ones(3, dtype=torch.complex64))(given.conj())
    with pytest.raises(InputMismatchError, match="captured as a lazily conjugated or negated view"):
        bound(lambda x: x * 2, given.conj())(given)


def test_dynamic_sizes_have_the_strides_that_follow_from_them() -> None:
    example = torch.arange(24).view(3, 8)
    torch._dynamo.mark_dynamic(example, 1)
    run = bound(total, example)
    for given in (torch.arange(15).view(3, 5), torch.arange(27).view(3, 9)[:, 2:7]):
        assert torch.equal(run(given), total(given.contiguous()))
    with pytest.raises(InputMismatchError, match=r"x: strides \[1, 3\], captured with \[5, 1\]"):
        run(torch.arange(15).view(5, 3).t())
    example = torch.randn(3, 8)
    torch._dynamo.mark_dynamic(example, 1)
    run = bound(write, example)
    run(torch.ones(3, 5))
    with pytest.raises(
        InputMismatchError, match=r"x: strides \[1, 3\], captured with \[5, 1\]; it"
    ):
        run(torch.ones(5, 3).t())


def test_parameters_and_buffers_of_other_strides_are_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
    run = bound(lambda x: model(x).sum(), torch.randn(2, 3, 5, 5), module=model)
    weight = model[0].weight
    weight.data = weight.data.to(memory_format=torch.channels_last)
    expected = r"0\.weight: strides \[27, 1, 9, 3\], captured with \[27, 9, 3, 1\]; give it the"
    with pytest.raises(StateMismatchError, match=expected):
        run(torch.randn(2, 3, 5, 5))
    weight.data = weight.data.contiguous()
    run(torch.randn(2, 3, 5, 5))
    weight.data = weight.data.double()
    with pytest.raises(StateMismatchError, match=r"0\.weight: torch\.float64"):
        run(torch.randn(2, 3, 5, 5))


def test_a_joint_graph_copies_slices_and_refuses_what_it_writes() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(30, 4)

        def forward(self, x: Tensor, seen: Tensor) -> Tensor:
            seen.add_(1)
            return self.embedding(x).view(-1)

    model = Model()
    example = torch.zeros(3, 4, dtype=torch.long), torch.zeros(2, 2)
    run = partition(export_joint_graph(model, example)).bind(model)
    x, seen = torch.arange(27).view(3, 9)[:, 1:5], torch.zeros(2, 2)
    assert torch.equal(run(x, seen), model.embedding(x).view(-1))
    assert torch.equal(seen, torch.ones(2, 2))
    with pytest.raises(InputMismatchError, match=r"seen: strides \[1, 2\].*the step writes it"):
        run(x, torch.zeros(2, 2).t())


def test_uses_are_those_of_the_graph() -> None:
    def step(read: Tensor, written: Tensor, given: Tensor, placed: Tensor) -> Any:
        written[0].add_(read[0])
        return read + placed.as_strided((2,), (1,), 1), (given.t(),)

    inputs = trace_step(step)(*(torch.ones(2, 2) for _ in range(4))).inputs
    assert [each.uses for each in inputs] == [(), ("written",), ("returned",), ("positions",)]


BATCH = torch.arange(24).reshape(3, 8)
READS: dict[str, tuple[Callable[[Tensor], float], str]] = {
    "stride": (lambda x: x.stride(0), "reads its strides in Python"),
    "strides of a view": (lambda x: sum(x[1:].T.stride()), "reads its strides in Python"),
    "strides of data": (lambda x: x.data.detach().stride(0), "reads its strides in Python"),
    "order of dims": (lambda x: 1 + x.dim_order()[0], "reads its strides in Python"),
    "contiguous": (lambda x: 1 + x.is_contiguous(), "reads in Python whether it is contiguous"),
    "offset": (lambda x: 1 + x.storage_offset(), "reads its storage offset in Python"),
    "offset under a device": (lambda x: under_device(x), "reads its storage offset in Python"),
}


def under_device(x: Tensor) -> int:
    with torch.device("cpu"):  # a mode of its own
        return 1 + x[1:].storage_offset()


class Scaled(nn.Module):
    def __init__(self, read: Callable[[Tensor], float]) -> None:
        super().__init__()
        self.weight, self.read = nn.Parameter(torch.randn(4)), read

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * float(self.read(x))


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("capture", ["step", "joint"])
def test_a_slice_is_refused_if_python_read_how_the_captured_input_lies(
    name: str, capture: str
) -> None:
    read, reason = READS[name]
    module, x = Scaled(read), torch.arange(12).reshape(3, 4)
    if capture == "step":
        run = trace_step(lambda x: module(x).detach(), module=module)(x).bind(module)
    else:
        run = partition(export_joint_graph(module, (x,))).bind(module)
    for given in (x, torch.arange(24).reshape(6, 4)[:3]):
        assert torch.equal(run(given), module(given))
    with pytest.raises(InputMismatchError, match=reason):
        run(BATCH[:, 2:6])


def test_a_layout_that_python_reads_of_other_tensors_restricts_no_input() -> None:
    module = Scaled(lambda x: x.float().stride(0) + x.clone().is_contiguous())
    run = trace_step(lambda x: module(x).detach(), module=module)(BATCH[:, :4].clone()).bind(module)
    assert torch.equal(run(BATCH[:, 2:6]), module(BATCH[:, 2:6]))


MEMORY: dict[str, Callable[[Tensor], float]] = {
    "data_ptr": lambda x: x.data_ptr() % 64,
    "untyped_storage": lambda x: x.untyped_storage().nbytes(),
    "storage": lambda x: len(x.storage()),
    "is_set_to": lambda x: x.is_set_to(x.contiguous()),
    "_is_view": lambda x: x.reshape(-1)._is_view(),
    "_base": lambda x: x._base is None,
}


@pytest.mark.parametrize("name", MEMORY)
def test_a_step_that_reads_where_a_tensor_lies_is_refused_by_its_line(name: str) -> None:
    module, x = Scaled(MEMORY[name]), torch.arange(12).reshape(3, 4)
    wanted = rf"(?s)in which memory a tensor lies \(Tensor\.{name}\).*lambda x: .*Compare tensors"
    with pytest.raises(CaptureError, match=wanted):
        trace_step(lambda x: module(x).detach(), module=module)(x)
