"""The rules of operators are exact: what they say a result consists of is what it holds.

Random programs of views, joins and collectives run on several simulated ranks at once; then each
result is put together again from its description alone, and must be equal.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from pass_graphs import capture, collectives
from torch.fx import GraphModule
from torch.fx.node import map_arg

from gt_passes.analysis.graph_scan import GraphScanner
from gt_passes.verifier.dataflow.flat_contents import Contents, Piece, Rows
from gt_passes.verifier.dataflow.symbolic_execution import SymbolicExecution
from gt_passes.verifier.dataflow.value_table import TensorValue, ValueTable

RANKS = 2
SHAPES = ((4, 6), (4, 6), (8,))


def gather(x):
    return collectives.wait_tensor(collectives.all_gather_into_tensor(x, RANKS, "g"))


def scatter(x):
    return collectives.wait_tensor(collectives.reduce_scatter_tensor(x, "sum", RANKS, "g"))


def reduce(x):
    return collectives.wait_tensor(collectives.all_reduce(x, "sum", "g"))


def cut(x, choose):
    dim = choose(x.dim())
    start = choose(x.shape[dim])
    stop = start + 1 + choose(x.shape[dim] - start)
    return x[(slice(None),) * dim + (slice(start, stop, 1 + choose(2)),)]


def regrouped(x, choose):
    numel = x.numel()
    divisors = [d for d in range(1, numel + 1) if numel % d == 0]
    outer = divisors[choose(len(divisors))]
    inner = [d for d in range(1, numel // outer + 1) if (numel // outer) % d == 0]
    middle = inner[choose(len(inner))]
    return x.reshape(outer, middle, numel // outer // middle)


def permuted(x, choose):
    order = list(range(x.dim()))
    random.Random(choose(24)).shuffle(order)
    return x.permute(order)


def joined(x, choose):
    dim = choose(x.dim())
    if choose(2):
        return torch.cat([x, x * 1], dim=dim)
    parts = x.split(1 + choose(x.shape[dim]), dim=dim)
    return torch.cat(parts[::-1] if choose(2) else parts, dim=dim)


def copied_into(x, choose):
    """A buffer that is filled through a view, and read through another."""
    buffer = torch.zeros_like(x, memory_format=torch.contiguous_format)
    row = choose(x.shape[0])
    buffer[row:].copy_(x[row:])
    return buffer


def bucketed_gather(x, choose):
    first, second = x.reshape(-1), x.flip(0).reshape(-1)[: 1 + choose(x.numel())]
    rows = gather(torch.cat([first, second])).view(RANKS, -1)
    return rows.split([first.numel(), second.numel()], dim=1)[choose(2)].reshape(-1)


def bucketed_scatter(x, choose):
    if x.numel() % RANKS:
        return x
    rows = x.reshape(RANKS, -1)
    bucket = torch.cat([rows, rows * 2], dim=1).reshape(-1)
    return scatter(bucket).split(rows.shape[1])[choose(2)]


STEPS: tuple[Callable, ...] = (
    cut,
    regrouped,
    permuted,
    joined,
    copied_into,
    lambda x, choose: x.unsqueeze(0).expand(2, *x.shape),
    lambda x, choose: x.unbind(choose(x.dim()))[0].reshape(-1),
    lambda x, choose: torch.stack([x, x], dim=choose(x.dim() + 1)),
    lambda x, choose: gather(x.contiguous()),
    lambda x, choose: scatter(x.contiguous()) if x.shape[0] % RANKS == 0 else x,
    lambda x, choose: reduce(x.contiguous()),
    bucketed_gather,
    bucketed_scatter,
)


def random_program(seed: int) -> GraphModule:
    draw = random.Random(seed)

    def choose(count: int) -> int:
        return draw.randrange(count)

    def program(a, b, c):
        values = [a, b, c]
        for _ in range(2 + choose(7)):
            value = values[choose(len(values))]
            changed = STEPS[choose(len(STEPS))](value, choose)
            if changed.dim() and 0 < changed.numel() <= 2000:
                values.append(changed)
        return tuple(values[3:])

    return capture(program, *(torch.ones(shape) for shape in SHAPES))


def run_on_ranks(graph_module: GraphModule, inputs: list[list[torch.Tensor]]) -> list[tuple]:
    """Run a graph on all ranks in lockstep, with collectives that really exchange."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    values = [dict(zip(placeholders, mine, strict=True)) for mine in inputs]
    for node in graph_module.graph.nodes:
        arguments = [map_arg((node.args, node.kwargs), mine.__getitem__) for mine in values]
        if node.op == "output":
            return [args[0] for args, _ in arguments]
        if node.op == "placeholder":
            continue
        operands = [args[0] for args, _ in arguments]
        name = str(node.target)
        for rank, (args, kwargs) in enumerate(arguments):
            if "all_gather" in name:
                result = torch.cat(operands)
            elif "reduce_scatter" in name:
                result = sum(operands).chunk(RANKS)[rank].clone()
            elif "all_reduce" in name:
                result = sum(operands).clone()
            elif "wait_tensor" in name:
                result = operands[rank]
            else:
                result = node.target(*args, **kwargs)
            values[rank][node] = result
    raise AssertionError("a graph without an output")


class Evaluator:
    """Puts a tensor together from the description of its contents."""

    def __init__(self, table: ValueTable, inputs: list[list[torch.Tensor]]) -> None:
        self._table = table
        self._inputs = [[tensor.flatten().numpy() for tensor in mine] for mine in inputs]

    def contents(self, contents: Contents, rank: int) -> np.ndarray:
        parts = [self._item(item, rank) for item in contents]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)

    def _item(self, item: Piece | Rows, rank: int) -> np.ndarray:
        if isinstance(item, Piece):
            return self._piece(item, rank)
        rows = [
            self._piece(first._replace(offset=first.offset + row * stride), rank)
            for row in range(item.num_rows)
            for first, stride in item.columns
        ]
        return np.concatenate(rows)

    def _piece(self, piece: Piece, rank: int) -> np.ndarray:
        places = np.array([piece.offset])
        for size, stride in piece.dims:
            places = (places[:, None] + np.arange(size) * stride).reshape(-1)
        return self._atom(piece.atom, rank)[places]

    def _atom(self, atom: int, rank: int) -> np.ndarray:
        match self._table.definition_of(atom):
            case ("input", (_, position), _):
                return self._inputs[rank][position]
            case ("joined", contents):
                return self.contents(contents, rank)
            case ("all_gather", _, _, source):
                return np.concatenate([self._atom(source, other) for other in range(RANKS)])
            case ("all_reduce", _, _, source):
                return sum(self._atom(source, other) for other in range(RANKS))
            case ("reduce_scatter", _, _, _, source):
                total = sum(self._atom(source, other) for other in range(RANKS))
                return total.reshape(RANKS, -1)[rank]
            case ("elementwise", torch.ops.aten.mul.Tensor, source, (_, factor)):
                return self._atom(source, rank) * factor
            case ("call", torch.ops.aten.flip.default, source, _):
                value = self._tensor(source)
                flat = self.contents(value.contents, rank).reshape(value.shape)
                return np.flip(flat, 0).reshape(-1)
            case ("call", torch.ops.aten.zeros_like.default, source, *_):
                return np.zeros(self._table.numel_of(atom), dtype=np.float32)
            case other:
                raise AssertionError(f"not followed exactly: {other}")

    def _tensor(self, number: int) -> TensorValue:
        _, shape, contents = self._table.definitions[number]
        return TensorValue(number, shape, contents)


@pytest.mark.parametrize("first_seed", range(0, 120, 20))
def test_results_hold_what_their_descriptions_say(first_seed: int) -> None:
    num_checked = 0
    for seed in range(first_seed, first_seed + 20):
        graph_module = random_program(seed)
        generator = torch.Generator().manual_seed(seed)
        inputs = [
            [torch.randint(-9, 9, shape, generator=generator).float() for shape in SHAPES]
            for _ in range(RANKS)
        ]
        table = ValueTable()
        execution = SymbolicExecution(
            GraphScanner().scan(graph_module), table=table, same_groups={}
        )
        execution.run()
        evaluator = Evaluator(table, inputs)
        for rank, results in enumerate(run_on_ranks(graph_module, inputs)):
            for result, number in zip(results, execution.outputs, strict=True):
                value = evaluator._tensor(number)
                assert value.shape == tuple(result.shape)
                described = evaluator.contents(value.contents, rank)
                assert np.array_equal(described, result.numpy().reshape(-1)), seed
                num_checked += 1
    assert num_checked > 40
