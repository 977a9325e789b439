"""Steps with complex numbers, and with the function transforms of ``torch.func``: none is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from edited_graphs import EditGraph
from pass_graphs import capture, node_of, run_pass, same_bits
from program_pairs import differences, same
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

from gt_passes import VerificationError, optimize
from gt_passes.verifier.verifier import Verifier
from gt_trace import trace_step

Z = torch.randn(4, 4, dtype=torch.complex64)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def as_function(module: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda parameters, x: functional_call(module, parameters, (x,)).square().mean()


def with_tangent(module, x):
    return jvp(module, (x,), (torch.ones_like(x),))[1]


def with_tangent_of_parameters(module, x):
    parameters = dict(module.named_parameters())
    tangents = {name: torch.ones_like(each) for name, each in parameters.items()}
    return jvp(lambda values: functional_call(module, values, (x,)), (parameters,), (tangents,))[1]


def with_vector_product(module, x):
    outputs, backward = vjp(module, x)
    return backward(torch.ones_like(outputs))[0]


def with_penalty_on_gradients(module, x):
    parameters = dict(module.named_parameters())
    return sum(each.square().sum() for each in grad(as_function(module))(parameters, x).values())


def with_hessian(module, x):
    return hessian(lambda row: module(row).sum())(x[0])


def with_jacobian(module, x):
    return vmap(jacrev(module))(x)


def per_sample_gradients(module, x):
    parameters = dict(module.named_parameters())
    found = vmap(grad(as_function(module)), in_dims=(None, 0))(parameters, x)
    return torch.cat([each.flatten(1) for each in found.values()], dim=1).norm(dim=1)


def with_conjugates(module, x):
    z = torch.complex(x, x.roll(1, 0)) @ module[0].weight.to(torch.complex64).t()
    return (z * z.conj()).real + z.imag + torch.view_as_real(z.mH @ z).sum()


def with_spectrum(module, x):
    return torch.fft.irfft(torch.fft.rfft(module[0](x)) * 2.0)


def with_rotation(module, x):
    pairs = torch.view_as_complex(module[0](x).view(3, 4, 2))
    turned = pairs * torch.polar(torch.ones(4), torch.arange(4.0))
    return torch.view_as_real(turned).flatten(1)


def with_writes_to_parts(module, x):
    z = torch.complex(x, x) @ module[0].weight.to(torch.complex64).t()
    z = z.clone()
    z.real.add_(module[0].bias)
    z.imag.mul_(2.0)
    return z.abs()


@pytest.mark.parametrize(
    "compute",
    [
        *(with_tangent, with_tangent_of_parameters, with_vector_product),
        *(with_penalty_on_gradients, with_hessian, with_jacobian, per_sample_gradients),
        *(with_conjugates, with_spectrum, with_rotation, with_writes_to_parts),
    ],
)
def test_a_transformed_step_is_verified_and_equal(compute):
    module = model()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))

    def step(x):
        loss = compute(module, x).square().mean()
        weights = list(module.parameters())
        return loss, torch.autograd.grad(loss, weights, allow_unused=True)

    expected = step(x)
    traced = trace_step(step, module=module)(x)
    assert optimize(traced).verified
    assert same_bits(traced.bind(module)(x), expected)


def test_two_conjugations_cancel_out_and_one_does_not():
    def twice(z):
        return torch.conj(torch.conj(z).t()).t().exp()

    def once(z):
        return torch.conj(z).exp()

    assert same(twice, lambda z: z.exp(), Z)
    assert not same(once, lambda z: z.exp(), Z)
    assert same(once, lambda z: torch.conj_physical(z).exp(), Z)
    assert same(once, lambda z: z.conj().resolve_conj().exp(), Z)


def test_parts_of_complex_numbers_are_followed():
    def parts(z):
        rows = torch.view_as_real(z)
        return torch.view_as_complex(rows[1:]).exp()

    assert same(parts, lambda z: z[1:].exp(), Z)
    assert not same(parts, lambda z: z[:3].exp(), Z)
    assert not same(
        lambda z: torch.view_as_real(z)[..., 0].exp(),
        lambda z: torch.view_as_real(z)[..., 1].exp(),
        Z,
    )


def test_a_part_of_a_conjugate_is_not_that_of_the_tensor():
    assert differences(lambda z: z.conj().imag.exp(), lambda z: z.imag.exp(), Z)


def test_wrong_strides_of_a_tensor_of_zeros_are_still_found():
    def run(x):
        zeros = torch._efficientzerotensor((4, 3))
        return x + torch.ops.aten._to_copy.default(zeros, dtype=torch.float64)

    graph_module = capture(run, torch.ones(4, 3))
    assert not Verifier().verify(graph_module).problems
    node = node_of(graph_module, "_to_copy")
    node.meta["val"] = node.meta["val"].t()
    assert Verifier().verify(graph_module).problems


def test_a_conjugation_left_out_is_refused():
    module = model()

    def step(x):
        z = torch.complex(x, x.roll(1, 0))
        return (z.conj() * 2).abs() + z.conj().imag

    traced = trace_step(step, module=module)(torch.randn(3, 4))
    graph = traced.graph_module.graph
    (first, *_) = graph.find_nodes(op="call_function", target=torch.ops.aten._conj.default)
    assert first.users

    def leave_out(graph_module):
        first.replace_all_uses_with(first.args[0])

    with pytest.raises(VerificationError):
        run_pass(EditGraph(edit=leave_out), traced.graph_module)
