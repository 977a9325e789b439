"""A placement problem shaped like a transformer's training step, without any model behind it.

Forward and backward of one layer that stands for many (its end is linked to its own start), with
parameters, gradients, share nodes, windows for prefetch and a memory row. The tables come from the
same arithmetic as real ones: alpha-beta collectives, roofline-like compute, layouts of each axis
combined. For tests and for measuring the solver alone.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np

from gt_autoparallel.solver.problem import (
    Edge,
    FloatArray,
    IntArray,
    MemoryRow,
    Problem,
    Variable,
    Window,
)

Layout = tuple[str, ...]
"""For each axis R, P, or the digit of the dim that is sharded."""

_ALPHA_US = 8.0
_BYTES_PER_US = 2.0e5
_FLOP_PER_US = 4.0e8
_MEMORY_BYTES_PER_US = 2.5e6

# Rules along one axis: operands, then result. Activations are [0 batch, 1 sequence, 2 features],
# weights [0 out, 1 in].
_LINEAR = ("RR>R", "0R>0", "1R>1", "R0>2", "21>P", "PR>P")
_LINEAR_DX = ("RR>R", "0R>0", "1R>1", "R1>2", "20>P", "PR>P")
_LINEAR_DW = ("RR>R", "00>P", "11>P", "2R>0", "R2>1", "PR>P", "RP>P")
_UNARY = ("R>R", "0>0", "1>1", "2>2")
_CAST = (*_UNARY, "P>P")
_ADD = ("RR>R", "00>0", "11>1", "22>2", "PP>P")
_MUL = ("RR>R", "00>0", "11>1", "22>2", "PR>P", "RP>P")
_NORM = ("RR>R", "0R>0", "1R>1")
_NORM_DX = ("RRR>R", "00R>0", "11R>1")
_NORM_DW = ("RR>R", "00>P", "11>P")
_ATTENTION = ("RRR>R", "000>0", "222>2")
_ATTENTION_D = ("RRRR>R", "0000>0", "2222>2")


@dataclass
class _Node:
    shape: tuple[int, ...]
    operand_layouts: list[list[Layout]]
    result_layouts: list[Layout]
    flops: float
    window: int | None
    copies: int
    memory_factor: float


@dataclass
class _Builder:
    axes: tuple[int, ...]
    nodes: list[_Node] = field(default_factory=list)
    edges: list[tuple[int, int, int, int | None, int]] = field(default_factory=list)
    copies: int = 1
    window: int | None = None
    tables: dict[tuple[object, ...], FloatArray] = field(default_factory=dict)

    def fits(self, shape: tuple[int, ...], layout: Layout) -> bool:
        counts = [1] * len(shape)
        for placement, size in zip(layout, self.axes, strict=True):
            if placement.isdigit():
                if int(placement) >= len(shape):
                    return False
                counts[int(placement)] *= size
        return all(size % count == 0 for size, count in zip(shape, counts, strict=True))

    def local(self, shape: tuple[int, ...], layout: Layout) -> float:
        cuts = math.prod(s for p, s in zip(layout, self.axes, strict=True) if p.isdigit())
        return math.prod(shape) / cuts

    def op(
        self,
        rules: tuple[str, ...],
        operands: list[int],
        shape: tuple[int, ...],
        *,
        flops: float = 0.0,
        hide: int | None = None,
        memory: float = 0.0,
    ) -> int:
        shapes = [self.nodes[o].shape for o in operands]
        ins: list[list[Layout]] = [[] for _ in operands]
        outs: list[Layout] = []
        for combination in itertools.product(rules, repeat=len(self.axes)):
            parts = [rule.split(">") for rule in combination]
            taken = [tuple(part[0][i] for part in parts) for i in range(len(operands))]
            out = tuple(part[1] for part in parts)
            if self.fits(shape, out) and all(
                self.fits(s, t) for s, t in zip(shapes, taken, strict=True)
            ):
                for lists, layout in zip(ins, taken, strict=True):
                    lists.append(layout)
                outs.append(out)
        index = len(self.nodes)
        node = _Node(shape, ins, outs, flops, self.window, self.copies, memory)
        self.nodes.append(node)
        for position, operand in enumerate(operands):
            self.edges.append(
                (operand, index, position, hide if not position else None, self.copies)
            )
        return index

    def source(self, shape: tuple[int, ...], *, memory: float = 0.0) -> int:
        places = ["R", *(str(d) for d in range(len(shape)))]
        layouts = [
            layout
            for layout in itertools.product(places, repeat=len(self.axes))
            if self.fits(shape, layout)
        ]
        self.nodes.append(_Node(shape, [], layouts, 0.0, None, self.copies, memory))
        return len(self.nodes) - 1

    def share(self, operand: int, *, hide: int | None = None) -> int:
        shape = self.nodes[operand].shape
        rules = ("R>R", *(f"{d}>{d}" for d in range(len(shape))), "P>P")
        return self.op(rules, [operand], shape, hide=hide)

    def redistribution_us(self, shape: tuple[int, ...], source: Layout, target: Layout) -> float:
        total, layout = 0.0, source
        for axis in reversed(range(len(self.axes))):
            if source[axis] == target[axis]:
                continue
            size = self.axes[axis]
            if target[axis] == "P":
                return math.inf
            local = 2.0 * self.local(shape, layout)
            after = tuple(target[axis] if a == axis else p for a, p in enumerate(layout))
            large = max(local, 2.0 * self.local(shape, after))
            speed = _BYTES_PER_US if axis == len(self.axes) - 1 else _BYTES_PER_US / 4
            wire = large * (size - 1) / size / speed
            if source[axis] == "R":
                total += 0.5 + local / _MEMORY_BYTES_PER_US
            elif source[axis] == "P" and target[axis] == "R":
                total += 2 * (_ALPHA_US + wire)
            elif source[axis] == "P" or target[axis] == "R":
                total += _ALPHA_US + wire
            else:
                total += _ALPHA_US * 1.5 + wire / size
            layout = after
        return round(total, 4)

    def problem(self, num_windows: int, layers: int, tightness: float) -> Problem:
        variables = [self._variable(index) for index in range(len(self.nodes))]
        edges = [self._edge(*edge, layers) for edge in self.edges]
        low = sum(float(v.memory_bytes[0].min()) for v in variables)
        high = sum(float(v.memory_bytes[0].max()) for v in variables)
        return Problem(
            variables=tuple(variables),
            edges=tuple(edges),
            windows=tuple(Window(name=f"w{i}", multiplicity=layers) for i in range(num_windows)),
            memory=(
                MemoryRow(
                    name="memory", budget_bytes=low * (high / low) ** tightness, fixed_bytes=0.0
                ),
            ),
        )

    def _variable(self, index: int) -> Variable:
        node = self.nodes[index]
        time = np.zeros(len(node.result_layouts))
        memory = np.zeros(len(node.result_layouts))
        for option, out in enumerate(node.result_layouts):
            ins = [layouts[option] for layouts in node.operand_layouts]
            local = self.local(node.shape, out)
            memory[option] = node.copies * node.memory_factor * local
            if len(ins) == 1 and ins[0] == out and not node.flops:
                continue
            cuts = math.prod(
                size
                for axis, size in enumerate(self.axes)
                if any(layout[axis].isdigit() for layout in (*ins, out))
            )
            if ins:
                time[option] = round(
                    max(
                        node.flops / cuts / _FLOP_PER_US,
                        (len(ins) + 1) * 2.0 * local / _MEMORY_BYTES_PER_US,
                    )
                    + 2.0,
                    4,
                )
        windowed = node.window is not None
        return Variable(
            name=f"n{index}",
            cost_us=np.zeros_like(time) if windowed else time * node.copies,
            window=node.window,
            window_compute_us=time if windowed else np.zeros_like(time),
            memory_bytes=(memory,),
        )

    def _edge(
        self, left: int, right: int, position: int, hide: int | None, copies: int, layers: int
    ) -> Edge:
        a, b = self.nodes[left], self.nodes[right]
        left_labels, sources = _labels(a.result_layouts)
        right_labels, targets = _labels(
            b.operand_layouts[position] if position >= 0 else b.result_layouts
        )
        known = (a.shape, tuple(sources), tuple(targets))
        if known not in self.tables:
            self.tables[known] = np.array(
                [[self.redistribution_us(a.shape, s, t) for t in targets] for s in sources]
            )
        table = self.tables[known]
        if position < 0:  # linked: the same layout
            table = np.where(table == 0.0, 0.0, np.inf)
        hidden = np.zeros_like(table)
        if hide is not None:
            hidden = np.where(np.isfinite(table), table, 0.0)
            table = np.where(np.isfinite(table), 0.0, np.inf)
        else:
            table = table * copies
        return Edge(
            name=f"{left}>{right}",
            left=left,
            right=right,
            left_labels=left_labels,
            right_labels=right_labels,
            cost_us=table,
            window=hide,
            window_communication_us=hidden,
        )


def _labels(layouts: list[Layout]) -> tuple[IntArray, list[Layout]]:
    distinct = list(dict.fromkeys(layouts))
    places = {layout: place for place, layout in enumerate(distinct)}
    return np.array([places[layout] for layout in layouts]), distinct


def transformer_problem(
    axes: tuple[int, ...],
    *,
    layers: int = 32,
    batch: int = 64,
    sequence: int = 4096,
    features: int = 4096,
    hidden: int = 14336,
    chain: int = 3,
    kinds: int = 1,
    tightness: float = 0.3,
) -> Problem:
    """One step of a transformer on a mesh.

    Args:
        axes: sizes of the mesh's axes.
        layers: how many layers each layer kind stands for.
        batch: global sequences in a step.
        sequence: tokens of one.
        features: width of the model.
        hidden: width of the feed-forward part.
        chain: elementwise operators after each other operator, as decompositions leave them.
        kinds: different layers in a row, each with variables of its own.
        tightness: of the memory budget: 0 is the least that variables alone allow, 1 the most.
    """
    build = _Builder(axes)
    x_shape, h_shape = (batch, sequence, features), (batch, sequence, hidden)
    tokens = batch * sequence
    x = build.source(x_shape)
    build.copies = layers
    saved: list[tuple[list[tuple[int, int]], dict[str, int]]] = []
    params: list[int] = []

    def chained(value: int, rules: tuple[str, ...] = _UNARY) -> int:
        for _ in range(chain):
            value = build.op(rules, [value], build.nodes[value].shape)
        return value

    def parameter(shape: tuple[int, ...], window: int) -> int:
        raw = build.source(shape, memory=12.0)
        params.append(raw)
        cast = build.op(
            ("R>R", *(f"{d}>{d}" for d in range(len(shape)))), [raw], shape, hide=window
        )
        return build.share(cast)

    starts: list[int] = []
    for kind in range(kinds):
        build.window = 2 * kind
        s: dict[str, int] = {}
        x = build.share(x)
        starts.append(x)
        first = len(params)
        s["x"] = x
        weights = {
            name: parameter(shape, 2 * kind)
            for name, shape in {
                "n1": (features,), "q": (features, features), "k": (features // 4, features),
                "v": (features // 4, features), "o": (features, features), "n2": (features,),
                "g": (hidden, features), "u": (hidden, features), "d": (features, hidden),
            }.items()
        }  # fmt: skip
        s |= {f"w_{k}": v for k, v in weights.items()}
        normed = build.share(chained(build.op(_NORM, [x, s["w_n1"]], x_shape, memory=2.0)))
        s["normed"] = normed
        heads = []
        for name in "qkv":
            shape = (batch, sequence, build.nodes[s["w_" + name]].shape[0])
            flops = 2.0 * tokens * features * shape[2]
            y = build.op(_LINEAR, [normed, s["w_" + name]], shape, flops=flops)
            heads.append(build.share(chained(y)))
            s[name] = heads[-1]
        flops = 4.0 * tokens * sequence * features / 2
        mixed = build.op(_ATTENTION, heads, x_shape, flops=flops, memory=2.0)
        s["mixed"] = build.share(mixed)
        y = build.op(_LINEAR, [s["mixed"], s["w_o"]], x_shape, flops=2.0 * tokens * features**2)
        x = build.share(chained(build.op(_ADD, [x, chained(y, _CAST)], x_shape, memory=2.0), _CAST))
        s["x2"] = x
        s["normed2"] = build.share(chained(build.op(_NORM, [x, s["w_n2"]], x_shape, memory=2.0)))
        flops = 2.0 * tokens * features * hidden
        for name in "gu":
            y = build.op(_LINEAR, [s["normed2"], s["w_" + name]], h_shape, flops=flops, memory=2.0)
            s[name] = build.share(y)
        s["act"] = build.share(chained(build.op(_UNARY, [s["g"]], h_shape)))
        s["h"] = build.share(build.op(_MUL, [s["act"], s["u"]], h_shape, memory=2.0))
        y = build.op(_LINEAR, [s["h"], s["w_d"]], x_shape, flops=flops)
        x = build.op(_ADD, [x, chained(y, _CAST)], x_shape, memory=2.0)
        saved.append(([(p, 0) for p in params[first:]], s))
    if layers > 1:
        build.edges.append((x, starts[0], 0, None, layers - 1))
    build.copies = 1
    build.window = None
    loss = chained(x)
    grad = chained(build.op(_UNARY, [loss], x_shape))
    build.copies = layers
    grads: list[int] = []
    for kind in reversed(range(kinds)):
        window = 2 * kind + 1
        build.window = window
        owned, s = saved[kind]
        dw: dict[str, int] = {}
        grad = build.share(grad)
        grads.append(grad)
        flops = 2.0 * tokens * features * hidden
        dh = build.share(build.op(_LINEAR_DX, [grad, s["w_d"]], h_shape, flops=flops))
        dw["d"] = build.op(_LINEAR_DW, [grad, s["h"]], (features, hidden), flops=flops)
        du = build.share(build.op(_MUL, [dh, s["act"]], h_shape))
        dg = build.op(_MUL, [dh, s["u"]], h_shape)
        dg = build.share(chained(build.op(_MUL, [dg, s["g"]], h_shape)))
        parts = []
        for name, value in (("g", dg), ("u", du)):
            dw[name] = build.op(_LINEAR_DW, [value, s["normed2"]], (hidden, features), flops=flops)
            parts.append(build.op(_LINEAR_DX, [value, s["w_" + name]], x_shape, flops=flops))
        dn = build.share(chained(build.op(_ADD, parts, x_shape), _CAST))
        dw["n2"] = build.op(("RR>R", "00>P", "11>P"), [dn, s["x2"]], (features,))
        dx = build.op(_NORM_DX, [dn, s["x2"], s["w_n2"]], x_shape)
        grad = build.share(chained(build.op(_ADD, [grad, chained(dx)], x_shape), _CAST))
        flops = 2.0 * tokens * features**2
        dm = build.share(chained(build.op(_LINEAR_DX, [grad, s["w_o"]], x_shape, flops=flops)))
        dw["o"] = build.op(_LINEAR_DW, [grad, s["mixed"]], (features, features), flops=flops)
        parts = []
        for name in "qkv":
            shape = build.nodes[s[name]].shape
            flops_a = 4.0 * tokens * sequence * features / 3
            dy = build.op(_ATTENTION_D, [dm, s["q"], s["k"], s["v"]], shape, flops=flops_a)
            dy = build.share(chained(dy))
            flops = 2.0 * tokens * features * shape[2]
            dw[name] = build.op(_LINEAR_DW, [dy, s["normed"]], (shape[2], features), flops=flops)
            parts.append(build.op(_LINEAR_DX, [dy, s["w_" + name]], x_shape, flops=flops))
        sum_1 = build.op(_ADD, parts[:2], x_shape)
        dn = build.share(chained(build.op(_ADD, [sum_1, parts[2]], x_shape), _CAST))
        dw["n1"] = build.op(_NORM_DW, [dn, s["x"]], (features,))
        dx = build.op(_NORM_DX, [dn, s["x"], s["w_n1"]], x_shape)
        grad = build.op(_ADD, [grad, chained(dx)], x_shape)
        names = ("n1", "q", "k", "v", "o", "n2", "g", "u", "d")
        for (param, _), name in zip(owned, names, strict=True):
            shape = build.nodes[param].shape
            rules = ("R>R", *(f"{d}>{d}" for d in range(len(shape))))
            build.window = None
            end = build.op(rules, [dw[name]], shape, hide=window, memory=4.0)
            build.edges.append((param, end, -1, None, 1))
            build.window = window
    if layers > 1:
        build.edges.append((grad, grads[0], 0, None, layers - 1))
    return build.problem(2 * kinds, layers, tightness)
