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
from gt_passes._torch_internals import FakeTensorMode, quiet_fake_execution, value_of
from gt_passes.analysis.code_motion import CodeMotion
from gt_passes.analysis.node_calls import evaluate
from gt_passes.fsdp.fsdp_launches import FsdpLaunch
from gt_trace.node_metadata import read_annotation, write_annotation

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
    """

    def __init__(
        self, graph: Graph, fake_mode: FakeTensorMode, members: Sequence[FsdpLaunch]
    ) -> None:
        self._graph = graph
        self._fake_mode = fake_mode
        self._members = members
        annotation = read_annotation(members[0].launch, FsdpCollectiveAnnotation)
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

    def call(
        self,
        target: Callable[..., Any],
        *args: Any,
        member: FsdpLaunch | None = None,
        value: object = None,
    ) -> Node:
        """A node that calls ``target``; of one member, or of the bucket as a whole.

        Args:
            target: an operator.
            args: its arguments.
            member: that the node belongs to; None for all of them.
            value: its fake value where that is known; None to compute it.
        """
        node = self._graph.call_function(target, args)
        like = self._members[0].launch if member is None else member.launch
        node.meta = {key: value for key, value in like.meta.items() if key != "val"}
        if member is None:
            write_annotation(node, self._annotation)
        node.meta["val"] = evaluate(node) if value is None else value
        return node

    def view(self, source: Node, shape: list[int], member: FsdpLaunch) -> Node:
        """``source`` in another shape; itself if it has that shape."""
        value = value_of(source)
        assert isinstance(value, torch.Tensor)  # find_fsdp_launches has refused the others
        if list(value.shape) == shape:
            return source
        return self.call(torch.ops.aten.view.default, source, shape, member=member)

    def results(self, whole: Node, shapes: Sequence[Sequence[int]], dim: int) -> dict[Node, Node]:
        """What stands for the wait of each member: ``whole`` cut, in memory of its own, in shape.

        Args:
            whole: what the bucket's wait gave.
            shapes: of each member's piece of ``whole``.
            dim: along which it is cut.
        """
        waits = [member.wait for member in self._members]
        wanted = [member.output_value for member in self._members]
        # The pieces are what the members' values are views of: computing them would cost more than
        # all else that a bucket takes.
        values = [value.view(shape) for value, shape in zip(wanted, shapes, strict=True)]
        sizes = [shape[dim] for shape in shapes]
        split = self.call(
            torch.ops.aten.split_with_sizes_copy.default, whole, sizes, dim, value=values
        )
        results: dict[Node, Node] = {}
        for index, (wait, member) in enumerate(zip(waits, self._members, strict=True)):
            piece = self.call(operator.getitem, split, index, member=member, value=values[index])
            shape = list(wanted[index].shape)
            if list(values[index].shape) == shape:
                results[wait] = piece
            else:
                results[wait] = self.call(
                    torch.ops.aten.view.default, piece, shape, member=member, value=wanted[index]
                )
        return results


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
