"""From a model to the graph that is planned: forward and backward on global tensors, no memory.

The model runs once on fake tensors of its unsharded shapes (as in ``gt_trace.trace_step``),
together with ``torch.autograd.grad`` from a gradient of each output, so that one graph holds all
that a training step does between parameters, inputs, outputs and gradients. What cannot be planned
is refused here, with every reason found, before any weight is allocated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from gt_autoparallel._torch_internals import (
    FakeTensor,
    OpOverload,
    functional_twin,
    make_fx,
    returns_new_storage,
    writes_to_arguments,
)
from gt_autoparallel.errors import UnsupportedModelError
from gt_autoparallel.graph.graph_conversion import (
    REDUCE_HERE,
    TANGENT_OF,
    CapturedOutput,
    CapturedStep,
    placement_graph,
)
from gt_autoparallel.graph.placement_graph import PlacementGraph
from gt_trace import CaptureError, TracedStep, flex_attention_on_cpu, register_block_masks
from gt_trace.capture.trace import trace_without_code

_CONSTANTS = (bool, int, float, complex, str)


def capture_placement_graph(
    model: nn.Module,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    device: torch.device | str = "cpu",
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    allowed_random_operators: Collection[str] = (),
) -> PlacementGraph:
    """Capture forward and backward of a model as the graph that is planned.

    Args:
        model: on any device, the meta device too; its tensors are read for their shapes only.
        example_args: positional arguments of its forward: trees whose leaves are tensors (global,
            of any device, fake ones too), or None, numbers and strings, which become constants.
            A mask of FlexAttention is such a tree, with what its function closes over. Those
            that require grad get gradients in the backward, as parameters do.
        example_kwargs: keyword arguments, likewise.
        device: for whose kernels the graph is captured; operators such as attention differ.
        compute_dtype: dtype to which floating-point parameters are cast before they are used;
            None leaves them. Gradients come in the parameters' own dtype.
        reduce_dtype: dtype in which gradients of cast parameters are summed over ranks: there is
            a cast to it before the one to the parameter's dtype. None: the parameter's dtype.
        allowed_random_operators: operators that may draw random numbers, by the name of the
            operator without overload (``aten.native_dropout``). They run whole on every rank, which
            is right only if every rank draws the same: seed all ranks alike.

    Raises:
        UnsupportedModelError: the model or its arguments cannot be captured; lists every reason.
    """
    args, kwargs = tuple(example_args), dict(example_kwargs or {})
    _check_autocast(device)
    _check_model(model)
    args, kwargs = _shapes_only(args, kwargs, model)
    step = _JointStep(model, compute_dtype, reduce_dtype)
    try:
        # Gradients are planned wherever the caller is, inside torch.no_grad() too.
        with torch.inference_mode(False), torch.enable_grad(), flex_attention_on_cpu():
            trace = trace_without_code(step, module=model, meta_device=device)
            traced = trace(*args, **kwargs)
    except CaptureError as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be captured: {error}"
        ) from error
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be captured: its forward or backward failed on tensors "
            f"without data: {type(error).__name__}: {_first_line(error)}"
        ) from error
    graph_module = make_functional(traced)
    assert step.output_spec is not None
    return placement_graph(
        CapturedStep(
            graph=graph_module.graph,
            inputs=traced.inputs,
            arguments=traced.arguments,
            input_spec=traced.argument_spec,
            output_spec=step.output_spec,
            outputs=step.outputs,
            gradients=step.gradients,
            input_gradients=[traced.arguments[leaf].name for leaf in step.input_gradients],
            literals=_literals(graph_module),
        ),
        allowed_random_operators=frozenset(allowed_random_operators),
    )


def _check_autocast(device: torch.device | str) -> None:
    device_type = torch.device(device).type
    if torch.is_autocast_enabled(device_type):
        raise UnsupportedModelError(
            f"autocast is on for {device_type}, and a plan states every dtype: leave autocast out, "
            "and give compute_dtype="
        )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "(no message)"


def _literals(graph_module: torch.fx.GraphModule) -> dict[str, torch.Tensor]:
    held = {str(node.target) for node in graph_module.graph.find_nodes(op="get_attr")}
    values = {name: getattr(graph_module, name, None) for name in sorted(held)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def _check_model(model: nn.Module) -> None:
    problems = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, FakeTensor):
            problems.append(f"{name} is a fake tensor; build the model on the meta device instead")
        elif type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
            problems.append(
                f"{name} is a {type(tensor).__name__}; plan the model before it is sharded"
            )
    if problems:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be planned:\n  " + "\n  ".join(problems)
        )


def _shapes_only(
    args: tuple[Any, ...], kwargs: dict[str, Any], model: nn.Module
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with tensors on meta, so that neither data nor foreign fakes matter."""
    register_block_masks()
    leaves, spec = pytree.tree_flatten_with_path((args, kwargs))
    problems: list[str] = []
    converted: list[Any] = []
    for path, leaf in leaves:
        name = ("kwargs" if pytree.keystr(path[:1]) == "[1]" else "args") + pytree.keystr(path[1:])
        if isinstance(leaf, torch.Tensor):
            converted.append(leaf)
            if any(not isinstance(size, int) for size in leaf.shape):
                problems.append(f"{name} has sizes that are no numbers: {tuple(leaf.shape)!r}")
            elif type(leaf) not in (torch.Tensor, nn.Buffer) and not isinstance(leaf, FakeTensor):
                problems.append(f"{name} is a {type(leaf).__name__}; give global tensors")
            else:
                converted[-1] = torch.empty_strided(
                    leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta"
                ).requires_grad_(leaf.requires_grad)
            continue
        converted.append(leaf)
        if leaf is not None and not isinstance(leaf, _CONSTANTS):
            problems.append(
                f"{name} is a {type(leaf).__name__}; allowed: tensors, None, numbers, strings, and "
                "containers of them"
            )
    if problems:
        raise UnsupportedModelError(
            f"example inputs of {type(model).__name__} cannot be captured:\n  "
            + "\n  ".join(problems)
        )
    new_args, new_kwargs = pytree.tree_unflatten(converted, spec)
    return new_args, new_kwargs


class _JointStep:
    """What is traced: forward, and the gradients of parameters and of inputs that ask for them."""

    def __init__(
        self,
        model: nn.Module,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self._model = model
        self._compute_dtype = compute_dtype
        self._reduce_dtype = reduce_dtype
        self._is_trained = False
        self.__signature__ = _signature(model)
        self.output_spec: pytree.TreeSpec | None = None
        self.outputs: list[CapturedOutput] = []
        """What each leaf is that the model returns."""

        self.gradients: list[str] = []
        """Names of the parameters whose gradients follow the outputs."""

        self.input_gradients: list[int] = []
        """Which leaves of the arguments have gradients, which follow those."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        parameters = dict(self._model.named_parameters())
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        asked = {
            leaf: tensor
            for leaf, tensor in enumerate(pytree.tree_leaves((args, kwargs)))
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad
        }
        self._is_trained = bool(trained or asked)
        casts = _casts(parameters, self._compute_dtype)
        with _cast_parameters(self._model, casts):
            result = self._model(*args, **kwargs)
        leaves, self.output_spec = pytree.tree_flatten_with_path(result)
        tensors = self._record_outputs(leaves)
        differentiable = [tensor for tensor in tensors if tensor.requires_grad]
        if not differentiable or not self._is_trained:
            return tensors
        wanted = [casts.get(name, parameter) for name, parameter in trained.items()]
        gradients = torch.autograd.grad(
            differentiable,
            [*wanted, *asked.values()],
            [TANGENT_OF(tensor.detach()) for tensor in differentiable],
            allow_unused=True,
        )
        for (name, parameter), gradient in zip(trained.items(), gradients, strict=False):
            if gradient is not None:
                self.gradients.append(name)
                tensors.append(self._reduced(gradient, parameter))
        for leaf, gradient in zip(asked, gradients[len(wanted) :], strict=True):
            if gradient is not None:
                self.input_gradients.append(leaf)
                tensors.append(gradient)
        return tensors

    def _record_outputs(self, leaves: Sequence[tuple[Any, Any]]) -> list[torch.Tensor]:
        problems = []
        tensors: list[torch.Tensor] = []
        for path, leaf in leaves:
            name = "output" + pytree.keystr(path)
            if isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
                self.outputs.append(
                    CapturedOutput(
                        name=name,
                        is_tensor=True,
                        is_differentiable=leaf.requires_grad and self._is_trained,
                    )
                )
                continue
            self.outputs.append(CapturedOutput(name=name, is_tensor=False, constant=leaf))
            if leaf is not None and not isinstance(leaf, _CONSTANTS):
                problems.append(
                    f"{name} is a {type(leaf).__name__}; allowed: tensors and constants"
                )
        if problems:
            raise CaptureError("its outputs are not tensors:\n  " + "\n  ".join(problems))
        return tensors

    def _reduced(self, gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        if gradient.dtype == parameter.dtype:
            return gradient
        if self._reduce_dtype is not None and gradient.dtype == self._reduce_dtype:
            gradient = REDUCE_HERE(gradient)
        elif self._reduce_dtype is not None:
            gradient = gradient.to(self._reduce_dtype)
        return gradient.to(parameter.dtype)


def _casts(
    parameters: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    if dtype is None:
        return {}
    return {
        name: parameter.to(dtype)
        for name, parameter in parameters.items()
        if parameter.is_floating_point() and parameter.dtype != dtype
    }


@contextmanager
def _cast_parameters(model: nn.Module, casts: Mapping[str, torch.Tensor]) -> Any:
    """While it lasts, modules hold the casts, tied ones under each of their names."""
    cast_of = {id(p): casts[name] for name, p in model.named_parameters() if name in casts}
    held = [
        (module._parameters, key, parameter)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if id(parameter) in cast_of
    ]
    for holder, key, parameter in held:
        holder[key] = cast_of[id(parameter)]  # type: ignore[assignment]  # a tensor for a while
    try:
        yield
    finally:
        for holder, key, parameter in held:
            holder[key] = parameter


def _signature(model: nn.Module) -> inspect.Signature:
    """The signature of the model's forward, which gives the inputs their names."""
    forward: Callable[..., Any] = model.forward
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):
        return inspect.Signature([inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)])


# A captured step in the operators that are planned: none writes, and none that should be two.
#
# Placements belong to values, so a value must not change under its readers. An operator that
# writes to what nobody else holds, as a normalization adds its epsilon, becomes its functional
# twin in its place. Where more is written, the graph runs once more on its fake tensors under
# ``torch.func.functionalize``, which keeps the annotations of the nodes it replaces and takes as
# long as the first capture. So it does where an operator can be sharded only if it is taken
# apart (``decompositions``).
_COPY = torch.ops.aten.copy_.default
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
"""Its result lies in its argument's storage, though its schema does not say so."""


def make_functional(traced: TracedStep) -> GraphModule:
    """The graph of ``traced`` in which no operator writes to its arguments or has a decomposition.

    Raises:
        UnsupportedModelError: the step changes a parameter, a buffer or an argument; all of them
            are named.
    """
    graph_module = traced.graph_module
    nodes = graph_module.graph.nodes
    for node in nodes:
        if _writes(node):
            _return_instead(node, traced)
    if not any(_writes(node) or is_decomposed(node.target, node.args) for node in nodes):
        return graph_module
    replay = torch.func.functionalize(Interpreter(graph_module).run, remove="mutations")
    with traced.fake_mode, torch.fx.traceback.preserve_node_meta():
        functional: GraphModule = make_fx(replay, dict(DECOMPOSITIONS))(*traced.example_inputs)
    placeholders = functional.graph.find_nodes(op="placeholder")
    names = dict(zip(placeholders, traced.inputs, strict=True))
    changed = [
        f"{names[node.args[0]].kind} {names[node.args[0]].name}"
        for node in functional.graph.nodes
        if node.target is _COPY and node.args[0] in names
    ]
    if changed:
        raise UnsupportedModelError(
            "the forward writes to what belongs to the model or its caller, which a placed model "
            "could not do on its shards; return the new values instead: " + ", ".join(changed)
        )
    return functional


def _writes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and writes_to_arguments(node.target)


def _return_instead(node: Node, traced: TracedStep) -> None:
    """Makes a write to a value that nobody else holds a new value of the same form.

    *Before*: ``mean = aten.mean(x); y = aten.add_(mean, eps)``, and only ``y`` is read.
    *After*: ``mean = aten.mean(x); y = aten.add(mean, eps)``.
    """
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or set(source.users) != {node}:
        return
    maker = source.target
    if not isinstance(maker, OpOverload) or maker is _UNSAFE_VIEW or not returns_new_storage(maker):
        return
    assert isinstance(node.target, OpOverload)  # it writes
    twin = functional_twin(node.target)
    if twin is None:
        return
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    with traced.fake_mode:
        value = twin(*args, **kwargs)
    if _form(value) == _form(node.meta["val"]):
        node.target = twin


def _form(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return None
    return (value.shape, value.stride(), value.dtype, value.device)


# Operators that can be sharded only as two: what capture replaces them by.
#
# A mean over samples divides by the weight of all samples. As one operator it needs every sample
# on every rank; as a sum and a division, each rank sums its own samples, and two numbers are
# reduced.
_MEAN, _SUM = 1, 2
"""Values of the argument ``reduction``."""

_NLL_LOSS = torch.ops.aten.nll_loss_forward.default


def is_decomposed(target: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator with these arguments has a decomposition here."""
    return target is _NLL_LOSS and args[3] == _MEAN


def _mean_nll_loss(
    log_probabilities: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
) -> Any:
    """The sum over samples, divided by their weight: what the operator computes itself."""
    if reduction != _MEAN:
        return NotImplemented
    total, total_weight = _NLL_LOSS(log_probabilities, target, weight, _SUM, ignore_index)
    return torch.ops.aten.div.Tensor(total, total_weight), total_weight


DECOMPOSITIONS: Mapping[OpOverload, Callable[..., Any]] = MappingProxyType(
    {_NLL_LOSS: _mean_nll_loss}
)
"""Decompositions as ``make_fx`` takes them: NotImplemented leaves the operator as it is."""
