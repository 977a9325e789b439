"""What a calibration asks of a machine, and the machine that torch runs on.

Work is given to a machine as data, so that the arithmetic on its answers (``constants``) is tested
with a machine of known constants.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

WorkKind = Literal[
    "kernel",  # element-wise, on a few numbers: nothing but overhead
    "view",
    "collective",  # the launch of an all-gather in a group of this rank alone
    "wait",  # for such an all-gather, done long ago
    "matmul",  # in bfloat16, on random numbers
    "float8_matmul",  # of float8_e4m3fn, scaled tensor-wise, into bfloat16
    "grouped_matmul",  # as matmul, of equally many rows for each of several experts
    "attention_forward",  # causal FlexAttention, compiled, in bfloat16
    "attention_backward",
    "gather",  # of rows of a table
    "copy",  # on the device
    "to_host",  # into pinned memory
    "from_host",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Operators of one kind, called one after another by the code of one graph."""

    kind: WorkKind
    count: int = 1
    num_bytes: int = 0
    """Read by each copy; as many are written."""

    shape: tuple[int, ...] = ()
    """m, n and k of a matrix product, and how many groups share m; heads, length and head dim of an
    attention; rows of a table, width and rows gathered of a gather."""


_MakeInputs = Callable[[], tuple[torch.Tensor, ...]]
_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default


class Machine(Protocol):
    """Answers how long work takes. Microseconds of one measurement, for all its operators."""

    device_name: str

    def issue_us(self, work: Work) -> float:
        """The host's time to issue the work to an idle device, without waiting for it."""
        ...

    def run_us(self, work: Work) -> float:
        """The device's time for work that the host has issued long before."""
        ...

    def replay_us(self, work: Work) -> float:
        """The device's time for the same work in one CUDA graph."""
        ...

    def answer_us(self, work: Work) -> float:
        """From before the host issues the work to an idle device until it sees it done."""
        ...


class TorchMachine:
    """The machine of this process.

    On a CPU everything is timed by the host's clock and a recording is a second run: that says
    nothing of any machine, and proves this file.

    Args:
        device: to run on.
        clock: seconds.
    """

    def __init__(
        self, device: torch.device, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._clock = clock
        self._prepared: dict[Work, tuple[Callable[..., Any], _MakeInputs]] = {}
        self._graphs: dict[Work, torch.cuda.CUDAGraph] = {}
        self._spinning_us = 0.0
        self.device_name = torch.cuda.get_device_name(device) if self._is_cuda else "cpu"

    def issue_us(self, work: Work) -> float:
        run, make_inputs = self._work(work)
        inputs = make_inputs()
        self._synchronize()
        with torch.no_grad():
            begin = self._clock()
            results = run(*inputs)
            end = self._clock()
        _finish(work, results)
        self._synchronize()
        return 1e6 * (end - begin)

    def run_us(self, work: Work) -> float:
        run, make_inputs = self._work(work)
        inputs = make_inputs()
        return self.call_us(lambda: run(*inputs))

    def call_us(self, call: Callable[[], object]) -> float:
        """The device's time for what a call launches, in microseconds; the call is warm."""
        self._synchronize()
        with torch.no_grad():
            begin = self._clock()
            call()
            issued_us = 1e6 * (self._clock() - begin)
        # The device is kept busy until all is issued, or what is timed is the host.
        return self._between_events(call, ahead_us=2 * issued_us + 1000)

    def replay_us(self, work: Work) -> float:
        run, make_inputs = self._work(work)
        inputs = make_inputs()
        if not self._is_cuda:
            return self._between_events(lambda: run(*inputs), ahead_us=0)
        if work not in self._graphs:
            self._graphs[work] = torch.cuda.CUDAGraph()
            with torch.no_grad(), torch.cuda.graph(self._graphs[work]):
                run(*inputs)
            self._graphs[work].replay()
        return self._between_events(self._graphs[work].replay, ahead_us=1000)

    def answer_us(self, work: Work) -> float:
        run, make_inputs = self._work(work)
        inputs = make_inputs()
        event = torch.cuda.Event() if self._is_cuda else None
        self._synchronize()
        with torch.no_grad():
            begin = self._clock()
            results = run(*inputs)
            if event is not None:
                event.record()
                while not event.query():
                    pass
            end = self._clock()
        del results
        return 1e6 * (end - begin)

    def _between_events(self, call: Callable[[], object], *, ahead_us: float) -> float:
        self._synchronize()
        if not self._is_cuda:
            begin = self._clock()
            call()
            return 1e6 * (self._clock() - begin)
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.no_grad():
            torch.cuda._sleep(int(ahead_us * self._cycles_per_us()))
            begin_event.record()
            results = call()
            end_event.record()
        self._synchronize()
        del results
        return 1e3 * begin_event.elapsed_time(end_event)

    def _cycles_per_us(self) -> float:
        """How many cycles ``torch.cuda._sleep`` counts in a microsecond, measured once."""
        if not self._spinning_us:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            torch.cuda._sleep(10_000_000)
            end.record()
            self._synchronize()
            self._spinning_us = 1e3 * begin.elapsed_time(end)
        return 10_000_000 / self._spinning_us

    def _synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self._device)

    def _work(self, work: Work) -> tuple[Callable[..., Any], _MakeInputs]:
        """The work as the code of a graph, which is how a captured step runs, and warm."""
        if work not in self._prepared:
            function, make_inputs = self._function(work)
            # A copy to a given place is an operator of nobody's result, and a compiled call no
            # operator: called as they are.
            called = ("copy", "to_host", "from_host", "attention_forward", "attention_backward")
            is_graph = work.kind not in called
            run = function
            if is_graph:
                run = make_fx(function, tracing_mode="fake")(*make_inputs()).forward
            with torch.no_grad():
                for _ in range(3):
                    _finish(work, run(*make_inputs()))
            self._synchronize()
            self._prepared[work] = run, make_inputs
        return self._prepared[work]

    def _function(self, work: Work) -> tuple[Callable[..., Any], _MakeInputs]:
        count = work.count
        if work.kind in ("copy", "to_host", "from_host"):
            return self._copies(work)
        if work.kind.startswith("attention"):
            return self._attention(work)
        if work.kind == "float8_matmul":
            return self._float8_products(work)
        if work.kind == "grouped_matmul":
            return self._grouped_products(work)
        if work.kind == "gather":
            num_rows, width, gathered = work.shape
            table = torch.randn(num_rows, width, device=self._device, dtype=torch.bfloat16)
            rows = torch.randint(num_rows, (gathered,), device=self._device)
            gather = torch.ops.aten.embedding.default
            return lambda t, i: [gather(t, i) for _ in range(count)], lambda: (table, rows)
        if work.kind == "matmul":
            m, n, k = work.shape
            left = torch.randn(m, k, device=self._device, dtype=torch.bfloat16)
            right = torch.randn(k, n, device=self._device, dtype=torch.bfloat16)
            return lambda a, b: [a @ b for _ in range(count)], lambda: (left, right)
        small = torch.randn(64, 64, device=self._device)
        if work.kind == "kernel":
            multiply = torch.ops.aten.mul.Tensor
            return lambda x: [multiply(x, x) for _ in range(count)], lambda: (small,)
        if work.kind == "view":
            view = torch.ops.aten.view.default
            return lambda x: [view(x, [-1]) for _ in range(count)], lambda: (small,)
        group = dist.group.WORLD.group_name
        if work.kind == "collective":
            return lambda x: [_GATHER(x, 1, group) for _ in range(count)], lambda: (small,)
        # Only the first wait for a launch does anything.
        return (
            lambda *launched: [_WAIT(each) for each in launched],
            lambda: tuple(_GATHER(small, 1, group) for _ in range(count)),
        )

    def _float8_products(self, work: Work) -> tuple[Callable[..., Any], _MakeInputs]:
        m, n, k = work.shape
        left = torch.randn(m, k, device=self._device).to(torch.float8_e4m3fn)
        right = torch.randn(n, k, device=self._device).to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=self._device)
        multiply = partial(torch._scaled_mm, out_dtype=torch.bfloat16, use_fast_accum=True)
        return (
            lambda a, b, scale: [multiply(a, b, scale, scale) for _ in range(work.count)],
            lambda: (left, right, one),
        )

    def _grouped_products(self, work: Work) -> tuple[Callable[..., Any], _MakeInputs]:
        m, n, k, groups = work.shape
        left = torch.randn(m, k, device=self._device, dtype=torch.bfloat16)
        right = torch.randn(groups, k, n, device=self._device, dtype=torch.bfloat16)
        ends = torch.arange(1, groups + 1, device=self._device, dtype=torch.int32) * (m // groups)
        return (
            lambda a, b, e: [torch._grouped_mm(a, b, e) for _ in range(work.count)],
            lambda: (left, right, ends),
        )

    def _attention(self, work: Work) -> tuple[Callable[..., Any], _MakeInputs]:
        heads, length, head_dim = work.shape
        # A CPU has no backward of FlexAttention.
        attend: Callable[..., torch.Tensor] = partial(
            F.scaled_dot_product_attention, is_causal=True
        )
        if self._is_cuda:
            attend = causal_flex_attention(self._device, length)
        q, k, v, gradient = (
            torch.randn(1, heads, length, head_dim, device=self._device, dtype=torch.bfloat16)
            for _ in range(4)
        )
        if work.kind == "attention_forward":
            return lambda *qkv: [attend(*qkv) for _ in range(work.count)], lambda: (q, k, v)
        with torch.enable_grad():
            leaves = [each.requires_grad_() for each in (q, k, v)]
            output = attend(*leaves)

        def backward(given: torch.Tensor) -> list[torch.Tensor]:
            return [
                each
                for _ in range(work.count)
                for each in torch.autograd.grad(output, leaves, given, retain_graph=True)
            ]

        return backward, lambda: (gradient,)

    def _copies(self, work: Work) -> tuple[Callable[..., Any], _MakeInputs]:
        here = torch.empty(work.num_bytes, dtype=torch.uint8, device=self._device)
        here.random_(0, 255)
        if work.kind == "copy":
            there = torch.empty_like(here)
        else:
            there = torch.empty(work.num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
        source, destination = (there, here) if work.kind == "from_host" else (here, there)
        return (
            lambda a, b: [b.copy_(a, non_blocking=True) for _ in range(work.count)],
            lambda: (source, destination),
        )


def causal_flex_attention(device: torch.device, length: int) -> Callable[..., Any]:
    """Of queries, keys and values, (B, H, L, D) each, compiled for this length alone."""
    mask = create_block_mask(_is_causal, None, None, length, length, device=str(device))
    return partial(torch.compile(flex_attention, dynamic=False), block_mask=mask)


def _is_causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= key


def _finish(work: Work, results: Sequence[torch.Tensor]) -> None:
    """What was launched and not waited for would be held for ever."""
    if work.kind == "collective":
        for each in results:
            _WAIT(each)
