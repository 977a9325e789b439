"""What a joint graph holds, how its values are named, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from joint_models import Gelu, ManyNames, Tree
from torch import nn
from torch.distributed.tensor import Replicate
from trace_models import TiedModel, batch

from gt_config.node_keys import PhaseAnnotation
from gt_trace import (
    CaptureError,
    ConstantCapturedError,
    graph_text,
    module_fqn,
    phase_of,
    read_annotation,
)
from gt_trace.joint import export_joint_graph, partition


def test_forward_and_backward_are_one_graph_and_the_gradient_arrives_from_outside() -> None:
    joint = export_joint_graph(Gelu(), (torch.rand(2, 4),))
    assert_expected_inline(
        graph_text(joint.graph_module),
        """\
input p_linear_weight: f32[3, 4]
input a_x: f32[2, 4]
input t_output: f32[2, 3]
# forward linear
    t: f32[4, 3] = aten.t.default(p_linear_weight)
    mm: f32[2, 3] = aten.mm.default(a_x, t)
# forward
    gelu: f32[2, 3] = aten.gelu.default(mm)
# backward
    gelu_backward: f32[2, 3] = aten.gelu_backward.default(t_output, mm)
# backward linear
    t_1: f32[3, 2] = aten.t.default(gelu_backward)
    mm_1: f32[3, 4] = aten.mm.default(t_1, a_x)
    t_2: f32[4, 3] = aten.t.default(mm_1)
    t_3: f32[3, 4] = aten.t.default(t_2)
return (gelu, t_3)
""",
    )


def test_inputs_and_gradients_are_named_whatever_their_order() -> None:
    joint = export_joint_graph(ManyNames(), (torch.rand(3),), {"scale": torch.rand(3)})
    assert [(i.kind, i.name) for i in joint.inputs] == [
        ("parameter", "zeta"),
        ("parameter", "alpha"),
        ("parameter", "x"),
        ("parameter", "frozen"),
        ("parameter", "unused"),
        ("buffer", "tangents"),
        ("argument", "x"),
        ("argument", "scale"),
        ("tangent", "output"),
    ]
    assert [(r.kind, r.of, r.name) for r in joint.results] == [
        ("output", None, "output"),
        ("gradient", "parameter", "zeta"),
        ("gradient", "parameter", "alpha"),
        ("gradient", "parameter", "x"),
    ]
    assert ("parameter", "unused") in joint.differentiable
    assert ("parameter", "frozen") not in joint.differentiable


def test_tied_parameters_are_one_input_and_have_one_gradient() -> None:
    joint = export_joint_graph(TiedModel(), (batch(1)[0],))
    (tied,) = [i for i in joint.inputs if i.aliases]
    assert (tied.name, tied.aliases) == ("embedding.weight", ("head.weight",))
    assert sum(r.kind == "gradient" and r.name == tied.name for r in joint.results) == 1


def test_a_buffer_that_is_updated_in_place_is_a_result() -> None:
    joint = export_joint_graph(TiedModel(), (batch(1)[0],))
    mutations = [(r.of, r.name) for r in joint.results if r.kind == "mutation"]
    assert mutations == [("buffer", "calls")]


def test_outputs_keep_their_tree_and_constants() -> None:
    joint = export_joint_graph(Tree(), (torch.rand(2, 3),), {"name": "pine"})
    assert [(o.name, o.is_tensor, o.requires_grad, o.constant) for o in joint.outputs] == [
        ("output['logits']", True, True, None),
        ("output['more'][0]", True, True, None),
        ("output['more'][1]", True, False, None),
        ("output['name']", False, False, "pine"),
        ("output['nothing']", False, False, None),
    ]


def test_backward_nodes_carry_the_module_of_the_forward_node() -> None:
    joint = export_joint_graph(TiedModel(), (batch(1)[0],))
    nodes = [n for n in joint.graph_module.graph.nodes if n.op == "call_function"]
    assert all(read_annotation(n, PhaseAnnotation) is not None for n in nodes)
    backward = {module_fqn(n) for n in nodes if phase_of(n) == "backward"}
    assert {"embedding", "blocks.0.up", "blocks.1.down", "blocks.1.norm", "head"} <= backward


def test_the_module_is_as_before_also_after_a_failure() -> None:
    model = TiedModel()
    before = dict(model.named_parameters(remove_duplicate=False))
    export_joint_graph(model, (batch(1)[0],))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        export_joint_graph(model.blocks[0], (torch.zeros(3),))
    after = dict(model.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert model.calls.item() == 0


def module_of(function: Callable[[nn.Module, torch.Tensor], object]) -> nn.Module:
    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(2))
            self.register_buffer("count", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> object:
            return function(self, x)

    return Calling()


def replace_buffer(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    module.count = module.count + 1
    return x * module.weight


def average_weight(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    module.count.add_(module.weight)
    return x * module.weight


def scale_weight(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        module.weight.mul_(0.5)
    return x * module.weight


REFUSED: dict[str, tuple[Callable[[nn.Module, torch.Tensor], object], str]] = {
    "no gradient": (
        lambda m, x: x * 2,
        """\
no output of the module requires a gradient, so it has no backward: capture it where gradients are \
enabled, with a parameter or an argument that requires one""",
    ),
    "an input as output": (
        lambda m, x: (x * m.weight, x),
        """\
the module's outputs cannot be captured:
  output[1] is an input, or a view of one; return a copy""",
    ),
    "an output of an unknown kind": (
        lambda m, x: (x * m.weight, {1}),
        """\
the module's outputs cannot be captured:
  output[1] is a set; return tensors, numbers, strings, None, or tuples, lists and dictionaries of them""",
    ),
    "a buffer replaced": (
        replace_buffer,
        """\
the step has side effects:
  buffer count was replaced, and a replay would not replace it; update it in place (copy_, add_)""",
    ),
    "a buffer with a gradient": (
        average_weight,
        """\
the step changes tensors in a way that a replay would lose:
  buffer count requires a gradient after the step, since it was updated from a tensor that does; \
update it under torch.no_grad(), or from detached tensors""",
    ),
    "a parameter that is updated": (
        scale_weight,
        """\
the joint graph cannot be used:
  it needs __output_tangent(__input_mutation(self.get_parameter('weight'))) (TangentAOTInput): inputs \
or outputs that share memory, effects with an order of their own, and in-place updates that require \
a gradient are not supported; return and pass copies, or use trace_step""",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refuses(what: str) -> None:
    function, text = REFUSED[what]
    with pytest.raises(CaptureError) as error:
        export_joint_graph(module_of(function), (torch.rand(2),))
    assert str(error.value) == text


def test_refuses_placements_of_what_is_no_dtensor_output() -> None:
    with pytest.raises(CaptureError) as error:
        export_joint_graph(Gelu(), (torch.rand(2, 4),), gradient_placements={"out": [Replicate()]})
    assert str(error.value) == (
        "the module's outputs cannot be captured:\n"
        "  gradient_placements names out, which is no DTensor output"
    )


def test_refuses_a_tensor_that_is_neither_state_nor_argument() -> None:
    constant = torch.rand(2)
    with pytest.raises(ConstantCapturedError, match="neither state nor argument of the step"):
        export_joint_graph(module_of(lambda m, x: x * m.weight + constant), (torch.rand(2),))


def test_refuses_an_argument_that_is_neither_tensor_nor_constant() -> None:
    with pytest.raises(CaptureError, match="x is a object; pass tensors, numbers, strings"):
        export_joint_graph(module_of(lambda m, x: m.weight * 2), (object(),))


def test_a_model_on_meta_is_captured_as_if_it_were_on_a_device() -> None:
    with torch.device("meta"):
        model, x = Gelu(), torch.rand(2, 4)
    joint = export_joint_graph(model, (x,), meta_device="cpu")
    assert {str(example.device) for example in joint.example_inputs} == {"cpu"}


class Resized(nn.Module):
    """Changes the size of what a convolution gives."""

    def __init__(self, num_dims: int, mode: str) -> None:
        super().__init__()
        kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[num_dims]
        self.convolution, self.mode = kind(2, 3, 1), mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.interpolate(self.convolution(x), scale_factor=1.7, mode=self.mode)


class Recurrent(nn.Module):
    """A recurrent layer whose input requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.lstm = nn.Linear(4, 4), nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.lstm(self.linear(x))[0]
        return outputs


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (lambda: Resized(1, "linear"), (2, 2, 9)),
        (lambda: Resized(2, "bilinear"), (2, 2, 9, 7)),
        (lambda: Resized(2, "bicubic"), (2, 2, 9, 7)),
        (lambda: Resized(3, "trilinear"), (2, 2, 4, 5, 6)),
        (Recurrent, (5, 2, 4)),
    ],
)
def test_kernels_are_those_that_eager_runs(
    module: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model, x = module(), torch.randn(shape)
    bound = partition(export_joint_graph(model, (x,))).bind(model)
    results = []
    for call in (bound, model):
        output = call(x)
        gradients = torch.autograd.grad(output.square().mean(), list(model.parameters()))
        results.append([output, *gradients])
    assert all(map(torch.equal, *results))
