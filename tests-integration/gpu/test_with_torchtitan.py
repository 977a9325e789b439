"""Training as ``gt-train`` starts it, on a GPU: needs torchtitan, as nothing else here does."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu.sites import Site

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed here"
)

_NUM_STEPS = 5
_STEPS = ("--training.steps", str(_NUM_STEPS), "--training.seq_len", "256")
_CAPTURED = ("--compile.mode", "aot_fx_trace", "--compile.bitwise")


def losses_of(folder: Path, *flags: str, device: str) -> list[float]:
    """The losses of a short run of the Llama 3 debug model."""
    command = [sys.executable, "-m", "gt_trainer", *_STEPS, "--dump_folder", str(folder), *flags]
    environment = {**os.environ, "GT_DEVICE": device, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    finished = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


@pytest.mark.slow
def test_captured_training_is_eager_training_to_the_bit(site: Site, tmp_path: Path) -> None:
    device = site.device.type
    flags = ("--debug.deterministic", "--debug.seed", "1")
    eager = losses_of(tmp_path / "eager", "--compile.mode", "none", *flags, device=device)
    captured = losses_of(tmp_path / "captured", *_CAPTURED, *flags, device=device)
    assert len(eager) == _NUM_STEPS
    assert captured == eager


@pytest.mark.slow
def test_recorded_training_is_captured_training_to_the_bit(gpu: Site, tmp_path: Path) -> None:
    flags = (*_CAPTURED, "--debug.deterministic", "--debug.seed", "1")
    captured = losses_of(tmp_path / "captured", *flags, device="cuda")
    recorded = losses_of(tmp_path / "recorded", *flags, "--compile.cuda_graphs", device="cuda")
    assert recorded == captured


@pytest.mark.slow
def test_the_defaults_of_a_gpu_train(gpu: Site, tmp_path: Path) -> None:
    losses = losses_of(tmp_path / "defaults", device="cuda")
    assert len(losses) == _NUM_STEPS
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_masked_attention_is_its_definition_on_both_devices(site: Site, kv_heads: int) -> None:
    from gt_trainer.decoder.attention import DocumentCausalSDPA, document_causal_mask

    positions = torch.tensor([[*range(24), *range(40)]] * 2, device=site.device)
    mask = document_causal_mask(positions)
    q, k, v = (
        torch.randn(2, 64, heads, width, device=site.device, requires_grad=True)
        for heads, width in ((4, 48), (kv_heads, 48), (kv_heads, 32))
    )
    out = DocumentCausalSDPA.Config().build()(
        q, k, v, attention_masks=mask, enable_gqa=kv_heads != 4
    )
    wide_k, wide_v = (each.repeat_interleave(4 // kv_heads, dim=2) for each in (k, v))
    scores = torch.einsum("bqnh,bknh->bnqk", q, wide_k) * 48**-0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    expected = torch.einsum("bnqk,bknh->bqnh", weights, wide_v)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v), retain_graph=True)
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    torch.testing.assert_close(gradients, wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_scaled_dot_products_train(gpu: Site, tmp_path: Path) -> None:
    flags = ("--config", "deepseek_v3_debugmodel_sdpa", "--compile.bitwise")
    losses = losses_of(tmp_path / "sdpa", *flags, device="cuda")
    assert losses[-1] < losses[0]
