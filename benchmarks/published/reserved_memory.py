"""What PyTorch's allocator holds for a run by FSDP2, of what is live in a simulated one.

Published is what was reserved (``max_reserved`` in torchtitan's log). The allocator gives a block
that was freed only to the stream that it was allocated on (``c10/cuda/CUDACachingAllocator``), so
that peaks of streams add up although they fall into different moments. FSDP2 allocates on two
streams beside that of computation (``foreach_reduce`` and ``foreach_all_gather`` in
``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``):

- reduced gradients on the stream that reduces. They are freed before a step begins, and are not
  there at its peak; their memory is;
- what an all-gather writes, before it is copied out, on the stream that gathers: of what belongs to
  no layer, which the root gathers at once, and of a layer.

Blocks that are lost between others of the same stream are not counted.
"""

from __future__ import annotations

from gt_pipeline.estimates import ADAM_STATES, RankMemory
from gt_trainer.dry_run.simulated_step import SimulatedStep


def reserved_bytes(simulated: SimulatedStep) -> int:
    """Of the rank that holds most; of a pipeline without what its all-gathers write (1 %)."""
    if simulated.schedule is not None:
        return max(map(_of_rank, simulated.memory))
    at_peak = simulated.fullest.peak.bytes_by_part["gradients"]
    reduced = max(0, simulated.facts.parameter_bytes_per_rank - at_peak)
    return simulated.peak_bytes + reduced + _gathered_bytes(simulated)


def _of_rank(memory: RankMemory) -> int:
    if memory.peak.action is None:  # the optimizer has them
        return memory.peak_bytes
    return memory.peak_bytes + memory.peak.bytes_by_part["optimizer state"] // ADAM_STATES


def _gathered_bytes(simulated: SimulatedStep) -> int:
    """What the root's all-gather writes, and the largest of a layer."""
    gathers = [each for each in simulated.graph.collectives if each.purpose == "FSDP unshard"]
    of_layers = [each.num_bytes for each in gathers if each.module.startswith("layers.")]
    # Once for each module, although a backward may gather it again.
    of_root = {each.module: each.num_bytes for each in gathers if "layers." not in each.module}
    return sum(of_root.values()) + max(of_layers, default=0)
