"""Models in which one layer differs from the others, and how the difference is told."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.traceback
from stamp_models import Block, Toy, shifted_by
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

ODD = 3


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return x + 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


HERE = frozenset({Scaled.__module__.partition(".")[0]})


class Named(torch.autograd.Function):
    """Looks its layer up by a name that differs only in the layer's index."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: str) -> Tensor:
        ctx.layer = layer
        return x + 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * (2 if ctx.layer == f"layers.{ODD}" else 1), None


class Listed(list[float]):
    """A list with an attribute."""

    scale = 1.0


class OtherHalf(Block):
    @property
    def half(self) -> float:
        return 0.75


@dataclass
class Options:
    scale: float


def of_odd_layer(change: Callable[[Block], Any]) -> Callable[[], Toy]:
    def build() -> Toy:
        model = Toy()
        change(model.layers[ODD])
        return model

    return build


def with_attribute(values: Callable[[int], Any]) -> Callable[[], Toy]:
    def build() -> Toy:
        model = Toy()
        for index, layer in enumerate(model.layers):
            layer.extra = values(index)
        return model

    return build


def shared_weight() -> Toy:
    model = Toy()
    model.layers[ODD].up.weight = model.layers[ODD - 1].up.weight
    return model


def one_dropout_rate(layer: Block) -> None:
    layer.dropout.p = 0.5


def wrapped_forward(layer: Block) -> None:
    original = layer.forward
    layer.forward = lambda x: original(x) * 1.5  # type: ignore[method-assign]


def float64_buffer(layer: Block) -> None:
    layer.gain = layer.gain.double()


def frozen(layer: Block) -> None:
    layer.up.bias.requires_grad_(False)


def without_bias(layer: Block) -> None:
    layer.up.bias = None


def with_hooks_by_name(model: Toy) -> Toy:
    """The same hook on every layer, which looks up the layer's name in the backward."""
    scales = {f"layers.{ODD}": 2.0}

    def hook(module: Any, _inputs: Any, gradients: Any) -> Any:
        return (gradients[0] * scales.get(module.fqn, 1.0),)

    for index, layer in enumerate(model.layers):
        layer.fqn = f"layers.{index}"
        layer.register_full_backward_hook(hook)
    return model


def with_listed_scales() -> Toy:
    model = Toy()
    for index, layer in enumerate(model.layers):
        layer.factors = Listed(layer.factors)
        layer.factors.scale = 2.0 if index == ODD else 1.0
    return model


BUILT = {
    "width": (of_odd_layer(lambda layer: layer.__init__(hidden=8)), "up.weight shape is (8, 4)"),
    "kind of module": (
        of_odd_layer(lambda layer: setattr(layer, "activation", nn.GELU())),
        "activation is GELU, and ReLU in layers.0",
    ),
    "constant in a list": (
        of_odd_layer(lambda layer: layer.factors.__setitem__(1, 0.75)),
        "factors[1] is 0.75, and 0.5 in layers.0",
    ),
    "length of a list": (
        of_odd_layer(lambda layer: layer.factors.append(1.0)),
        "factors length is 3, and 2",
    ),
    "constant in a dictionary": (
        of_odd_layer(lambda layer: layer.options.update(scale=3.0)),
        "options.scale is 3.0, and 2.0 in layers.0",
    ),
    "key of a dictionary": (
        of_odd_layer(lambda layer: layer.options.update(more=1)),
        "with ['more']",
    ),
    "constant deep inside": (
        of_odd_layer(lambda layer: layer.options["nested"][1].__setitem__(0, 4)),
        "options.nested[1][0] is 4, and 3",
    ),
    "constant in a closure": (
        of_odd_layer(lambda layer: setattr(layer, "shift", shifted_by(0.5))),
        "shift.__closure__[0] is 0.5, and 0.25",
    ),
    "another function": (
        of_odd_layer(lambda layer: setattr(layer, "shift", torch.neg)),
        "shift is",
    ),
    "partial": (
        with_attribute(lambda index: functools.partial(torch.add, alpha=2 if index == ODD else 1)),
        "alpha is 2, and 1",
    ),
    "int for float": (
        of_odd_layer(lambda layer: layer.factors.__setitem__(0, 1)),
        "factors[0] is int, and float",
    ),
    "forward hook": (
        of_odd_layer(lambda layer: layer.register_forward_hook(lambda *_: None)),
        "_forward_hooks",
    ),
    "forward pre-hook of a submodule": (
        of_odd_layer(lambda layer: layer.up.register_forward_pre_hook(lambda *_: None)),
        "up _forward_pre_hooks",
    ),
    "backward hook": (
        of_odd_layer(lambda layer: layer.register_full_backward_hook(lambda *_: None)),
        "layers.3 has backward hooks, which may tell layers apart",
    ),
    "backward hook of every layer": (
        lambda: with_hooks_by_name(Toy()),
        "layers.0 has backward hooks, which may tell layers apart",
    ),
    "attribute of a list": (with_listed_scales, "factors.scale is 2.0, and 1.0 in layers.0"),
    "hook of a parameter": (
        of_odd_layer(
            lambda layer: layer.up.weight.register_post_accumulate_grad_hook(lambda _: None)
        ),
        "up.weight hooks",
    ),
    "custom autograd function": (
        of_odd_layer(lambda layer: setattr(layer, "shift", Doubled.apply)),
        "shift is",
    ),
    "shared weight": (shared_weight, "layers.2.up.weight is shared: it is also layers.3.up.weight"),
    "shape of a buffer": (
        of_odd_layer(lambda layer: layer.register_buffer("gain", torch.ones(4))),
        "gain shape is (4,), and (1,)",
    ),
    "another buffer": (
        of_odd_layer(lambda layer: layer.register_buffer("more", torch.ones(1))),
        "['gain', 'more']",
    ),
    "dtype": (of_odd_layer(float64_buffer), "gain dtype is torch.float64"),
    "requires_grad": (of_odd_layer(frozen), "up.bias requires_grad is False"),
    "missing parameter": (of_odd_layer(without_bias), "up.bias is NoneType, and Parameter"),
    "evaluation mode": (of_odd_layer(lambda layer: layer.eval()), "training is False, and True"),
    "forward wrapped on the instance": (of_odd_layer(wrapped_forward), "forward"),
    "property": (
        of_odd_layer(lambda layer: setattr(layer, "__class__", OtherHalf)),
        "layers.3 is OtherHalf, and Block",
    ),
    "rate of dropout": (of_odd_layer(one_dropout_rate), "dropout.p is 0.5, and 0.0"),
    "field of a dataclass": (
        with_attribute(lambda index: Options(scale=2.0 if index == ODD else 1.0)),
        "extra.scale is 2.0, and 1.0",
    ),
    "index as an attribute": (with_attribute(lambda index: index), "extra is 1, and 0"),
    "objects that cannot be compared": (
        with_attribute(lambda _: itertools.count()),
        "layers.1.extra is a count of its own",
    ),
    "tensor as an attribute": (
        with_attribute(lambda _: torch.ones(1)),
        "layers.1.extra is a Tensor of its own",
    ),
}


class IndexInLoop(Toy):
    def run_layers(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x) * 2 if index == ODD else layer(x)
        return x


class ScaledByIndex(Toy):
    def run_layers(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x) / (index + 1)
        return x


class ScaledByDepth(Toy):
    def run_layers(self, x: Tensor) -> Tensor:
        return super().run_layers(x) / len(self.layers)


class OtherOperand(Toy):
    def run_layers(self, x: Tensor) -> Tensor:
        begin = x
        for index, layer in enumerate(self.layers):
            x = layer(x)
            x = x + begin if index == ODD else x + x
        return x


class AuxiliaryLoss(Toy):
    def run_layers(self, x: Tensor) -> Tensor:
        losses = []
        for layer in self.layers:
            x = layer(x)
            losses.append(x.square().mean())
        return x + sum(losses)


class OnlyWhenDeep(Toy):
    def run_layers(self, x: Tensor) -> Tensor:
        x = super().run_layers(x)
        return x.sin() if len(self.layers) > 4 else x


class BackwardByIndex(Toy):
    def run_layers(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = Scaled.apply(layer(x), 2 if index == ODD else 1)
        return x


class OneCustomBackward(Toy):
    def run_layers(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            x = Doubled.apply(x) if index == ODD else x + 0
        return x


class HookOnActivation(Toy):
    def run_layers(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == ODD:
                x.register_hook(lambda gradient: gradient * 2)
        return x


class HookOnNode(Toy):
    def run_layers(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == ODD:
                assert x.grad_fn is not None
                x.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,))
        return x


class SavedTensorsScaled(Toy):
    def run_layers(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            scale = 2.0 if index == ODD else 1.0
            with saved_tensors_hooks(lambda t: t, lambda t, scale=scale: t * scale):
                x = layer(x)
        return x


class BackwardByName(Toy):
    def run_layers(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = Named.apply(layer(x), f"layers.{index}")
        return x


class AnnotatedOnce(Toy):
    def run_layers(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            with torch.fx.traceback.annotate({"offload": index == ODD}):
                x = layer(x)
        return x


class LazyTable(Toy):
    table: Tensor | None = None

    def run_layers(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(4, dtype=x.dtype, device=x.device) * 0.1
        return super().run_layers(x + self.table)


class DetachedOnce(Toy):
    def run_layers(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            y = layer(x)
            x = y + (x.detach() if index == ODD else x)
        return x


class Twice(Toy):
    def run_layers(self, x: Tensor) -> Tensor:
        return self.layers[ODD](super().run_layers(x))


class Backwards(Toy):
    def run_layers(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


class OtherDefaultDtype(Toy):
    """The same operators on the same operands, with results of another dtype."""

    def run_layers(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64 if index == ODD else before)
            half = torch.tensor(0.5)
            torch.set_default_dtype(before)
            x = x + half.to(x.dtype)
        return x


class SizesInOtherRoles(Toy):
    """Of two sizes that only the run will tell, one layer takes the other one twice."""

    def run_layers(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            few, many = ((x[0, :, i] > 0).nonzero().shape[0] for i in range(2))
            size = few + 2 * many if index == ODD else 2 * few + many
            x = x + x.new_ones(size).sum()
        return x


class ByNumber(Toy):
    def run_layers(self, x: Tensor) -> Tensor:
        for index in range(6):
            x = self.layers[index](x)
        return x


COMPUTED = {
    "index in the loop": (IndexInLoop, "layers.3 computes otherwise than layers.1"),
    "scaled by the index": (ScaledByIndex, "layers.2 computes otherwise than layers.1"),
    "scaled by the depth": (ScaledByDepth, "layers.5 and what follows computes otherwise in a"),
    "other operand": (OtherOperand, "an operand comes from elsewhere"),
    "auxiliary loss over the layers": (AuxiliaryLoss, "computes otherwise in a model of fewer"),
    "only when there are many": (OnlyWhenDeep, "computes otherwise in a model of fewer layers"),
    "what a backward keeps": (BackwardByIndex, "factor is 2, and 1 in layers.1"),
    "custom backward": (OneCustomBackward, "layers.3 computes otherwise than layers.1"),
    "hook on an activation": (HookOnActivation, "the forward registers a hook on a tensor"),
    "hook on an autograd node": (HookOnNode, "asks for a tensor's grad_fn, which takes hooks"),
    "hooks for saved tensors": (SavedTensorsScaled, "the forward has hooks for saved tensors"),
    "backward by the layer's name": (BackwardByName, "layer is layers.2, and layers.1 in layers.1"),
    "annotation": (AnnotatedOnce, "layers.3 computes otherwise than layers.1"),
    "detached": (DetachedOnce, "layers.3 computes otherwise than layers.1"),
    "layer called twice": (Twice, "layers.3 ran more than once"),
    "layers in another order": (Backwards, "the layers ran in the order [5, 4, 3, 2, 1, 0]"),
    "default dtype": (OtherDefaultDtype, "layers.3 computes otherwise than layers.1"),
    "sizes in other roles": (
        SizesInOtherRoles,
        "layers.3 computes otherwise than layers.1: aten.new_ones.default",
    ),
    "layers by number": (ByNumber, "needs all 6 layers, as a loop over their numbers does"),
}
SEEDED = {**BUILT, **COMPUTED}
