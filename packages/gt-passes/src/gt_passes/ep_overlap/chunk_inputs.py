"""Cutting what a forward takes into chunks, and making what it returned whole again.

Which dimension of which argument is the batch and which the sequence is data, an ``InputLayout``.
A tensor of which nothing certain is known is an error, never a guess.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from gt_config import EpChunkDim
from gt_config.node_keys import ChunkAnnotation, ChunkRole
from gt_passes._torch_internals import DisableTorchFunction, pytree
from gt_passes.ep_overlap.chunk_tensors import join_tensors, split_tensor, wrote_to_a_part
from gt_passes.ep_overlap.input_layout import InputLayout, TokenDims
from gt_passes.errors import ForwardChunkingError
from gt_trace.annotate import annotate

_DEFAULT_DIMS = TokenDims(batch=0, seq=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaf:
    """A value somewhere in the arguments."""

    argument: str
    """Name of the argument that holds it."""

    path: str
    """How to write where it stands."""

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCall:
    """Arguments of one chunk's call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    cut: tuple[_Leaf, ...]
    """The tensors among them that are parts of an argument."""


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
        chunk_dim: EpChunkDim,
        num_chunks: int,
    ) -> None:
        self._root = region_root
        self._signature = signature
        self._layout = layout
        self._dim = chunk_dim
        self._num_chunks = num_chunks
        self._refuse_drift()

    def split(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[ChunkCall, ...]:
        """The arguments of each chunk's call.

        Raises:
            ForwardChunkingError: an argument cannot be cut; every reason is listed, and what was
                seen.
        """
        leaves, spec = self._flatten(args, kwargs)
        dims, length = self._plan(leaves)
        parts = [
            self._split_leaf(leaf.value, dim, length)
            for leaf, dim in zip(leaves, dims, strict=True)
        ]
        calls = []
        for chunk in range(self._num_chunks):
            values = [part[chunk] for part in parts]
            chunk_args, chunk_kwargs = pytree.tree_unflatten(values, spec)
            cut = tuple(
                replace(leaf, value=value)
                for leaf, value, dim in zip(leaves, values, dims, strict=True)
                if dim is not None and isinstance(value, torch.Tensor)
            )
            calls.append(ChunkCall(args=tuple(chunk_args), kwargs=chunk_kwargs, cut=cut))
        return tuple(calls)

    def run(self, forward: Callable[..., Any], call: ChunkCall) -> Any:
        """Call the forward for one chunk.

        Raises:
            ForwardChunkingError: the forward wrote to an argument of which it got a part; what it
                wrote would be lost, or seen by autograd as no write of the argument.
        """
        before = [_version(leaf.value) for leaf in call.cut]
        try:
            output = forward(*call.args, **call.kwargs)
        except RuntimeError as error:
            if not wrote_to_a_part(error):
                raise
            written = [leaf.path for leaf in call.cut if leaf.value.requires_grad]
            raise self._written(" or ".join(written)) from error
        written = [
            leaf.path
            for leaf, version in zip(call.cut, before, strict=True)
            if _version(leaf.value) != version
        ]
        if written:
            raise self._written(" and ".join(written))
        return output

    def join(self, calls: Sequence[ChunkCall], outputs: Sequence[Any]) -> Any:
        """One output of the chunks' outputs: tensors concatenated, everything else the same.

        Args:
            calls: what ``split`` gave.
            outputs: of each chunk, in order.

        Raises:
            ForwardChunkingError: an output has no chunk dimension, or the chunks' outputs differ.
        """
        flat = [pytree.tree_flatten_with_path(output) for output in outputs]
        specs = [spec for _, spec in flat]
        if any(spec != specs[0] for spec in specs):
            raise self._error(
                [f"the chunks returned different structures: {', '.join(map(str, specs))}"], ()
            )
        activation, dims = self._activation(self._flatten(calls[0].args, calls[0].kwargs)[0])
        paths = [pytree.keystr(path) for path, _ in flat[0][0]]
        values_of = list(zip(*([value for _, value in leaves] for leaves, _ in flat), strict=True))
        found = [
            self._join_dim(path, values, activation, dims)
            for path, values in zip(paths, values_of, strict=True)
        ]
        problems = [each for each in found if isinstance(each, str)]
        problems += [
            f"the input layout has a rule for output {path}, and there is none"
            for path in (self._layout.outputs if self._layout is not None else ())
            if path not in paths
        ]
        if problems:
            raise self._error(problems, ())
        boundary = self._boundary("materialization")
        joined = [
            join_tensors(values, dim, boundary) if isinstance(dim, int) else values[0]
            for values, dim in zip(values_of, found, strict=True)
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
        missing = [
            name
            for name, dim in (("batch", dims.batch), ("seq", dims.seq))
            if (dim is None and name == self._dim) or (dim is not None and dim >= found.ndim)
        ]
        if missing:
            raise self._error([f"the activation has no {missing[0]} dimension"], leaves)
        return found, dims

    def _plan(self, leaves: Sequence[_Leaf]) -> tuple[list[int | None], int]:
        """The dimension in which each leaf is cut, or None, and this rank's extent of a chunk."""
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
            found = self._dim_of(leaf, dim, _local_shape(activation))
            if isinstance(found, str):
                problems.append(found)
                found = None
            elif found is not None:
                problems.extend(self._placement_problems(leaf, found))
            planned.append(found)
        if problems:
            raise self._error(problems, leaves)
        return planned, extent // self._num_chunks

    def _dim_of(self, leaf: _Leaf, cut_dim: int, activation: tuple[int, ...]) -> int | str | None:
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
            return self._default_dim(leaf, cut_dim, activation)
        rule = layout.arguments.get(leaf.argument)
        if rule is None:
            return (
                f"{leaf.path} is a tensor, and the input layout has no rule for {leaf.argument!r}"
            )
        dim, extent = rule.of(self._dim), activation[cut_dim]
        if dim is None:
            return None
        if dim >= len(shape) or shape[dim] != extent:
            return (
                f"{leaf.path} should have the activation's {self._dim} extent {extent} in dim {dim}"
            )
        return dim

    def _default_dim(
        self, leaf: _Leaf, cut_dim: int, activation: tuple[int, ...]
    ) -> int | str | None:
        """As ``_dim_of``, of a tensor that no layout says anything of."""
        shape, extent = _local_shape(leaf.value), activation[cut_dim]
        if shape == activation and len(shape) > len(activation[:2]):
            return cut_dim
        num_tokens = activation[0] * activation[1]
        matching = [dim for dim, size in enumerate(shape) if size == extent]
        if matching == [cut_dim] and shape[:2] == activation[:2]:
            return cut_dim
        flat = [dim for dim, size in enumerate(shape) if size and not size % max(num_tokens, 1)]
        if not matching and not flat:
            return None
        dims = " and ".join(map(str, matching or flat))
        return (
            f"{leaf.path} has the extent {shape[(matching or flat)[0]]} in dim {dims}, so it is "
            f"not certain whether and where it holds the {self._dim}; give an input layout with a "
            f"rule for {leaf.argument!r}"
        )

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
        boundary = self._boundary("split_boundary")
        if isinstance(value, torch.Tensor):
            return split_tensor(value, dim, self._num_chunks, boundary)
        assert self._layout is not None
        slicer = self._layout.slicers[type(value)]
        with annotate(boundary):
            return [slicer(value, chunk * length, length) for chunk in range(self._num_chunks)]

    # ---- outputs -------------------------------------------------------------------------------

    def _join_dim(
        self, path: str, values: Sequence[Any], activation: torch.Tensor, dims: TokenDims
    ) -> int | str | None:
        """The dimension to concatenate in, None for no tensor, or what is wrong."""
        name, first = f"output {path}".rstrip(), values[0]
        if not isinstance(first, torch.Tensor):
            plain = first is None or isinstance(first, (bool, int, float, str))
            if plain and all(type(v) is type(first) and v == first for v in values):
                return None
            shown = ", ".join(repr(value) for value in values)
            return f"{name} is no tensor, and not the same in every chunk: {shown}"
        if isinstance(first, DTensor) and any(
            not isinstance(p, Shard | Replicate) for p in first.placements
        ):
            return f"{name} is a DTensor placed as {first.placements}"
        rule = self._layout.outputs.get(path) if self._layout is not None else None
        dim = dims.of(self._dim) if rule is None else rule.of(self._dim)
        if dim is None:
            return f"{name} has no {self._dim} dimension by the input layout, so it has no join"
        wanted = _local_shape(activation)
        extent = wanted[dims.of(self._dim) or 0]
        for chunk, value in enumerate(values):
            shape = _local_shape(value)
            if rule is not None and (dim >= len(shape) or shape[dim] != extent):
                return (
                    f"{name} of chunk {chunk} is {_describe(value)}, and should have the "
                    f"activation's {self._dim} extent {extent} in dim {dim}"
                )
            if rule is None and not _is_laid_out_as(shape, wanted, dims):
                return (
                    f"{name} of chunk {chunk} is {_describe(value)}, which is not laid out as the "
                    f"activation, {_describe(activation)}: values that stand for all tokens, as "
                    "auxiliary losses and routing statistics, cannot be joined from chunks; for "
                    f"others give an input layout with a rule for {path!r} in outputs"
                )
        return dim

    # ---- words and annotations -----------------------------------------------------------------

    def _boundary(self, role: ChunkRole) -> ChunkAnnotation:
        return ChunkAnnotation(
            region_root=self._root, role=role, direction="forward", producer="eager"
        )

    def _written(self, names: str) -> ForwardChunkingError:
        problem = (
            f"the forward writes to {names}, of which each chunk has a part of its own; return "
            "what is written instead"
        )
        return self._error([problem], ())

    def _error(self, problems: Sequence[str], leaves: Sequence[_Leaf]) -> ForwardChunkingError:
        seen = ", ".join(f"{leaf.path}: {_describe(leaf.value)}" for leaf in leaves)
        return ForwardChunkingError(
            region_root=self._root,
            what=f"{self._num_chunks} chunks along {self._dim}",
            problems=problems,
            signature=str(self._signature),
            seen=seen,
        )


def _local_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of what this rank holds: chunks are cut from it, so nothing is communicated."""
    return tuple(tensor.to_local().shape if isinstance(tensor, DTensor) else tensor.shape)


def _is_laid_out_as(shape: Sequence[int], wanted: Sequence[int], dims: TokenDims) -> bool:
    """Whether an output can only be rows of the activation's samples and tokens.

    Two extents that agree say it. One may agree by chance; then the others must as well, besides
    the last, of features.
    """
    stated = [dim for dim in (dims.batch, dims.seq) if dim is not None]
    if len(stated) == 2:
        return len(shape) > max(stated) and all(shape[dim] == wanted[dim] for dim in stated)
    compared = {*stated, *range(len(wanted) - 1)}
    return len(shape) == len(wanted) > 1 and all(shape[dim] == wanted[dim] for dim in compared)


def _version(tensor: torch.Tensor) -> int:
    """How often it was written to; tensors of inference mode do not count."""
    with DisableTorchFunction():
        return 0 if tensor.is_inference() else tensor._version


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        placed = f" placed as {tuple(value.placements)}" if isinstance(value, DTensor) else ""
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{placed}"
    return type(value).__name__
