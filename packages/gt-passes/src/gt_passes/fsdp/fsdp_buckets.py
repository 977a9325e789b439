"""Which FSDP collectives go into one bucket, and the nodes that a bucket is made of.

PyTorch's Inductor has bucketing of its own (``torch/_inductor/fx_passes/bucketing.py``). It finds
collectives by their pattern and groups them by size; here the annotation says which parameter a
collective belongs to, and the transformer block decides. See docs/decisions/0005-fsdp-bucketing.md.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from gt_config.node_keys import FsdpCollectiveAnnotation
from gt_passes._torch_internals import (
    FakeTensorMode,
    OpOverload,
    quiet_fake_execution,
    value_of,
)
from gt_passes.analysis.bucket_copies import PACK_BUCKET, UNPACK_BUCKET
from gt_passes.analysis.code_motion import CodeMotion
from gt_passes.analysis.fsdp_collective import fsdp_collective
from gt_passes.analysis.node_calls import evaluate
from gt_passes.analysis.operator_effects import is_only_a_view
from gt_passes.fsdp.fsdp_launches import FsdpLaunch
from gt_trace.node_metadata import write_annotation

_MIB = 2**20


def plan_buckets(
    launches: Iterable[FsdpLaunch], *, cap_mib: int | None, motion: CodeMotion
) -> list[tuple[FsdpLaunch, ...]]:
    """Group collectives that one can stand for, in execution order of their first members.

    Members of a bucket belong to one block and one direction, have the same operator, reduction,
    group, dtype and device, and no barrier between them. A member that would take a bucket past
    the cap begins another; one that is larger than the cap stays alone.

    Args:
        launches: in execution order.
        cap_mib: most bytes of whole parameters in a bucket, in MiB; None for no limit.
        motion: of their graph.

    Returns:
        Buckets of two members or more.
    """
    buckets: list[list[FsdpLaunch]] = []
    open_bucket: dict[Hashable, list[FsdpLaunch]] = {}
    num_bytes: dict[Hashable, int] = {}
    cap = None if cap_mib is None else cap_mib * _MIB
    for launch in launches:
        value = launch.input_value
        key = (
            launch.block,
            launch.direction,
            launch.launch.target,
            launch.options,
            value.dtype,
            value.device,
            motion.section(launch.launch),
        )
        bucket = open_bucket.get(key)
        if bucket is None or (cap is not None and num_bytes[key] + launch.num_bytes > cap):
            bucket = open_bucket[key] = []
            buckets.append(bucket)
            num_bytes[key] = 0
        bucket.append(launch)
        num_bytes[key] += launch.num_bytes
    return [tuple(bucket) for bucket in buckets if len(bucket) > 1]


class BucketNodes:
    """Makes the nodes of one bucket, with fake values and the metadata of its members.

    Args:
        graph: where to make them, at its current insertion point.
        fake_mode: of the graph's values.
        members: what the bucket stands for.
        motion: of the graph.
    """

    def __init__(
        self,
        graph: Graph,
        fake_mode: FakeTensorMode,
        members: Sequence[FsdpLaunch],
        motion: CodeMotion,
    ) -> None:
        self._graph = graph
        self._fake_mode = fake_mode
        self._members = members
        self._motion = motion
        annotation = fsdp_collective(members[0].launch)
        assert annotation is not None  # find_fsdp_launches has read it
        self._annotation = FsdpCollectiveAnnotation(
            kind=annotation.kind,
            mesh_axis=annotation.mesh_axis,
            parameter_names=tuple(
                dict.fromkeys(name for member in members for name in member.parameter_names)
            ),
        )

    @contextmanager
    def before(self, node: Node) -> Iterator[None]:
        """Inside, new nodes are made in front of ``node``."""
        with self._graph.inserting_before(node), quiet_fake_execution(self._fake_mode):
            yield

    def exchange(self, target: OpOverload) -> dict[Node, Node]:
        """Pack the inputs, exchange them, and unpack the results.

        What is reduced and scattered has a row for each rank, with its part of every member; so has
        what is gathered.

        Args:
            target: the collective.

        Returns:
            What stands for the wait of each member.
        """
        first, sources = self._members[0], [self._before_cast(each) for each in self._members]
        given = sum(member.input_value.numel() for member in self._members)
        taken = sum(member.output_value.numel() for member in self._members)
        num_rows, num_rows_back = max(1, given // max(1, taken)), max(1, taken // max(1, given))
        packed = self._call(PACK_BUCKET, sources, num_rows, first.input_value.dtype)
        launched = self._call(target, packed, *first.options)
        bucket = self._call(torch.ops._c10d_functional.wait_tensor.default, launched)
        values = [member.output_value.view(-1) for member in self._members]
        sizes = [value.numel() // num_rows_back for value in values]
        is_view = num_rows_back == 1 and all(map(self._may_share, self._members))
        if is_view:
            split = self._call(torch.ops.aten.split_with_sizes.default, bucket, sizes)
        else:
            # The pieces are what the members' values are views of: computing them would cost more
            # than all else that a bucket takes.
            split = self._call(UNPACK_BUCKET, bucket, num_rows_back, sizes, value=values)
        results: dict[Node, Node] = {}
        for index, member in enumerate(self._members):
            whole, flat = member.output_value, None if is_view else values[index]
            piece = self._call(operator.getitem, split, index, member=member, value=flat)
            if whole.dim() != 1:
                view, shape = torch.ops.aten.view.default, list(whole.shape)
                value = None if is_view else whole
                piece = self._call(view, piece, shape, member=member, value=value)
            results[member.wait] = piece
        return results

    def _may_share(self, member: FsdpLaunch) -> bool:
        """Whether nobody can tell that a result shares memory with those of other members."""
        views = any(map(is_only_a_view, member.wait.users))
        return self._motion.stays_inside(member.wait) and not views

    def _before_cast(self, member: FsdpLaunch) -> Node:
        """What is cast for a member alone, since packing casts too; else its input."""
        cast, options = member.input, member.input.kwargs
        if cast.target is not torch.ops.aten._to_copy.default or len(cast.users) > 1:
            return cast
        (source,) = cast.all_input_nodes
        value = value_of(source)
        assert isinstance(value, torch.Tensor)  # by the schema of the operator
        same_device = value.device == member.input_value.device
        only_casts = options.keys() == {"dtype"} and same_device and value.is_contiguous()
        may_move = self._motion.reason_not_to_move(cast) is None
        return source if only_casts and may_move else cast

    def _call(
        self,
        target: Callable[..., Any],
        *args: Any,
        member: FsdpLaunch | None = None,
        value: object = None,
    ) -> Node:
        """A node of one member, or of the bucket as a whole; its value is computed if not given."""
        node = self._graph.call_function(target, args)
        like = self._members[0].launch if member is None else member.launch
        node.meta = {key: value for key, value in like.meta.items() if key != "val"}
        if member is None:
            write_annotation(node, self._annotation)
        node.meta["val"] = evaluate(node) if value is None else value
        return node


def replace_uses(graph: Graph, replacements: Mapping[Node, Node]) -> None:
    """Let everything read the new nodes; the output node, which reads most, is rewritten once."""
    (output,) = graph.find_nodes(op="output")
    for old, new in replacements.items():
        for user in [user for user in old.users if user is not output]:
            user.replace_input_with(old, new)

    def current(node: Node) -> Any:
        return replacements.get(node, node)

    if any(argument in replacements for argument in output.all_input_nodes):
        output.args = map_arg(output.args, current)
