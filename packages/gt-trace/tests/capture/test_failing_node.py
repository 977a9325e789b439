"""An error of a replay says which node it is from, and which line of the program."""

from __future__ import annotations

from pathlib import Path

import gloo_cases
import pytest
import torch
from torch import Tensor, nn

from gt_trace import trace_step
from gt_trace.capture.captured_mode import as_captured
from gt_trace.joint import export_joint_graph, partition
from gt_trace.testing import GlooWorkers


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"embedding": nn.Embedding(4, 2)})

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner["embedding"](tokens)


class Selected(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[ctx.saved_tensors[0]].sum(0).expand_as(gradient), None


WORDS = torch.tensor([0, 3])
UNKNOWN = torch.tensor([0, 4])
LOOKED_UP = (
    "in a captured graph: node embedding (aten.embedding.default), module inner.embedding, "
    "phase forward\n"
    f'  File "{Path(__file__)}", line {Words.forward.__code__.co_firstlineno + 1}, in forward\n'
    '    return self.inner["embedding"](tokens)\n'
)


def notes_of(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def test_index_that_is_out_of_range_names_operator_module_and_line() -> None:
    model = Words()
    bound = trace_step(lambda tokens: model(tokens).sum(), module=model)(WORDS).bind(model)
    with pytest.raises(IndexError, match="index out of range") as caught:
        bound(UNKNOWN)
    (note,) = notes_of(caught.value)
    assert note.startswith(LOOKED_UP)
    bound(WORDS)


def test_line_of_the_step_itself_is_named() -> None:
    def step(x: Tensor) -> Tensor:
        return x[x > 0].reshape(2) * 2

    bound = trace_step(step)(torch.ones(2)).bind()
    with pytest.raises(RuntimeError, match="is invalid for input of size 1") as caught:
        bound(torch.tensor([1.0, -1.0]))
    (note,) = notes_of(caught.value)
    assert note.startswith("in a captured graph: node view (aten.view.default), phase forward\n")
    assert note.endswith("in step\n    return x[x > 0].reshape(2) * 2")


def test_graph_that_passes_changed_after_it_was_bound_is_the_one_that_runs() -> None:
    traced = trace_step(lambda x: x + 1)(torch.ones(2))
    bound = traced.bind()
    (add,) = traced.graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.add.Tensor
    )
    add.args = (add.args[0], 41)
    traced.graph_module.recompile()
    assert torch.equal(bound(torch.ones(2)), torch.full((2,), 42.0))


def test_forward_and_backward_of_a_joint_graph_name_theirs() -> None:
    model = Words()
    parts = partition(export_joint_graph(model, (WORDS,)), partitioner="save_all")
    with pytest.raises(IndexError) as caught:
        parts.bind(model)(UNKNOWN)
    (note,) = notes_of(caught.value)
    assert note.startswith(LOOKED_UP)

    class Selecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            return Selected.apply(self.linear(x), index)

    selecting, x = Selecting(), torch.ones(4, 2)
    captured = partition(export_joint_graph(selecting, (x, WORDS)), partitioner="save_all")
    loss = captured.bind(selecting)(x, UNKNOWN).sum()
    with pytest.raises(IndexError, match="out of bounds") as caught:
        loss.backward()
    (note,) = notes_of(caught.value)
    assert note.startswith("in a captured graph: node index (aten.index.Tensor), phase backward")


def test_an_exchange_that_others_do_not_join_names_its_ranks() -> None:
    with GlooWorkers(2) as workers:
        (note,), _ = workers.run(gloo_cases.wait_in_vain)
    first, *_ = note.splitlines()
    assert first == (
        "in a captured graph: node wait_tensor (_c10d_functional.wait_tensor.default), "
        "phase forward, exchange of ranks 0, 1"
    )


def test_error_that_no_graph_raised_gets_no_note() -> None:
    with pytest.raises(ZeroDivisionError) as caught, as_captured():
        raise ZeroDivisionError
    assert notes_of(caught.value) == []
