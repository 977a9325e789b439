"""Rules of the mesh and the batch.

Those of torchtitan 0.3.0 (``ParallelDims`` and the sequence-length check in ``Trainer``), stated
before any process group exists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gt_config._rules.rule import round_up, rule, violation
from gt_config._subject import Subject, flag_of, value_at
from gt_config.errors import Violation

_WORLD_AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")


@rule("topology.world", *(f"topology.{axis}" for axis in _WORLD_AXES))
def _degrees_multiply_to_world(subject: Subject) -> Iterator[Violation]:
    degrees = {axis: int(value_at(subject, f"topology.{axis}")) for axis in _WORLD_AXES}
    world, product = subject.topology.world, math.prod(degrees.values())
    if product == world:
        return
    rest = product // degrees["dp_shard"]
    fix = f"start {product} processes, or change a degree"
    if world % rest == 0:
        fix += f" (for example {flag_of('topology.dp_shard')} {world // rest})"
    terms = " * ".join(f"{axis} {degree}" for axis, degree in degrees.items())
    yield violation(subject, "topology.world", allowed=f"{terms} = {product}", fix=fix)


@rule("topology.dp_shard", "topology.cp", "topology.tp", "topology.ep")
def _ep_divides_the_ranks_it_borrows(subject: Subject) -> Iterator[Violation]:
    mesh = subject.topology
    ranks = mesh.dp_shard * mesh.cp * mesh.tp
    if ranks % mesh.ep == 0:
        return
    divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
    yield violation(
        subject,
        "topology.ep",
        allowed=f"a divisor of dp_shard {mesh.dp_shard} * cp {mesh.cp} * tp {mesh.tp} = {ranks}",
        fix=f"use one of {divisors}, or change the other degrees",
    )


@rule("topology.seq_len", "topology.tp", "topology.cp", "topology.sequence_parallel")
def _sequence_divides_over_tp_and_cp(subject: Subject) -> Iterator[Violation]:
    mesh = subject.topology
    terms = []
    if mesh.sequence_parallel and mesh.tp > 1:
        terms.append(f"tp {mesh.tp}")
    if mesh.cp > 1:
        # The two halves of the sequence go to the ranks in opposite orders, to balance the mask.
        terms.append(f"2 * cp {mesh.cp}")
    divisor = (mesh.tp if mesh.sequence_parallel else 1) * (2 * mesh.cp if mesh.cp > 1 else 1)
    if mesh.seq_len % divisor == 0:
        return
    yield violation(
        subject,
        "topology.seq_len",
        allowed=f"a multiple of {divisor} ({' * '.join(terms)})",
        fix=f"use {round_up(mesh.seq_len, divisor)}, or smaller degrees",
    )
