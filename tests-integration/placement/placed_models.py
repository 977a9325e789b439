"""The small models on four ranks that a solver places in tests."""

from __future__ import annotations

from training_cases import Case

LLAMA3 = Case(
    module="llama3",
    config="llama3_debugmodel",
    num_layers=1,
    seq_len=32,
    parallelism={"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
)
QWEN3 = Case(
    module="qwen3",
    config="qwen3_debugmodel",
    num_layers=1,
    seq_len=32,
    parallelism={"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
)
DEEPSEEK_V3 = Case(
    module="deepseek_v3",
    config="deepseek_v3_debugmodel",
    num_layers=2,
    seq_len=32,
    parallelism={"data_parallel_shard_degree": 4, "expert_parallel_degree": 2},
)
DEEPSEEK_V3_EP4 = Case(
    module="deepseek_v3",
    config="deepseek_v3_debugmodel",
    num_layers=2,
    seq_len=32,
    parallelism={"data_parallel_shard_degree": 4, "expert_parallel_degree": 4},
)
DEEPSEEK_V3_TP = Case(
    module="deepseek_v3",
    config="deepseek_v3_debugmodel",
    num_layers=2,
    seq_len=32,
    parallelism={"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
)
QWEN3_MOE_EP4 = Case(
    module="qwen3",
    config="qwen3_moe_debugmodel",
    num_layers=1,
    seq_len=32,
    parallelism={"data_parallel_shard_degree": 4, "expert_parallel_degree": 4},
)
