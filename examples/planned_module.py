"""A plan for a Hugging Face Llama on 64 GPUs that are not here: how to shard it, what to recompute.

::

    pip install ./packages/gt-trainer transformers
    python examples/planned_module.py

The model is built without memory: a plan captures the step with tensors that have no values, on
ranks that do not exist, and simulates it. Pairs of GPUs that share samples are tried, too, as a
solver places the model on them, and pipelines of two stages. The last lines say how the fastest
recipe shares the model, and which passes it has: ``fsdp_loop.py``, ``placed_hugging_face.py`` and
``tensor_parallel_pipeline.py`` have the loops. A hook lets the model return a tensor, since only
tensors pass between stages.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from gt_pipeline.split import HUGGING_FACE_NAMING, RemovalPolicy
from gt_trace.fsdp import MixedPrecision
from gt_trainer.planning.cluster import load_cluster
from gt_trainer.planning.module_plan import plan_module
from gt_trainer.planning.module_recipes import how_to_share, passes_of
from gt_trainer.planning.staged_module import ModuleStages

CONFIG = LlamaConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=2,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=32_000,
    use_cache=False,
)
BATCH, LENGTH, NUM_GPUS, NUM_MICROBATCHES = 1, 4096, 64, 4
LAYERS = "model.layers.*"


# [start: plan]
def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of float[batch, length, vocabulary] and int64[batch, length]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Of one microbatch, each int64[batch, length]."""
    return loss_of(model(tokens), labels)


STAGES = ModuleStages(
    degrees=(2,),
    loss_of=loss_of,
    naming=HUGGING_FACE_NAMING,
    policy=RemovalPolicy(attribute="identity"),  # its forward calls every child
    schedules=("1F1B",),
)


def main() -> None:
    """Plan, and say how the fastest recipe is run."""
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    model.register_forward_hook(lambda module, inputs, output: output.logits)
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    plan = plan_module(
        model,
        loss,
        (tokens, tokens),
        load_cluster("h100_sxm"),
        num_gpus=NUM_GPUS,
        num_microbatches=NUM_MICROBATCHES,
        tokens_per_sample=LENGTH,
        layers=LAYERS,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        tensor_parallel=(2,),
        stages=STAGES,
    )
    print(plan)
    best = plan.ranked[0].recipe
    print(f"fastest: {how_to_share(best)}")
    print(f"passes: {', '.join(each.name for each in passes_of(best, layers=LAYERS))}")


# [end: plan]

if __name__ == "__main__":
    main()
