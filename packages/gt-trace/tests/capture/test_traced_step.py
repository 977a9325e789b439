"""Binding a captured step to live state, and calling it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from trace_models import TiedModel, assert_same, batch, step_of

from gt_trace import InputMismatchError, StateMismatchError, trace_step


def test_changed_shape_and_dtype_are_one_error_naming_both(model: TiedModel) -> None:
    bound = trace_step(step_of(model), module=model)(*batch(1)).bind(model)
    tokens, labels = batch(1, (3, 4))
    with pytest.raises(InputMismatchError) as error:
        bound(tokens, labels.int())
    assert str(error.value) == (
        "the inputs are not those of the captured step:\n"
        "  tokens: torch.int64 [3, 4], captured as torch.int64 [2, 4]\n"
        "  labels: torch.int32 [3, 4], captured as torch.int64 [2, 4]"
    )


@pytest.fixture
def model() -> TiedModel:
    torch.manual_seed(0)
    return TiedModel()


def test_changed_structure_is_an_error() -> None:
    def step(x: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
        return x + more["y"]

    bound = trace_step(step)(torch.ones(2), {"y": torch.ones(2)}).bind()
    with pytest.raises(InputMismatchError, match="another structure than the captured"):
        bound(torch.ones(2), {"z": torch.ones(2)})


def test_changed_constant_is_an_error_and_an_equal_one_is_not() -> None:
    def step(x: torch.Tensor, *, factor: float) -> torch.Tensor:
        return x * factor

    bound = trace_step(step)(torch.ones(2), factor=2.0).bind()
    assert torch.equal(bound(torch.ones(2), factor=2.0), torch.full((2,), 2.0))
    with pytest.raises(InputMismatchError) as error:
        bound(torch.ones(2), factor=3.0)
    assert str(error.value) == (
        "the inputs are not those of the captured step:\n"
        "  factor: 3.0, captured with the constant 2.0; pass a tensor if it must vary"
    )


def test_tensor_where_a_constant_was_is_an_error() -> None:
    def step(x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        return x

    bound = trace_step(step)(torch.ones(2), None).bind()
    with pytest.raises(InputMismatchError, match=r"y: tensor\(\[1\.\]\), captured with the const"):
        bound(torch.ones(2), torch.ones(1))


def test_replaced_parameter_is_sampled_again(model: TiedModel) -> None:
    step = step_of(model)
    bound = trace_step(step, module=model)(*batch(1)).bind(model)
    bound(*batch(1))
    model.blocks[0].up.weight = nn.Parameter(torch.rand_like(model.blocks[0].up.weight))
    assert_same(bound(*batch(1)), step(*batch(1)))


def test_parameter_data_set_anew_is_seen(model: TiedModel) -> None:
    step = step_of(model)
    bound = trace_step(step, module=model)(*batch(1)).bind(model)
    weight = model.blocks[0].up.weight
    weight.data = torch.rand_like(weight)
    assert_same(bound(*batch(1)), step(*batch(1)))


def test_binding_to_a_model_of_the_same_structure_runs_on_its_parameters(
    model: TiedModel,
) -> None:
    traced = trace_step(step_of(model), module=model)(*batch(1))
    other = TiedModel()
    assert_same(traced.bind(other)(*batch(2)), step_of(other)(*batch(2)))


def test_binding_to_other_shapes_names_each(model: TiedModel) -> None:
    traced = trace_step(step_of(model), module=model)(*batch(1))
    with pytest.raises(StateMismatchError) as error:
        traced.bind(TiedModel(vocab=17))
    assert str(error.value) == (
        "the module's state is not the one that was captured:\n"
        "  embedding.weight: torch.float32 [17, 8], captured as torch.float32 [16, 8]"
    )


def test_binding_to_other_names_lists_missing_and_new() -> None:
    traced = trace_step(lambda x: x, module=nn.ModuleDict({"a": nn.Linear(1, 1)}))(torch.ones(1))
    with pytest.raises(StateMismatchError) as error:
        traced.bind(nn.ModuleDict({"b": nn.Linear(1, 1)}))
    assert str(error.value) == (
        "the module's parameters, buffers or optimizer state are not those captured\n"
        "  missing: ['a.bias', 'a.weight']\n"
        "  not captured: ['b.bias', 'b.weight']"
    )


def test_binding_to_an_untied_model_is_an_error(model: TiedModel) -> None:
    traced = trace_step(step_of(model), module=model)(*batch(1))
    untied = TiedModel()
    untied.head.weight = nn.Parameter(torch.rand(16, 8))
    with pytest.raises(StateMismatchError, match="the names agree, but their order or tying"):
        traced.bind(untied)


def test_executable_runs_in_place_of_the_graph() -> None:
    traced = trace_step(lambda x: x + 1)(torch.ones(2))
    bound = traced.bind(executable=lambda x: [x + 41])
    assert torch.equal(bound(torch.ones(2)), torch.full((2,), 42.0))


def test_replay_builds_no_autograd_graph(model: TiedModel) -> None:
    bound = trace_step(step_of(model), module=model)(*batch(1)).bind(model)
    loss, gradients = bound(*batch(1))
    assert loss.grad_fn is None
    assert all(g.grad_fn is None for g in gradients)


def test_static_inputs_are_parameters_and_buffers(model: TiedModel) -> None:
    traced = trace_step(step_of(model), module=model)(*batch(1))
    kinds = [i.kind for i in traced.inputs]
    assert traced.num_static_inputs == kinds.count("parameter") + kinds.count("buffer")
    assert kinds[traced.num_static_inputs :] == ["argument", "argument"]


def test_hooks_and_a_forward_of_the_graph_module_run() -> None:
    step = trace_step(lambda x: x * 2)(torch.ones(2))
    bound, graph_module = step.bind(), step.graph_module
    seen: list[list[float]] = []
    before = graph_module.register_forward_pre_hook(lambda _, given: seen.append(given[0].tolist()))
    after = graph_module.register_forward_hook(lambda _, given, results: [results[0] + 1])
    assert bound(torch.ones(2)).tolist() == [3.0, 3.0]
    assert seen == [[1.0, 1.0]]
    before.remove()
    after.remove()
    graph_module.forward = lambda x: [x * 5]
    assert bound(torch.ones(2)).tolist() == [5.0, 5.0]
    del graph_module.forward
    assert bound(torch.ones(2)).tolist() == [2.0, 2.0]
