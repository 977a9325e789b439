"""Cutting what a forward takes into chunks, and making what it returned whole again.

Which dimension of which argument is the batch and which the sequence is data, an ``InputLayout``:
a model whose forwards are laid out differently is another layout, and no other code. A tensor of
which nothing certain is known is an error, never a guess. Cut and join are autograd functions of
their own, so that their backwards are one concatenation and one cut, annotated as what they are.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from gt_config.node_keys import ChunkAnnotation
from gt_passes._torch_internals import pytree
from gt_passes.errors import ForwardChunkingError
from gt_trace.annotate import annotate

__all__ = ["Call", "ChunkDim", "ForwardChunks", "InputLayout", "Slicer", "TokenDims"]

ChunkDim = Literal["batch", "seq"]

Slicer = Callable[[Any, int, int], Any]
"""(value, start, length) -> the part of a value that is no tensor, along the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDims:
    """Where the samples and the tokens stand in one argument's tensors."""

    batch: int | None = None
    """Tensor dimension of the samples; None: every chunk of samples takes the tensor whole."""

    seq: int | None = None
    """Tensor dimension of the tokens of a sample; None: likewise."""

    def of(self, chunk_dim: ChunkDim) -> int | None:
        """The tensor dimension that is cut."""
        return self.batch if chunk_dim == "batch" else self.seq


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLayout:
    """How the inputs of a chunked forward are laid out, by argument.

    Where a layout is given, each tensor must have a rule in it. Without one, the first tensor is
    the activation, (batch, sequence, ...), and of the others those are cut whose extent in the
    same dimension, and in no other, is the activation's.
    """

    activation: str
    """Name of the argument that says how many samples or tokens there are. Outputs are laid out
    as it is."""

    arguments: Mapping[str, TokenDims]
    """Rules by argument name; a rule holds for all tensors in lists, tuples and dicts."""

    slicers: Mapping[type, Slicer] = field(default_factory=lambda: MappingProxyType({}))
    """How to cut values along the batch that are no tensors, by type (masks of attention)."""


_DEFAULT_DIMS = TokenDims(batch=0, seq=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Arguments of one call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaf:
    """A value somewhere in the arguments."""

    argument: str
    """Name of the argument that holds it."""

    path: str
    """How to write where it stands."""

    value: Any


class ForwardChunks:
    """Cuts the calls of one module's forward and joins what they return.

    Args:
        region_root: fully qualified name of the module.
        signature: of its forward, without ``self``.
        layout: of its inputs; None for the default.
        chunk_dim: what is cut.
        num_chunks: into how many equal parts.

    Raises:
        ForwardChunkingError: the layout names arguments that the forward does not have.
    """

    def __init__(
        self,
        *,
        region_root: str,
        signature: inspect.Signature,
        layout: InputLayout | None,
        chunk_dim: ChunkDim,
        num_chunks: int,
    ) -> None:
        self._root = region_root
        self._signature = signature
        self._layout = layout
        self._dim = chunk_dim
        self._num_chunks = num_chunks
        self._refuse_drift()

    def split(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Call, ...]:
        """The arguments of each chunk's call.

        Raises:
            ForwardChunkingError: an argument cannot be cut; every reason is listed, and what was
                seen.
        """
        leaves, spec = self._flatten(args, kwargs)
        plan = self._plan(leaves)
        parts = [
            self._split_leaf(leaf.value, dim, plan.length)
            for leaf, dim in zip(leaves, plan.dims, strict=True)
        ]
        calls = []
        for chunk in range(self._num_chunks):
            chunk_args, chunk_kwargs = pytree.tree_unflatten([part[chunk] for part in parts], spec)
            calls.append(Call(args=tuple(chunk_args), kwargs=chunk_kwargs))
        return tuple(calls)

    def join(self, calls: Sequence[Call], outputs: Sequence[Any]) -> Any:
        """One output of the chunks' outputs: tensors concatenated, everything else the same.

        Args:
            calls: what ``split`` gave.
            outputs: of each chunk, in order.

        Raises:
            ForwardChunkingError: an output has no chunk dimension, or the chunks' outputs differ.
        """
        flat = [pytree.tree_flatten(output) for output in outputs]
        specs = [spec for _, spec in flat]
        if any(spec != specs[0] for spec in specs):
            raise self._error(
                [f"the chunks returned different structures: {', '.join(map(str, specs))}"], ()
            )
        activation, dims = self._activation(self._flatten(calls[0].args, calls[0].kwargs)[0])
        problems: list[str] = []
        for number, values in enumerate(zip(*(leaves for leaves, _ in flat), strict=True)):
            problems.extend(self._output_problems(number, values, activation, dims))
        if problems:
            raise self._error(problems, ())
        dim = dims.of(self._dim)
        assert dim is not None
        joined = [
            _join_tensors(values, dim, self._boundary("materialization", "forward"))
            if isinstance(values[0], torch.Tensor)
            else values[0]
            for values in zip(*(leaves for leaves, _ in flat), strict=True)
        ]
        return pytree.tree_unflatten(joined, specs[0])

    # ---- inputs --------------------------------------------------------------------------------

    def _refuse_drift(self) -> None:
        if self._layout is None:
            return
        names = list(self._signature.parameters)
        stated = [self._layout.activation, *self._layout.arguments]
        missing = [name for name in dict.fromkeys(stated) if name not in names]
        problems = [
            f"the input layout has a rule for {name!r}, and the forward has no such argument"
            for name in missing
        ]
        if not missing and self._layout.activation not in self._layout.arguments:
            problems = [f"the input layout has no rule for its activation {stated[0]!r}"]
        if problems:
            raise self._error(problems, ())

    def _flatten(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[_Leaf], pytree.TreeSpec]:
        slicers = tuple(self._layout.slicers) if self._layout is not None else ()
        with_path, spec = pytree.tree_flatten_with_path(
            (list(args), dict(kwargs)), is_leaf=lambda value: isinstance(value, slicers)
        )
        names = self._positional_names(len(args))
        leaves = []
        for path, value in with_path:
            where, position = path[:2]
            if where == pytree.SequenceKey(0):
                assert isinstance(position, pytree.SequenceKey)
                name = names[position.idx]
            else:
                assert isinstance(position, pytree.MappingKey)
                name = str(position.key)
            leaves.append(
                _Leaf(argument=name, path=f"{name}{pytree.keystr(path[2:])}", value=value)
            )
        return leaves, spec

    def _positional_names(self, count: int) -> list[str]:
        kinds = inspect.Parameter
        names: list[str] = []
        for parameter in self._signature.parameters.values():
            if parameter.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD):
                names.append(parameter.name)
            elif parameter.kind is kinds.VAR_POSITIONAL:
                names.extend([parameter.name] * (count - len(names)))
        if count > len(names):
            raise self._error(
                [f"{count} positional arguments were given, and the forward takes {len(names)}"], ()
            )
        return names[:count]

    def _activation(self, leaves: Sequence[_Leaf]) -> tuple[torch.Tensor, TokenDims]:
        if self._layout is None:
            tensors = (leaf.value for leaf in leaves if isinstance(leaf.value, torch.Tensor))
            found, dims = next(tensors, None), _DEFAULT_DIMS
        else:
            name = self._layout.activation
            values = [leaf.value for leaf in leaves if leaf.argument == name]
            dims = self._layout.arguments[name]
            found = values[0] if len(values) == 1 and isinstance(values[0], torch.Tensor) else None
            if found is None:
                raise self._error(
                    [f"the activation {name!r} is no tensor, or was not given"], leaves
                )
        if found is None:
            raise self._error(["no tensor was given, so there is nothing to cut"], leaves)
        dim = dims.of(self._dim)
        if dim is None or dim >= found.ndim:
            raise self._error([f"the activation has no {self._dim} dimension"], leaves)
        return found, dims

    def _plan(self, leaves: Sequence[_Leaf]) -> _Plan:
        activation, dims = self._activation(leaves)
        dim = dims.of(self._dim)
        assert dim is not None
        extent = _local_shape(activation)[dim]
        problems: list[str] = []
        if extent % self._num_chunks or extent < self._num_chunks:
            problems.append(
                f"the activation's {self._dim} extent on this rank is {extent}, which does not "
                f"divide into {self._num_chunks} equal chunks"
            )
        planned: list[int | None] = []
        for leaf in leaves:
            if leaf.value is activation:
                planned.append(dim)
                problems.extend(self._placement_problems(leaf, dim))
                continue
            found = self._dim_of(leaf, dim, extent)
            if isinstance(found, str):
                problems.append(found)
                found = None
            elif found is not None:
                problems.extend(self._placement_problems(leaf, found))
            planned.append(found)
        if problems:
            raise self._error(problems, leaves)
        return _Plan(dims=tuple(planned), length=extent // self._num_chunks)

    def _dim_of(self, leaf: _Leaf, default_dim: int, extent: int) -> int | str | None:
        """The dimension to cut, None for none, or what is wrong."""
        layout = self._layout
        if layout is not None and type(leaf.value) in layout.slicers:
            if self._dim == "batch":
                return 0
            return f"{leaf.path} is a {type(leaf.value).__name__}, which is cut along batch only"
        if not isinstance(leaf.value, torch.Tensor):
            if leaf.value is None or isinstance(leaf.value, (bool, int, float, str)):
                return None
            return (
                f"{leaf.path} is a {type(leaf.value).__name__}, and nothing says how to cut one; "
                "give the input layout a slicer for the type"
            )
        shape = _local_shape(leaf.value)
        if layout is None:
            matching = [dim for dim, size in enumerate(shape) if size == extent]
            if not matching:
                return None
            if matching == [default_dim]:
                return default_dim
            return (
                f"{leaf.path} has the extent {extent} in dim {_words(matching)}, so it is not "
                f"certain which is the {self._dim}; give an input layout with a rule for "
                f"{leaf.argument!r}"
            )
        rule = layout.arguments.get(leaf.argument)
        if rule is None:
            return (
                f"{leaf.path} is a tensor, and the input layout has no rule for {leaf.argument!r}"
            )
        dim = rule.of(self._dim)
        if dim is None:
            return None
        if dim >= len(shape) or shape[dim] != extent:
            return (
                f"{leaf.path} should have the activation's {self._dim} extent {extent} in dim {dim}"
            )
        return dim

    def _placement_problems(self, leaf: _Leaf, dim: int) -> Iterator[str]:
        value = leaf.value
        if not isinstance(value, DTensor):
            return
        strange = [p for p in value.placements if not isinstance(p, Shard | Replicate)]
        if strange:
            yield (
                f"{leaf.path} is a DTensor placed as {strange[0]!r}; "
                "only shards and replicas are cut"
            )
        ranks = 1
        for axis, placement in enumerate(value.placements):
            if isinstance(placement, Shard) and placement.dim == dim:
                ranks *= value.device_mesh.size(axis)
        if value.shape[dim] % (ranks * self._num_chunks):
            yield (
                f"{leaf.path} has the extent {value.shape[dim]} in dim {dim}, which does not "
                f"divide into {self._num_chunks} equal chunks on each of {ranks} ranks"
            )

    def _split_leaf(self, value: Any, dim: int | None, length: int) -> Sequence[Any]:
        if dim is None:
            return [value] * self._num_chunks
        boundary = self._boundary("split_boundary", "forward")
        if isinstance(value, torch.Tensor):
            return _split_tensor(value, dim, self._num_chunks, boundary)
        assert self._layout is not None
        slicer = self._layout.slicers[type(value)]
        with annotate(boundary):
            return [slicer(value, chunk * length, length) for chunk in range(self._num_chunks)]

    # ---- outputs -------------------------------------------------------------------------------

    def _output_problems(
        self, number: int, values: Sequence[Any], activation: torch.Tensor, dims: TokenDims
    ) -> Iterator[str]:
        first = values[0]
        if not isinstance(first, torch.Tensor):
            plain = first is None or isinstance(first, (bool, int, float, str))
            if not plain or any(type(v) is not type(first) or v != first for v in values):
                shown = ", ".join(repr(value) for value in values)
                yield f"output {number} is no tensor, and not the same in every chunk: {shown}"
            return
        stated = [dim for dim in (dims.batch, dims.seq) if dim is not None]
        for chunk, value in enumerate(values):
            shape = _local_shape(value)
            wanted = _local_shape(activation)
            if len(shape) <= max(stated) or any(shape[dim] != wanted[dim] for dim in stated):
                extents = " and ".join(f"{wanted[dim]} in dim {dim}" for dim in stated)
                yield (
                    f"output {number} of chunk {chunk} is {_describe(value)}, without the "
                    f"activation's extents ({extents}): values that stand for all tokens, as "
                    "auxiliary losses and routing statistics, cannot be joined from chunks"
                )
                return
            if isinstance(value, DTensor) and any(
                not isinstance(p, Shard | Replicate) for p in value.placements
            ):
                yield f"output {number} is a DTensor placed as {value.placements}"
                return

    # ---- words and annotations -----------------------------------------------------------------

    def _boundary(
        self,
        role: Literal["split_boundary", "materialization"],
        direction: Literal["forward", "backward"],
    ) -> ChunkAnnotation:
        return ChunkAnnotation(
            region_root=self._root, role=role, direction=direction, producer="eager"
        )

    def _error(self, problems: Sequence[str], leaves: Sequence[_Leaf]) -> ForwardChunkingError:
        seen = ", ".join(f"{leaf.path}: {_describe(leaf.value)}" for leaf in leaves)
        return ForwardChunkingError(
            region_root=self._root,
            what=f"{self._num_chunks} chunks along {self._dim}",
            problems=problems,
            signature=str(self._signature),
            seen=seen,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What becomes of each leaf of the inputs."""

    dims: tuple[int | None, ...]
    """The dimension in which it is cut; None: each chunk takes it whole."""

    length: int
    """Extent of one chunk on this rank."""


def _local_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Of what this rank holds: chunks are cut from that, so that nothing is communicated."""
    return tuple(tensor.to_local().shape if isinstance(tensor, DTensor) else tensor.shape)


def _words(dims: Sequence[int]) -> str:
    return " and ".join(map(str, dims))


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        placed = f" placed as {tuple(value.placements)}" if isinstance(value, DTensor) else ""
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{placed}"
    return type(value).__name__


# ---- tensors -----------------------------------------------------------------------------------


def _split_tensor(
    whole: torch.Tensor, dim: int, num_chunks: int, boundary: ChunkAnnotation
) -> Sequence[torch.Tensor]:
    if not isinstance(whole, DTensor):
        chunks: tuple[torch.Tensor, ...] = _Split.apply(whole, dim, num_chunks, boundary)
        return chunks
    with annotate(boundary):
        locals_ = _Split.apply(whole.to_local(), dim, num_chunks, boundary)
        shape = list(whole.shape)
        shape[dim] //= num_chunks
        stride = _contiguous_stride(shape)
        return [
            DTensor.from_local(
                local,
                whole.device_mesh,
                whole.placements,
                run_check=False,
                shape=torch.Size(shape),
                stride=stride,
            )
            for local in locals_
        ]


def _join_tensors(
    chunks: Sequence[torch.Tensor], dim: int, boundary: ChunkAnnotation
) -> torch.Tensor:
    first = chunks[0]
    if not isinstance(first, DTensor):
        whole: torch.Tensor = _Join.apply(dim, boundary, *chunks)
        return whole
    with annotate(boundary):
        locals_ = [chunk.to_local() for chunk in chunks if isinstance(chunk, DTensor)]
        local = _Join.apply(dim, boundary, *locals_)
        shape = list(first.shape)
        shape[dim] *= len(chunks)
        return DTensor.from_local(
            local,
            first.device_mesh,
            first.placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=_contiguous_stride(shape),
        )


def _cut(whole: torch.Tensor, dim: int, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Parts that are as contiguous as the whole: forwards may take views that need it."""
    starts = itertools.accumulate(sizes, initial=0)
    parts = [whole.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False)]
    return tuple(part.contiguous() if whole.is_contiguous() else part for part in parts)


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    strides = itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1)
    return tuple(reversed(list(strides)))


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, whole: torch.Tensor, dim: int, num_chunks: int, boundary: ChunkAnnotation
    ) -> tuple[torch.Tensor, ...]:
        ctx.dim = dim
        length = whole.shape[dim] // num_chunks
        with annotate(boundary):
            return _cut(whole, dim, [length] * num_chunks)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return torch.cat(gradients, ctx.dim), None, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dim: int, boundary: ChunkAnnotation, *chunks: torch.Tensor
    ) -> torch.Tensor:
        ctx.dim = dim
        ctx.sizes = [chunk.shape[dim] for chunk in chunks]
        with annotate(boundary):
            return torch.cat(chunks, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *_cut(gradient, ctx.dim, ctx.sizes))
