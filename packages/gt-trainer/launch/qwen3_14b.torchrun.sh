#!/bin/bash
# Qwen3 14B on 8 H100: FSDP 8. Start it on the node:
# HF_ASSETS_PATH=... ./qwen3_14b.torchrun.sh [more options of gt-train]
# Never run on such a machine by its authors; gt-trainer/launch/README.md explains it.
set -euo pipefail
: "${HF_ASSETS_PATH:?folder with the tokenizer of Qwen3 14B}"
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-12}"

torchrun --nnodes 1 --nproc-per-node 8 --numa-binding "${NUMA_BINDING:-node}" \
    --rdzv-backend c10d --rdzv-id "${RDZV_ID:-qwen3_14b}" \
    --rdzv-endpoint "${RDZV_ENDPOINT:-localhost:29400}" \
    -m gt_trainer --module qwen3 --config qwen3_14b \
    --hf_assets_path "$HF_ASSETS_PATH" \
    --dump_folder "${DUMP_FOLDER:-outputs/qwen3_14b}" \
    "$@"
