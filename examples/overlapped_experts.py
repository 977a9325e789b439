"""Token exchanges of one's own mixture of experts, hidden behind the computation of other tokens.

::

    pip install ./packages/gt-config ./packages/gt-trace ./packages/gt-passes
    torchrun --standalone --nproc-per-node 2 examples/overlapped_experts.py

Each rank has one expert, and tokens travel to the rank of theirs. The captured step is cut in two
chunks of the batch, and while one is exchanged, the other computes. Which methods dispatch,
compute, combine and exchange is said once, by annotations of the instances: the model is unchanged.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

from gt_config import CompileConfig, EpOverlapConfig
from gt_config.node_keys import EpExchangeAnnotation, EpRegionAnnotation
from gt_passes import PassManagerReport, exchange_collective_digest, optimize
from gt_passes.ep_overlap import exposed_exchanges
from gt_trace import annotate_method, trace_step

WIDTH, BATCH, LENGTH, NUM_STEPS = 16, 4, 8, 5
wait_tensor = torch.ops._c10d_functional.wait_tensor


class MoE(nn.Module):
    """A layer of experts as somebody might have written it; each token goes to one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, dist.get_world_size(), bias=False)
        self.expert = nn.Linear(WIDTH, WIDTH, bias=False)

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """How many tokens come from each rank, of how many go there."""
        return wait_tensor(all_to_all_single(counts, None, None, dist.group.WORLD))

    def exchange_tokens(self, tokens: Tensor, received: list[int], sent: list[int]) -> Tensor:
        """The tokens that other ranks sent here."""
        return wait_tensor(all_to_all_single_autograd(tokens, received, sent, dist.group.WORLD))

    def send(self, tokens: Tensor, expert: Tensor) -> tuple[Tensor, Tensor, list[int], list[int]]:
        """Tokens of this rank's expert, and what brings them back."""
        order = torch.argsort(expert, stable=True)
        counts = torch.zeros(dist.get_world_size(), dtype=torch.int64)
        counts = counts.scatter_add(0, expert, torch.ones_like(expert))
        received, sent = self.exchange_counts(counts).tolist(), counts.tolist()
        return self.exchange_tokens(tokens[order], received, sent), order, received, sent

    def bring_back(
        self, results: Tensor, tokens: Tensor, order: Tensor, received: list[int], sent: list[int]
    ) -> Tensor:
        """Results in the order of the tokens that they are of."""
        back = self.exchange_tokens(results, sent, received)
        return torch.zeros_like(tokens).scatter_add(0, order[:, None].expand(-1, WIDTH), back)

    def forward(self, hidden: Tensor) -> Tensor:
        """Of shape (batch, length, width)."""
        tokens = hidden.view(-1, WIDTH)
        scores = self.gate(tokens).softmax(-1)
        expert = scores.argmax(-1, keepdim=True)
        here, order, received, sent = self.send(tokens, expert.view(-1))
        back = self.bring_back(self.expert(here), tokens, order, received, sent)
        return (back * scores.gather(-1, expert)).view(hidden.shape)


# [start: annotations]
@contextmanager
def annotated(moes: list[MoE]) -> Iterator[None]:
    """Say what the methods of these instances are to the overlap, while a step is traced."""
    with ExitStack() as stack:
        for moe in moes:
            for owner, method, annotation in (
                (moe, "send", EpRegionAnnotation(kind="dispatch")),
                (moe.expert, "forward", EpRegionAnnotation(kind="compute")),
                (moe, "bring_back", EpRegionAnnotation(kind="combine")),
                (moe, "exchange_counts", EpExchangeAnnotation(kind="token_count_exchange")),
                (moe, "exchange_tokens", EpExchangeAnnotation(kind="token_exchange")),
            ):
                stack.enter_context(annotate_method(owner, method, annotation))
        yield


OVERLAP = CompileConfig(
    ep_overlap=EpOverlapConfig(
        enabled=True, strategy="graph", module_fqn="layers.*", chunk_dim="batch", num_chunks=2
    )
)
# [end: annotations]


def train(options: CompileConfig) -> tuple[list[float], PassManagerReport]:
    """Train on this rank; the losses over all ranks, and what passes did to the step."""
    torch.manual_seed(dist.get_rank())  # every rank has experts of its own
    model = nn.ModuleDict({"layers": nn.ModuleList(MoE() for _ in range(2))})
    moes = list(model["layers"])
    for moe in moes:
        dist.broadcast(moe.gate.weight.data, src=0)  # and the same gates as all others

    def step(hidden: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        target = hidden.roll(1, dims=-1)
        for moe in moes:
            hidden = hidden + moe(hidden)
        loss = (hidden - target).square().mean()
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    with annotated(moes):
        traced = trace_step(step, module=model)(torch.randn(BATCH, LENGTH, WIDTH))
    report = optimize(traced, options)
    assert exposed_exchanges(traced.graph_module) == ()  # of chunks: each has something behind it
    exchange_collective_digest(traced.graph_module)
    run = traced.bind(model)
    history = []
    for index in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(index * dist.get_world_size() + dist.get_rank())
        loss, gradients = run(torch.randn(BATCH, LENGTH, WIDTH, generator=generator))
        for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
            if "gate" in name:
                dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
            parameter.data -= 0.1 * gradient
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        history.append(loss.item())
    return history, report


def main() -> None:
    """Train with and without overlap on this rank, and compare."""
    dist.init_process_group("gloo")
    plain, _ = train(CompileConfig())
    overlapped, report = train(OVERLAP)
    if dist.get_rank() == 0:
        print(report)
        error = max(abs(a / b - 1) for a, b in zip(overlapped, plain, strict=True))
        print(f"loss {plain[0]:.3f} at first, {plain[-1]:.3f} after {NUM_STEPS} steps")
        print(f"largest relative difference by the overlap: {error:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
