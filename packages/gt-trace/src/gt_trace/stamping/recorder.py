"""What is noted of one run of a step: operators, autograd nodes and where operands come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn

from gt_trace._torch_internals import (
    DisableTorchFunction,
    DTensor,
    FakeTensor,
    custom_function,
    is_traceable_wrapper_subclass,
    kept_for_backward,
    no_dispatch,
    pytree,
    saved_tensor_hooks,
    tensor_indices,
)
from gt_trace.capture.fake_tensors import tensors_in
from gt_trace.stamping.known_operators import KnownOperators
from gt_trace.stamping.layer_list import LayerList
from gt_trace.stamping.recordings import BEFORE, LayerSegment, Origin, ReturnedLeaf, Vocabulary
from gt_trace.stamping.report import NotStampable

_PLAIN = (
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_layout_of: Callable[[torch.Tensor], torch.layout] = torch.Tensor.layout.__get__  # type: ignore[attr-defined]  # a getter


class StreamRecorder:
    """What the modes and hooks write into."""

    def __init__(self, layers: LayerList, vocabulary: Vocabulary) -> None:
        self.layers = layers
        self.vocabulary = vocabulary
        self.order: list[int] = []
        self.current = BEFORE
        self.segments: dict[int, LayerSegment] = {BEFORE: LayerSegment()}
        self.names: dict[int, str] = {}
        self.stand_ins: dict[int, str | None] = {}
        self.paused = False
        self.operands: list[torch.Tensor] = []
        """The tensors that the last operator read."""

        self.has_sizes = False
        """Whether the last operator read sizes that only a run will tell."""

        self.saved_tensor_hooks = saved_tensor_hooks()

        # Everything seen is kept, so that no id is used twice.
        self._origins: dict[int, tuple[Any, Origin]] = {}
        self._nodes: dict[int, tuple[Any, Origin]] = {}
        self._numbers: dict[int, tuple[Any, int]] = {}

    def register(self, tensor: torch.Tensor, origin: Origin) -> None:
        """Remember where a tensor came from, and the plain tensors that it is made of."""
        self._origins[id(tensor)] = (tensor, origin)
        for name, inner in _inner_tensors(tensor):
            self.register(inner, Origin(origin.layer, (origin.place, name)))

    def origin(self, tensor: torch.Tensor) -> Origin:
        """Where a tensor came from; one that no operator made is numbered in its segment."""
        found = self._origins.get(id(tensor))
        if found is not None:
            return found[1]
        # Autograd functions wrap without an operator.
        inner = [self.origin(each) for _, each in _inner_tensors(tensor)]
        if inner:
            origin = Origin(inner[0].layer, ("wrapped", tuple(each.place for each in inner)))
        else:
            segment = self.segments[self.current]
            origin = Origin(self.current, ("foreign", segment.num_foreign))
            segment.num_foreign += 1
        self.register(tensor, origin)
        return origin

    def operator(self, func: Any, args: Any, kwargs: Any) -> int:
        """Record one operator, and say which."""
        hooks = saved_tensor_hooks()
        if hooks != self.saved_tensor_hooks and not _is_checkpoint(hooks):
            raise NotStampable("the forward has hooks for saved tensors, which run in the backward")
        segment = self.segments[self.current]
        self.operands = []
        self.has_sizes = False
        token = (
            self.vocabulary.identity(func),
            self._code(args, segment),
            self._code(kwargs, segment) if kwargs else (),
            _annotations(),
        )
        number = self.vocabulary.number(token, func)
        segment.tokens.append(number)
        return number

    def result(self, result: Any) -> None:
        """Record what the last operator gave."""
        segment = self.segments[self.current]
        place = segment.num_results
        segment.num_results += 1
        leaves = (result,) if isinstance(result, torch.Tensor) else tensors_in(result)
        for index, leaf in enumerate(leaves):
            if id(leaf) not in self._origins:
                self.register(leaf, Origin(self.current, (place, index)))

    def flex_attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record FlexAttention as one operator, and what its functions compute.

        They are run on one score, as a trace does; no code or closure tells what an object that
        they read holds by now. Its backward is PyTorch's, and differentiates the score function.
        """
        query, key, value, score_mod, mask, *others = args
        mask_mod = mask[-1]
        self.operator(func, (query, key, value, mask[:-1], *others), kwargs)
        with tensor_indices():
            at = [query.new_zeros((), dtype=torch.int) for _ in range(4)]
            score = query.new_zeros((), requires_grad=query.requires_grad)
            computed = (score_mod(score, *at), mask_mod(*at))
        segment = self.segments[self.current]
        token = ("functions of attention", self._code(computed, segment))
        segment.tokens.append(self.vocabulary.number(token, "a function of attention"))
        with self._pause():
            result = func(*args, **kwargs)
        self.result(result)
        return result

    def entry_hook(self, index: int) -> Callable[..., None]:
        """The hook that begins a layer's segment."""

        def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if index in self.segments:
                raise NotStampable(f"{self.layers.name(index)} ran more than once")
            self.close(tensor_leaves((args, kwargs)))
            self.order.append(index)
            self.current = index
            self.segments[index] = LayerSegment()

        return enter

    def close(self, tensors: Sequence[torch.Tensor]) -> None:
        """Record the autograd nodes that led to ``tensors`` since the last layer began."""
        with DisableTorchFunction():
            for tensor in tensors:
                if tensor.grad_fn is not None:
                    self._walk(tensor.grad_fn)

    def output(self, leaf: Any) -> ReturnedLeaf:
        """What one leaf of the step's result is."""
        if not isinstance(leaf, torch.Tensor):
            return ReturnedLeaf(is_tensor=False, constant=leaf)
        return ReturnedLeaf(gradient_of=self.stand_ins.get(id(leaf)))

    def stand_in(self, wanted: torch.Tensor, known: KnownOperators) -> torch.Tensor:
        """A tensor that stands for the gradient of ``wanted``."""
        origin = self.origin(wanted)
        gradient = known.another(wanted)
        if gradient is None:
            with self._pause():
                gradient = wanted.detach()
        self.register(gradient, Origin(origin.layer, ("gradient", origin.place)))
        self.stand_ins[id(gradient)] = self.names.get(id(wanted))
        return gradient

    @contextmanager
    def _pause(self) -> Iterator[None]:
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    def _walk(self, root: Any) -> None:
        """Depth first, children before parents, without recursion: graphs are deep."""
        segment = self.segments[self.current]
        pending = [(root, False)]
        while pending:
            node, done = pending.pop()
            if id(node) in self._nodes:
                continue
            children = [child for child, _ in node.next_functions if child is not None]
            if not done:
                pending.append((node, True))
                pending.extend((child, False) for child in reversed(children))
                self._origins_of_leaf(node)
                continue
            state = self._settled(kept_for_backward(node), segment)
            function = custom_function(node)
            if function is not None:
                segment.functions.add(function)
            edges = tuple(-1 if child is None else port for child, port in node.next_functions)
            name = type(node).name(node)  # a function may keep a name of its own
            token = ("autograd", name, function, edges, bool(state))
            segment.tokens.append(self.vocabulary.number(token, name))
            segment.origins.extend(self._nodes[id(child)][1] for child in children)
            if state:
                segment.contexts.append((function, state))
            self._nodes[id(node)] = (node, Origin(self.current, ("node", segment.num_results)))
            segment.num_results += 1

    def _settled(self, value: Any, segment: LayerSegment) -> Any:
        """What a custom function keeps, with tensors and symbolic sizes as the segment has them."""
        if isinstance(value, torch.Tensor):
            segment.origins.append(self.origin(value))
            return ("tensor", str(self._signature(value, segment)))
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return ("size", self._text(value, segment))
        if type(value) in (list, tuple):
            return tuple(self._settled(each, segment) for each in value)
        if type(value) is dict:
            return {key: self._settled(each, segment) for key, each in value.items()}
        return value

    def _origins_of_leaf(self, node: Any) -> None:
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            origin = self.origin(variable)
            self._nodes[id(node)] = (node, Origin(origin.layer, ("leaf", origin.place)))

    def _code(self, value: Any, segment: LayerSegment) -> Any:
        """An operand as something hashable; its tensors go to the segment's origins."""
        if isinstance(value, torch.Tensor):
            self.operands.append(value)
            segment.origins.append(self.origin(value))
            return self._signature(value, segment)
        kind = type(value)
        if kind is int or kind is bool:
            return (kind, value)
        if kind is list or kind is tuple:
            return tuple([self._code(each, segment) for each in value])
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, bool | int | float | complex):
            return (type(value), repr(value))
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return (type(value), self._text(value, segment))
        if isinstance(value, list | tuple):
            return tuple(self._code(each, segment) for each in value)
        if isinstance(value, dict):
            return tuple((key, self._code(each, segment)) for key, each in value.items())
        return ("object", self.vocabulary.identity(value))

    def _signature(self, tensor: torch.Tensor, segment: LayerSegment) -> Any:
        """All that an operator can see of a tensor, but for values."""
        if type(tensor) is FakeTensor and _is_plain(tensor):
            return _plain_facts(tensor, tensor.fake_device)
        spec: Any = getattr(tensor, "_spec", None)
        layout = () if spec is None else (spec.placements, spec.mesh, _shard_order(spec))
        if type(tensor) is DTensor and not tensor._has_symbolic_sizes_strides:
            numbers = tuple([self._number(each) for each in layout])
            local = self._signature(tensor._local_tensor, segment)
            return (numbers, *_plain_facts(tensor, tensor.device), local)
        sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
        facts = (
            type(tensor),
            tuple(n if type(n) is int else self._text(n, segment) for n in sizes),
            tensor.dtype,
            tensor.device,
            tensor.layout,
            tensor.requires_grad,
            tensor.is_conj(),
            tensor.is_neg(),
        )
        if type(tensor) is FakeTensor:
            return (*facts, _literal(tensor), tensor.dispatch_keys is None)
        if spec is None:
            return facts
        held = tuple(self._signature(inner, segment) for _, inner in _inner_tensors(tensor))
        return (*facts, *layout, held)

    def _number(self, value: Any) -> int:
        """A number for what tensors share, so that it is hashed once: placements and meshes."""
        found = self._numbers.get(id(value))
        if found is None:
            number = self.vocabulary.number(("shared", value), value)
            found = self._numbers[id(value)] = (value, number)
        return found[1]

    def _text(self, size: Any, segment: LayerSegment) -> str:
        """A symbolic size in the names of the segment."""
        self.has_sizes = True
        return segment.sizes.text(size)


def _shard_order(spec: Any) -> Any:
    """In which order mesh axes split a dimension; old versions of PyTorch know of one only."""
    return getattr(spec, "shard_order", None)


def _is_plain(fake: FakeTensor) -> bool:
    """Whether sizes are numbers, no value is known, and PyTorch tells it from others by class."""
    return (
        not fake._has_symbolic_sizes_strides
        and fake.constant is None
        and fake.dispatch_keys is None
    )


def _plain_facts(tensor: torch.Tensor, device: torch.device) -> tuple[Any, ...]:
    """All that is known of a tensor of which sizes are numbers, beside its class."""
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        device,
        _layout_of(tensor),
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _literal(tensor: FakeTensor) -> str | None:
    """The values of a fake tensor that has some: one made of numbers that Python held."""
    if tensor.constant is None:
        return None
    with no_dispatch():
        return repr(tensor.constant.tolist())


def _is_checkpoint(hooks: tuple[Any, Any] | None) -> bool:
    """Whether hooks for saved tensors are those of activation checkpointing, or none."""
    return hooks is None or getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def _annotations() -> str:
    """What ``torch.fx.traceback.annotate`` would note on nodes now, beside our own keys."""
    noted = fx_traceback.current_meta.get("custom") or {}
    others = {key: held for key, held in noted.items() if not str(key).startswith("gt.")}
    return repr(others) if others else ""


def tensor_leaves(value: Any) -> list[torch.Tensor]:
    """The tensors of a tree, whole."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _inner_tensors(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The tensors that a tensor subclass is made of, by name; none for a plain tensor."""
    if type(tensor) is FakeTensor:
        return []
    if type(tensor) is DTensor:
        return [("_local_tensor", tensor._local_tensor)]
    is_plain = not is_traceable_wrapper_subclass(tensor)
    if is_plain:
        return []
    flatten: Any = getattr(tensor, "__tensor_flatten__")  # noqa: B009  # the protocol of subclasses
    held = ((name, getattr(tensor, name)) for name in flatten()[0])
    return [(name, inner) for name, inner in held if isinstance(inner, torch.Tensor)]
