"""Graphs and what belongs to them from JSON: the inverse of ``encoder``.

Whatever a document says is looked up in lists of what there may be, and what it refers to must
stand before it. Nothing that is read here runs; whether shapes are what operators give is for a
verifier to say.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.immutable_collections import immutable_dict, immutable_list

from gt_config.errors import NodeMetadataError
from gt_config.node_keys import ANNOTATION_TYPES
from gt_trace._torch_internals import (
    DTensor,
    FakeTensorMode,
    OpOverload,
    TensorMetadata,
    add_node,
    fake_over_meta,
    lazy_graph_module,
    pytree,
    set_conj,
    set_neg,
)
from gt_trace.artifacts.coordinate_rules import decoded_rule
from gt_trace.artifacts.expressions import SizeReader
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.artifacts.metadata_texts import check_metadata, check_metadata_key
from gt_trace.artifacts.operators import NAMESPACES, SIZE_FUNCTIONS, find_operator
from gt_trace.artifacts.records import decoded_record
from gt_trace.artifacts.size_arithmetic import MAX_INTEGER, SizeArithmetic
from gt_trace.artifacts.size_facts import restored_facts
from gt_trace.capture.block_masks import StoredCode, mask_structure
from gt_trace.capture.captured_mode import CapturedMode
from gt_trace.capture.graph_inputs import ArgumentSignature, GraphInput
from gt_trace.capture.input_uses import InputUse
from gt_trace.capture.kernel_strides import new_fake_mode
from gt_trace.capture.module_state import StateEntry
from gt_trace.capture.read_values import StoredValues
from gt_trace.capture.subclass_layout import PLAIN, TensorLayout
from gt_trace.code_text import code_problem, is_code_name, shadowed_parameter
from gt_trace.errors import ArtifactError

_OPS = {"p": "placeholder", "c": "call_function", "g": "get_attr", "o": "output"}
_LEAF = pytree.tree_structure(0)
_CONTAINERS = {"tuple": tuple, "list": list, "dict": dict, "OrderedDict": OrderedDict}


class Decoder:
    """Decodes the parts of one document.

    Args:
        document: as ``Encoder.document`` made it, through JSON.
        axes: of this rank.
        blob: gives the bytes of a constant tensor by its name.
        fake_mode: of all fake values, with a shape environment; None: a new one.
        namespaces: of operators that graphs may call.

    Raises:
        ArtifactError: the document is none, or names what there is not.
    """

    def __init__(
        self,
        document: Any,
        axes: MeshAxes,
        *,
        blob: Callable[[str], bytes],
        fake_mode: FakeTensorMode | None = None,
        namespaces: Collection[str] = NAMESPACES,
    ) -> None:
        self.content: Any = document["content"]
        self.fake_mode = fake_mode or new_fake_mode()
        self._axes = axes
        self._blob = blob
        self._operators = [find_operator(name, namespaces) for name in document["operators"]]
        self._encoded: list[Any] = document["values"]
        self._decoded: dict[int, Any] = {}
        self._nbytes: list[Any] = document["storages"]
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._fills: dict[int, torch.Tensor] = {}  # by storage, a tensor that is all of it
        self._filled_bytes: dict[int, int | None] = {}  # by position of what is known of tensors
        self._expressions = SizeReader()
        self._read_blobs: set[str] = set()
        self._sizes: dict[str, Any] = {}
        shape_env = self.fake_mode.shape_env
        if document["sizes"] is not None:
            if shape_env is None:
                raise ArtifactError("the fake mode has no shape environment for sizes at run time")
            self._expressions = restored_facts(document["sizes"], shape_env)

    # ---- graphs ---------------------------------------------------------------------------------

    def graph(self, encoded: Any) -> GraphModule:
        """A graph, with code that is generated when it is first asked for.

        Raises:
            ArtifactError: a node reads what does not stand before it, or is no node.
        """
        graph = Graph()
        nodes: list[Node] = []
        attributes: dict[str, Any] = {}
        for name, held in encoded["attributes"].items():
            if not is_code_name(name) or name in _OWN_ATTRIBUTES:
                raise ArtifactError(f"an attribute of a stored graph is named {name[:100]!r}")
            attributes[name] = self._attribute(held)
        arithmetic = SizeArithmetic(SIZE_FUNCTIONS)
        for item in encoded["nodes"]:
            nodes.append(self._node(graph, item, nodes))
            arithmetic.check(nodes[-1])
        for node in nodes:
            if node.op == "get_attr" and node.target not in attributes:
                raise ArtifactError(f"node {node.name} reads an attribute that is not stored")
        if not nodes or nodes[-1].op != "output":
            raise ArtifactError("a stored graph does not end with its output")
        if problem := shadowed_parameter(nodes):
            raise ArtifactError(problem)
        if not _GRAPH_NAME.fullmatch(encoded["name"]):
            raise ArtifactError(f"a stored graph is named {encoded['name'][:100]!r}")
        return lazy_graph_module(attributes, graph, encoded["name"])

    def _node(self, graph: Graph, item: Any, before: Sequence[Node]) -> Node:
        op, name, target, args, kwargs, meta = item
        if op == "c":
            target = self._operators[_index(target)]
        elif type(target) is not str or (op == "g" and "." in target):
            raise ArtifactError(f"node {name!r} has the target {str(target)[:100]!r}")
        elif kwargs or len(args) != (op == "o"):
            raise ArtifactError(f"node {name!r} has arguments that no {_OPS[op]} has")
        operands = tuple([self._argument(each, before) for each in args])
        named = {key: self._argument(each, before) for key, each in kwargs}
        if len(named) != len(kwargs) or set(map(type, named)) - {str}:
            raise ArtifactError(f"node {name!r} has keyword arguments without a name of their own")
        node = add_node(graph, _OPS[op], target, operands, named, name=name)
        if node.name != name:
            raise ArtifactError(f"two nodes are named {name!r}, or that is no name")
        if problem := code_problem(node):
            raise ArtifactError(f"node {name!r} cannot be part of a graph: {problem}")
        decoded = self._decoded
        for key, _ in meta:
            check_metadata_key(key)
        node.meta = {
            key: self.value(held)
            if key in _OWN_VALUES
            else (decoded[held] if type(held) is int and held in decoded else self.shared(held))
            for key, held in meta
        }
        return node

    def _argument(self, item: Any, before: Sequence[Node]) -> Any:
        if type(item) is not list:
            return _scalar(item) if type(item) is not str else _text_argument(item)
        tag = item[0]
        if tag == "n":
            return before[_index(item[1])]
        if tag == "l":
            return [self._argument(each, before) for each in item[1:]]
        if tag == "t":
            return tuple([self._argument(each, before) for each in item[1:]])
        if tag == "g":
            return self._axes.group(item[1])
        if tag == "d":
            return {_option(k): self._argument(_option(each), before) for k, each in item[1:]}
        if tag == "sl":
            return slice(*(self._argument(each, before) for each in item[1:]))
        value = self.value(item)
        if type(value) is int:  # a number that follows from the rank's place in the mesh
            return _scalar(value)
        if not isinstance(value, _ARGUMENT_TYPES):
            raise ArtifactError(f"an argument of a node is a {type(value).__name__}")
        return value

    def _attribute(self, held: Any) -> Any:
        tag, first, *facts = held
        if tag == "graph":
            return self.graph(first)
        if tag != "constant":
            raise ArtifactError(f"an attribute of a graph is a {tag!r}")
        digest, *described = facts
        dtype, device, shape = map(self.value, described)
        if first in self._read_blobs:
            raise ArtifactError(f"two attributes are the constant {first!r}")
        self._read_blobs.add(first)
        held_bytes = self._blob(first)
        if len(held_bytes) != math.prod(map(_index, shape)) * dtype.itemsize:
            raise ArtifactError(f"the constant {first!r} has {len(held_bytes):,} bytes")
        if hashlib.sha256(held_bytes).hexdigest() != digest:
            raise ArtifactError(
                f"the constant {first!r} is not the one that the graph was made with"
            )
        plain = torch.frombuffer(bytearray(held_bytes), dtype=torch.uint8)
        tensor = plain.view(dtype).reshape(shape)
        return tensor.to(device)

    # ---- values ---------------------------------------------------------------------------------

    def shared(self, position: Any) -> Any:
        """What stands at that position in the table of values."""
        index = _index(position)
        if index not in self._decoded:
            self._decoded[index] = _checked(self.value(self._encoded[index]))
        return self._decoded[index]

    def value(self, item: Any) -> Any:
        """What ``Encoder.value`` encoded.

        Raises:
            ArtifactError: nothing is encoded so.
        """
        if type(item) is not list:
            return _scalar(item)
        decode = _BY_TAG.get(item[0])
        if decode is None:
            raise ArtifactError(f"a value is a {item[0]!r}, and there are none")
        return decode(self, item)

    def _tensor(self, item: Any) -> torch.Tensor:
        _, position, storage_position, place = item
        dtype, device, shape, stride, is_conj, is_neg, requires_grad = self.shared(position)
        offset = self.value(place)
        storage_position = _index(storage_position)
        if type(offset) is int and offset == 0 and self._is_filled_by(storage_position, position):
            # The first tensor of a storage mostly fills it, and brings it along.
            element = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            self._fills[storage_position] = element
        else:
            element = torch.empty((0,), dtype=dtype, device="meta")
            element.set_(self._storage(storage_position), offset, shape, stride)
        made = fake_over_meta(element, self.fake_mode, device, dispatch_keys=None)
        if is_conj:
            set_conj(made, True)
        if is_neg:
            set_neg(made, True)
        return made.requires_grad_() if requires_grad else made

    def _is_filled_by(self, storage_position: int, position: int) -> bool:
        """Whether a storage of which nothing was made is as large as a tensor that begins it."""
        if storage_position in self._fills or storage_position in self._storages:
            return False
        if position not in self._filled_bytes:
            self._filled_bytes[position] = _bytes_behind(*self.shared(position))
        nbytes = self._nbytes[storage_position]
        return type(nbytes) is int and nbytes == self._filled_bytes[position]

    def _storage(self, position: int) -> torch.UntypedStorage:
        known = self._storages.get(position)
        if known is None and position in self._fills:
            known = self._storages[position] = self._fills[position].untyped_storage()
        if known is None:
            nbytes = self.value(self._nbytes[position])
            if isinstance(nbytes, int) and nbytes < 0:
                raise ArtifactError(f"a tensor lies in {nbytes} bytes")
            if isinstance(nbytes, int):
                known = torch.UntypedStorage(nbytes, device="meta")  # type: ignore[no-untyped-call]  # torch's
            else:
                known = torch.empty((nbytes,), dtype=torch.uint8, device="meta").untyped_storage()
            self._storages[position] = known
        return known

    def _size(self, item: Any) -> Any:
        tag, encoded = item
        key = repr(item)
        known = self._sizes.get(key)
        if known is None:
            expression = self._expressions.read(encoded)
            shape_env: Any = self.fake_mode.shape_env
            make = {
                "s": shape_env.create_symintnode,
                "sf": shape_env.create_symfloatnode,
                "sb": shape_env.create_symboolnode,
            }[tag]
            known = make(expression) if tag == "sb" else make(expression, hint=None)
            self._sizes[key] = known
        return known

    def _mapping(self, item: Any) -> dict[Any, Any]:
        if len(item) > _MAX_MAPPING:
            raise ArtifactError(f"a dictionary has {len(item) - 1:,} items")
        return {self.value(key): self.value(each) for key, each in item[1:]}

    def _by_coordinate(self, item: Any) -> int:
        rule = decoded_rule(item)
        number = rule.at({axis: self._axes.coordinate(axis) for axis in rule.steps})
        return _index(number) if number >= 0 else -_index(-number)

    def _symbol(self, item: Any) -> Any:
        return self._expressions.read(str(item[1]))

    def _device(self, item: Any) -> torch.device:
        if type(item[1]) is not str or not item[1].isalnum():
            raise ArtifactError(f"{item[1]!r:.100} is no type of device")
        if item[0] == "own":
            return torch.device(item[1], self._axes.device_index)
        return torch.device(item[1]) if item[2] is None else torch.device(item[1], item[2])

    # ---- what a capture says besides its graph --------------------------------------------------

    def layout(self, item: Any) -> TensorLayout | None:
        """How a tensor is made of plain ones."""
        if item is None:
            return None
        if item == "plain":
            return PLAIN
        if item["subclass"] != "DTensor":
            raise ArtifactError(f"a tensor is a {item['subclass']!r}; stored are DTensors")
        return TensorLayout(
            subclass=DTensor,
            attributes=tuple((str(n), _present(self.layout(i))) for n, i in item["attributes"]),
            constants=tuple((str(name), self.value(each)) for name, each in item["constants"]),
            context=self.value(item["context"]),
            outer_size=tuple(item["size"]),
            outer_stride=tuple(item["stride"]),
            num_leaves=_index(item["leaves"]),
        )

    def tree(self, item: Any) -> pytree.TreeSpec:
        """The structure of arguments or results."""
        if item == "*":
            return _LEAF
        name, children, *context = item
        specs = [self.tree(child) for child in children]
        if name == "BlockMask":
            attributes = [(str(n), self._of_mask(each)) for n, each in context[0]]
            return mask_structure(attributes, specs)
        if name not in _CONTAINERS:
            raise ArtifactError(f"arguments are in a {name!r}, which is no known container")
        kind = _CONTAINERS[name]
        keys = [self.value(key) for key in context[0]] if context else None
        return pytree.TreeSpec(kind, keys, specs)

    def _of_mask(self, item: Any) -> Any:
        if type(item) is list and item[0] == "code":
            return StoredCode(digest=item[1], name=item[2])
        return self.value(item)

    def signature(self, item: Any) -> ArgumentSignature:
        """What a call must pass for one leaf of its arguments."""
        return ArgumentSignature(
            name=str(item["name"]),
            is_tensor=bool(item["is_tensor"]),
            constant=self.value(item["constant"]),
            shape=tuple(item["shape"]),
            dtype=self.value(item["dtype"]),
            layout=self.layout(item["layout"]),
            requires_grad=bool(item["requires_grad"]),
            same_as=None if item["same_as"] is None else str(item["same_as"]),
            attributes=tuple((str(name), self.value(value)) for name, value in item["attributes"]),
        )

    def graph_input(self, item: Any) -> GraphInput:
        """What one placeholder stands for."""
        return GraphInput(
            kind=item["kind"],
            name=item["name"],
            aliases=tuple(item["aliases"]),
            leaf=_index(item["leaf"]),
            uses=tuple(map(_use, item["uses"])),
        )

    def state_entry(self, item: Any) -> StateEntry:
        """One tensor of the state, with every name that leads to it."""
        return StateEntry(kind=item["kind"], names=tuple(item["names"]))

    def mode(self, item: Mapping[str, Any]) -> CapturedMode:
        """The modes in which a step was captured."""
        return CapturedMode(
            training=dict(item["training"]),
            num_hooks=dict(item["num_hooks"]),
            trainable=frozenset(item["trainable"]),
            autocast={device: self.value(dtype) for device, dtype in item["autocast"].items()},
            autocast_cache=bool(item["autocast_cache"]),
            settings={str(name): str(value) for name, value in item["settings"].items()},
            autograd=None if item["autograd"] is None else bool(item["autograd"]),
            values=None
            if item["values"] is None
            else StoredValues(
                texts={str(place): str(text) for place, text in item["values"]["texts"].items()},
                noted=_names(item["values"]["noted"]),
                of_classes=_names(item["values"]["of_classes"]),
            ),
        )


def _names(item: Mapping[str, Any]) -> dict[str, list[str]]:
    return {str(place): [*map(str, names)] for place, names in item.items()}


def _checked(value: Any) -> Any:
    """A value of metadata; annotations in it are read as those who use them will.

    Raises:
        ArtifactError: an annotation is malformed, or of another version, or as ``check_metadata``.
    """
    check_metadata(value)
    if isinstance(value, dict):
        for concept in ANNOTATION_TYPES:
            try:
                concept.from_meta(value)
            except NodeMetadataError as error:
                raise ArtifactError(f"an annotation cannot be read: {error}") from error
    return value


def _bytes_behind(
    dtype: torch.dtype, device: object, shape: Sequence[int], stride: Sequence[int], *_: object
) -> int | None:
    """Bytes from the first element of a tensor to behind its last; None if not all are known."""
    if {*map(type, shape), *map(type, stride)} - {int} or min((*shape, *stride), default=0) < 0:
        return None
    if 0 in shape:
        return 0
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return (last + 1) * dtype.itemsize


def _use(item: Any) -> InputUse:
    if item not in get_args(InputUse):
        raise ArtifactError(f"{item!r} is no use of an input")
    use: InputUse = item
    return use


def _index(item: Any) -> int:
    if type(item) is not int or not 0 <= item <= MAX_INTEGER:
        raise ArtifactError(f"{item!r:.100} is no position")
    return item


def _scalar(item: Any) -> Any:
    """A value that stands for itself; integers are of the size that operators take."""
    kind = type(item)
    if kind is int:
        sound = -MAX_INTEGER <= item <= MAX_INTEGER
    else:
        sound = item is None or kind in (str, bool) or (kind is float and math.isfinite(item))
    if not sound:
        raise ArtifactError(f"{item!r:.100} is no plain value")
    return item


def _text_argument(text: str) -> str:
    """A text that code of a compiler may have in quotes."""
    if not text.replace("\n", "").isprintable() or '"' in text or "\\" in text:
        raise ArtifactError(f"an argument of a node is the text {text[:100]!r}")
    return text


def _option(item: Any) -> Any:
    """A key or a value of a dictionary of options, which kernels are written from."""
    if type(item) is str and not is_code_name(item):
        raise ArtifactError(f"an option of a node is the text {item[:100]!r}")
    return item


def _present(layout: TensorLayout | None) -> TensorLayout:
    if layout is None:
        raise ArtifactError("an inner tensor has no layout")
    return layout


def _dtype(name: Any) -> torch.dtype:
    found = vars(torch).get(str(name))
    if not isinstance(found, torch.dtype):
        raise ArtifactError(f"{name!r} is no dtype")
    return found


def _layout_kind(name: Any) -> torch.layout:
    found = vars(torch).get(str(name))
    if not isinstance(found, torch.layout):
        raise ArtifactError(f"{name!r} is no layout of memory")
    return found


def _memory_format(name: Any) -> torch.memory_format:
    found = vars(torch).get(str(name))
    if not isinstance(found, torch.memory_format):
        raise ArtifactError(f"{name!r} is no memory format")
    return found


def _float(text: Any) -> float:
    if text not in ("inf", "-inf", "nan"):
        raise ArtifactError(f"{text!r} is no number")
    return float(text)


_OWN_VALUES = frozenset({"val", "eager_input_vals", "seq_nr"})
_OWN_ATTRIBUTES = frozenset({*dir(GraphModule), *vars(nn.Module())})
"""Names that mean something on any module of a graph."""

_GRAPH_NAME = re.compile(r"[A-Za-z0-9_.<>]{1,200}")
_MAX_MAPPING = 2**14
"""So that a dictionary of keys with equal hashes is made in seconds."""

_ARGUMENT_TYPES = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    float,
    complex,
    OpOverload,
)
"""What an argument of a node may be besides nodes, plain values and containers of them. FX pastes
the ``repr`` of an argument into code, and that of other objects may be any text."""


_BY_TAG: dict[Any, Callable[[Decoder, Any], Any]] = {
    "T": Decoder._tensor,
    "s": Decoder._size,
    "sb": Decoder._size,
    "sf": Decoder._size,
    "by": Decoder._by_coordinate,
    "symbol": Decoder._symbol,
    "dev": Decoder._device,
    "own": Decoder._device,
    "t": lambda decoder, item: tuple([decoder.value(each) for each in item[1:]]),
    "l": lambda decoder, item: [decoder.value(each) for each in item[1:]],
    "il": lambda decoder, item: immutable_list([decoder.value(each) for each in item[1:]]),
    "d": lambda decoder, item: decoder._mapping(item),
    "id": lambda decoder, item: immutable_dict(decoder._mapping(item)),
    "z": lambda decoder, item: torch.Size([decoder.value(each) for each in item[1:]]),
    "fs": lambda decoder, item: frozenset(decoder.value(each) for each in item[1:]),
    "tm": lambda decoder, item: TensorMetadata(*(decoder.value(each) for each in item[1:])),
    "f": lambda _, item: _float(item[1]),
    "c": lambda _, item: complex(float(item[1]), float(item[2])),
    "dt": lambda _, item: _dtype(item[1]),
    "lay": lambda _, item: _layout_kind(item[1]),
    "mf": lambda _, item: _memory_format(item[1]),
    "op": lambda decoder, item: decoder._operators[_index(item[1])],
    "mesh": lambda decoder, item: decoder._axes.mesh(item[1]),
    "r": lambda decoder, item: decoded_record(item[1], list(map(decoder.value, item[2:]))),
}
