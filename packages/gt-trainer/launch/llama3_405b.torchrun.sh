#!/bin/bash
# Llama 3.1 405B on 1024 H100: FSDP 128 x TP 8. Start it on each of the 128 nodes:
# HF_ASSETS_PATH=... RDZV_ENDPOINT=host:port ./llama3_405b.torchrun.sh [more options of gt-train]
# Never run on such a machine by its authors; gt-trainer/launch/README.md explains it.
set -euo pipefail
: "${HF_ASSETS_PATH:?folder with the tokenizer of Llama 3.1 405B}"
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-12}"

torchrun --nnodes 128 --nproc-per-node 8 --numa-binding "${NUMA_BINDING:-node}" \
    --rdzv-backend c10d --rdzv-id "${RDZV_ID:-llama3_405b}" \
    --rdzv-endpoint "${RDZV_ENDPOINT:?host:port of one of the nodes}" \
    -m gt_trainer --module llama3 --config llama3_405b \
    --hf_assets_path "$HF_ASSETS_PATH" \
    --dump_folder "${DUMP_FOLDER:-outputs/llama3_405b}" \
    "$@"
