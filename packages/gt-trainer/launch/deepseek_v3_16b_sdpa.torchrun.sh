#!/bin/bash
# DeepSeek V3 16B without FlexAttention on 32 H100: FSDP 32, EP 32. Start it on each of the 4 nodes:
# HF_ASSETS_PATH=... RDZV_ENDPOINT=host:port ./deepseek_v3_16b_sdpa.torchrun.sh [more options of gt-train]
# Never run on such a machine by its authors; gt-trainer/launch/README.md explains it.
set -euo pipefail
: "${HF_ASSETS_PATH:?folder with the tokenizer of DeepSeek V3 16B without FlexAttention}"
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-12}"

torchrun --nnodes 4 --nproc-per-node 8 --numa-binding "${NUMA_BINDING:-node}" \
    --rdzv-backend c10d --rdzv-id "${RDZV_ID:-deepseek_v3_16b_sdpa}" \
    --rdzv-endpoint "${RDZV_ENDPOINT:?host:port of one of the nodes}" \
    -m gt_trainer --module deepseek_v3 --config deepseek_v3_16b_sdpa \
    --hf_assets_path "$HF_ASSETS_PATH" \
    --dump_folder "${DUMP_FOLDER:-outputs/deepseek_v3_16b_sdpa}" \
    "$@"
