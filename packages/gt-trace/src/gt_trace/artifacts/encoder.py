"""Graphs and what belongs to them as JSON, without ranks, names of process groups, or pickle.

A scalar stands for itself; everything else is a list whose first item says what it is. What repeats
from layer to layer (annotations, stack traces, shapes) stands once, in the table ``values``, and is
referred to by its position. Memory is told apart by its position in the table ``storages``, so
that views of one memory are views of one memory again.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule, Node
from torch.fx.immutable_collections import immutable_dict, immutable_list

from gt_trace._torch_internals import (
    DTensor,
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    TensorMetadata,
    pytree,
    storage_key,
)
from gt_trace.artifacts.expressions import encoded_expression
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.artifacts.metadata_texts import check_metadata
from gt_trace.artifacts.operators import NAMESPACES, operator_name
from gt_trace.artifacts.records import encoded_record
from gt_trace.artifacts.size_facts import encoded_facts
from gt_trace.capture.block_masks import mask_attributes, stored_code
from gt_trace.capture.captured_mode import CapturedMode
from gt_trace.capture.graph_inputs import ArgumentSignature, GraphInput
from gt_trace.capture.module_state import StateEntry
from gt_trace.capture.read_values import ReadValues
from gt_trace.capture.subclass_layout import TensorLayout
from gt_trace.code_text import code_problem, comment_text, is_comment_text
from gt_trace.errors import ArtifactError

_OPS = {"placeholder": "p", "call_function": "c", "get_attr": "g", "output": "o"}
_OWN_VALUES = frozenset({"val", "eager_input_vals", "seq_nr"})
"""Metadata that is another for each node; all other metadata stands in the table of values."""

_SEQUENCE_NUMBER = "seq_nr"
_STACK_TRACE = "stack_trace"


_PROVENANCE = frozenset({"from_node", "nn_module_stack", "source_fn_stack", "torch_fn"})
"""Metadata in which PyTorch's tracers note where a node is from, as objects of their own. Nothing
here reads it, and annotations and stack traces say it too."""


class Encoder:
    """Encodes the parts of one document; ``document`` puts them together with their tables.

    Args:
        axes: names of this rank's process groups.
        namespaces: of operators that graphs may call.
    """

    def __init__(self, axes: MeshAxes, *, namespaces: Collection[str] = NAMESPACES) -> None:
        self._axes = axes
        self._namespaces = namespaces
        self._operators: dict[str, int] = {}
        self._operator_of: dict[object, int] = {}
        self._values: dict[str, int] = {}
        self._known: dict[int, tuple[Any, int]] = {}
        """Positions of values by identity, which keeps the objects alive."""

        self._storages: dict[int, tuple[int, Any]] = {}
        self._sizes: dict[Any, Any] = {}
        self._shape_env: Any = None
        self._first_number: int | None = None
        """Autograd's sequence number from which those of the document are counted."""

        self.blobs: dict[str, bytes] = {}
        """Constant tensors' bytes, by the names that the document refers to."""

    def document(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """A document of ``content``, which this encoder has made, with the tables it refers to."""
        # Facts of sizes last: their expressions use no table.
        facts = None if self._shape_env is None else encoded_facts(self._shape_env)
        return {
            "content": dict(content),
            "operators": list(self._operators),
            "values": [json.loads(text) for text in self._values],
            "storages": [nbytes for _, nbytes in self._storages.values()],
            "sizes": facts,
        }

    # ---- graphs ---------------------------------------------------------------------------------

    def graph(self, graph_module: GraphModule) -> dict[str, Any]:
        """A graph with its nodes, and the subgraphs and constant tensors that it reads.

        Raises:
            ArtifactError: it holds something that no document can hold; the first is named.
        """
        positions: dict[Node, int] = {}
        nodes = []
        attributes: dict[str, Any] = {}
        for node in graph_module.graph.nodes:
            try:
                nodes.append(self._node(node, positions))
                if node.op == "get_attr" and node.target not in attributes:
                    attributes[node.target] = self._attribute(graph_module, str(node.target))
            except ArtifactError as error:
                raise ArtifactError(f"node {node.name}: {error}") from error
            positions[node] = len(positions)
        return {"name": type(graph_module).__name__, "nodes": nodes, "attributes": attributes}

    def _node(self, node: Node, positions: Mapping[Node, int]) -> list[Any]:
        if node.op not in _OPS:
            raise ArtifactError(f"a stored graph has no {node.op} nodes")
        if problem := code_problem(node):
            raise ArtifactError(problem)
        target: Any = node.target
        if node.op == "call_function":
            target = self._operator(target)
        group_names = _group_arguments(node)
        args = [
            self._group(arg) if index in group_names else self._argument(arg, positions)
            for index, arg in enumerate(node.args)
        ]
        kwargs = [  # pairs: each object of a document is looked at for keys that it has twice
            [name, self._group(arg) if name in group_names else self._argument(arg, positions)]
            for name, arg in node.kwargs.items()
        ]
        meta = [
            [key, self._own(key, value) if key in _OWN_VALUES else self._metadata(key, value)]
            for key, value in node.meta.items()
            if key not in _PROVENANCE
        ]
        return [_OPS[node.op], node.name, target, args, kwargs, meta]

    def _metadata(self, key: str, value: Any) -> int:
        if key == _STACK_TRACE and isinstance(value, str) and not is_comment_text(value):
            value = comment_text(value)
        if id(value) not in self._known:
            check_metadata(value)
        return self.shared(value)

    def _own(self, key: str, value: Any) -> Any:
        """Metadata of one node; sequence numbers count from the first that stands in the document.

        Autograd's own say, besides, what the process did before: where a plan is searched for, it
        is more than elsewhere.
        """
        if key != _SEQUENCE_NUMBER or type(value) is not int:
            return self.value(value)
        if self._first_number is None:
            self._first_number = value
        return value - self._first_number

    def _operator(self, target: object) -> int:
        known = self._operator_of.get(target)
        if known is None:
            name = operator_name(target, self._namespaces)
            known = self._operators.setdefault(name, len(self._operators))
            self._operator_of[target] = known
        return known

    def _group(self, value: Any) -> Any:
        name = value if isinstance(value, str) else getattr(value, "group_name", None)
        if not isinstance(name, str):
            raise ArtifactError(f"{value!r} stands where the name of a process group should")
        return ["g", self._axes.label_of_group(name)]

    def _argument(self, value: Any, positions: Mapping[Node, int]) -> Any:
        kind = type(value)
        if kind is Node:
            return ["n", positions[value]]
        if kind is int or kind is bool or kind is str or value is None:
            return value
        if isinstance(value, list):
            return ["l", *(self._argument(each, positions) for each in value)]
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return ["t", *(self._argument(each, positions) for each in value)]
        if isinstance(value, dict):
            items = ([self.value(k), self._argument(v, positions)] for k, v in value.items())
            return ["d", *items]
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return ["sl", *(self._argument(each, positions) for each in parts)]
        return self.value(value)

    def _attribute(self, graph_module: GraphModule, target: str) -> Any:
        held: Any = graph_module
        for name in target.split("."):
            held = getattr(held, name)
        if isinstance(held, GraphModule):
            return ["graph", self.graph(held)]
        if type(held) in (torch.Tensor, torch.nn.Parameter) and held.layout is torch.strided:
            return self._constant(held.detach())
        raise ArtifactError(
            f"the attribute {target} is a {type(held).__name__}; a stored graph reads plain "
            "tensors and graphs"
        )

    def _constant(self, tensor: torch.Tensor) -> Any:
        name = f"constant-{len(self.blobs)}"
        dense = tensor.cpu().contiguous()
        self.blobs[name] = dense.reshape(-1).view(torch.uint8).numpy().tobytes()
        facts = [self.value(each) for each in (tensor.dtype, tensor.device, tuple(tensor.shape))]
        # So that documents of ranks with other constants differ.
        return ["constant", name, hashlib.sha256(self.blobs[name]).hexdigest(), *facts]

    # ---- values ---------------------------------------------------------------------------------

    def shared(self, value: Any) -> int:
        """The position in the table of values of something without tensors of its own."""
        known = self._known.get(id(value))
        if known is None:
            text = json.dumps(self.value(value), separators=(",", ":"), ensure_ascii=False)
            position = self._values.setdefault(text, len(self._values))
            known = self._known[id(value)] = (value, position)
        return known[1]

    def value(self, value: Any) -> Any:
        """Plain data, sizes, fake tensors, operators, and what layouts are made of.

        Raises:
            ArtifactError: it is of another type.
        """
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else ["f", repr(value)]
        encode = _BY_TYPE.get(type(value))
        if encode is not None:
            return encode(self, value)
        for kind, encode in _BY_BASE:
            if isinstance(value, kind):
                return encode(self, value)
        raise ArtifactError(f"a {type(value).__name__} cannot be stored: {str(value)[:200]}")

    def _tensor(self, tensor: Any) -> Any:
        if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            raise ArtifactError(f"a value is a {type(tensor).__name__} and no fake dense tensor")
        if tensor.fake_mode.shape_env is not None:
            self._shape_env = tensor.fake_mode.shape_env
        facts = (
            tensor.dtype,
            tensor.fake_device,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
            tensor.requires_grad,
        )
        text = json.dumps(self.value(facts), separators=(",", ":"))
        position = self._values.setdefault(text, len(self._values))
        key = storage_key(tensor)
        if key not in self._storages:
            nbytes = self.value(tensor.untyped_storage().nbytes())
            # The tensor keeps its memory alive, and so its key is no other's.
            self._known[id(tensor)] = (tensor, -1)
            self._storages[key] = (len(self._storages), nbytes)
        # Of a piece of a tensor the place in memory may differ between ranks, and nothing else.
        offset = self.value(tensor.storage_offset())
        return ["T", position, self._storages[key][0], offset]

    def _size(self, size: Any) -> Any:
        expression = size.node.expr
        known = self._sizes.get(expression)
        if known is None:
            kind = {torch.SymInt: "s", torch.SymBool: "sb", torch.SymFloat: "sf"}[type(size)]
            known = self._sizes[expression] = [kind, encoded_expression(expression)]
        return known

    def _device(self, device: torch.device) -> Any:
        index: int | None = device.index
        if index is not None and device.type not in ("cpu", "meta"):
            if index != self._axes.device_index:
                raise ArtifactError(f"{device} is not this rank's device")
            return ["own", device.type]
        return ["dev", device.type, index]

    # ---- what a capture says besides its graph --------------------------------------------------

    def layout(self, layout: TensorLayout | None) -> Any:
        """How a tensor is made of plain ones.

        Raises:
            ArtifactError: a subclass other than DTensor.
        """
        if layout is None or layout.subclass is None:
            return None if layout is None else "plain"
        if layout.subclass is not DTensor:
            raise ArtifactError(f"a {layout.subclass.__name__} cannot be stored, only a DTensor")
        return {
            "subclass": "DTensor",
            "attributes": [[name, self.layout(inner)] for name, inner in layout.attributes],
            "constants": [[name, self.value(each)] for name, each in layout.constants],
            "context": self.value(layout.context),
            "size": list(layout.outer_size),
            "stride": list(layout.outer_stride),
            "leaves": layout.num_leaves,
        }

    def tree(self, spec: pytree.TreeSpec) -> Any:
        """The structure of arguments or results.

        Raises:
            ArtifactError: it has containers other than tuples, lists, dictionaries and masks of
                FlexAttention.
        """
        if spec.is_leaf():
            return "*"
        children = [self.tree(child) for child in spec.children()]
        if spec.type in (tuple, list):
            return [spec.type.__name__, children]
        if spec.type in (dict, OrderedDict):
            return [spec.type.__name__, children, [self.value(key) for key in spec.context]]
        attributes = mask_attributes(spec)
        if attributes is None:
            raise ArtifactError(f"arguments in a {spec.type.__name__} cannot be stored")
        return ["BlockMask", children, [[n, self._of_mask(each)] for n, each in attributes]]

    def _of_mask(self, value: Any) -> Any:
        code = stored_code(value)
        return self.value(value) if code is None else ["code", code.digest, code.name]

    def signature(self, signature: ArgumentSignature) -> Any:
        """What a call must pass for one leaf of its arguments."""
        return {
            "name": signature.name,
            "is_tensor": signature.is_tensor,
            "constant": self.value(signature.constant),
            "shape": list(signature.shape),
            "dtype": self.value(signature.dtype),
            "layout": self.layout(signature.layout),
            "requires_grad": signature.requires_grad,
            "same_as": signature.same_as,
            "attributes": [[name, self.value(value)] for name, value in signature.attributes],
        }

    def graph_input(self, graph_input: GraphInput) -> Any:
        """What one placeholder stands for."""
        return asdict(graph_input)

    def state_entry(self, entry: StateEntry) -> Any:
        """One tensor of the state, with every name that leads to it."""
        return asdict(entry)

    def mode(self, mode: CapturedMode) -> Any:
        """The modes in which a step was captured."""
        return {
            "training": dict(mode.training),
            "num_hooks": dict(mode.num_hooks),
            "trainable": sorted(mode.trainable, key=_by_numbers),
            "autocast": {device: self.value(dtype) for device, dtype in mode.autocast.items()},
            "autocast_cache": mode.autocast_cache,
            "settings": dict(mode.settings),
            "autograd": mode.autograd,
            "values": _values(mode),
        }


def _values(mode: CapturedMode) -> dict[str, Any] | None:
    held = mode.values.stored() if isinstance(mode.values, ReadValues) else mode.values
    return None if held is None else asdict(held)


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """A name as what it is sorted by: a tenth layer stands behind the ninth."""
    return [(int(each), "") if each.isdigit() else (-1, each) for each in name.split(".")]


def _group_arguments(node: Node) -> frozenset[int | str]:
    """Positions and names of the arguments that are process groups."""
    target = node.target
    if not isinstance(target, OpOverload):
        return frozenset()
    return _groups_of(target)


_known_groups: dict[OpOverload, frozenset[int | str]] = {}


def _groups_of(target: OpOverload) -> frozenset[int | str]:
    known = _known_groups.get(target)
    if known is None:
        arguments = target._schema.arguments
        known = _known_groups[target] = frozenset(
            each
            for index, argument in enumerate(arguments)
            if argument.name in ("group_name", "group")
            for each in (index, argument.name)
        )
    return known


def _sequence(tag: str) -> Callable[[Encoder, Any], Any]:
    return lambda encoder, value: [tag, *(encoder.value(each) for each in value)]


def _mapping(tag: str) -> Callable[[Encoder, Any], Any]:
    return lambda encoder, value: [
        tag,
        *([encoder.value(key), encoder.value(each)] for key, each in value.items()),
    ]


def _text_of(tag: str) -> Callable[[Encoder, Any], Any]:
    """As ``torch.float32`` is the dtype ``float32``."""
    return lambda _, value: [tag, str(value).removeprefix("torch.")]


_BY_TYPE: dict[type, Callable[[Encoder, Any], Any]] = {
    tuple: _sequence("t"),
    list: _sequence("l"),
    torch.Size: _sequence("z"),
    torch.dtype: _text_of("dt"),
    torch.layout: _text_of("lay"),
    torch.memory_format: _text_of("mf"),
    torch.device: Encoder._device,
    torch.SymInt: Encoder._size,
    torch.SymBool: Encoder._size,
    torch.SymFloat: Encoder._size,
    dict: _mapping("d"),
    immutable_list: _sequence("il"),
    immutable_dict: _mapping("id"),
    TensorMetadata: _sequence("tm"),
    complex: lambda _, value: ["c", repr(value.real), repr(value.imag)],
    frozenset: lambda encoder, value: ["fs", *sorted(map(encoder.value, value))],
}
_BY_BASE: tuple[tuple[type, Callable[[Encoder, Any], Any]], ...] = (
    (torch.Tensor, Encoder._tensor),
    (OpOverload, lambda encoder, value: ["op", encoder._operator(value)]),
    (HigherOrderOperator, lambda encoder, value: ["op", encoder._operator(value)]),
    (DeviceMesh, lambda encoder, value: ["mesh", encoder._axes.label_of_mesh(value)]),
    (object, lambda encoder, value: encoded_record(encoder.value, value)),
)
