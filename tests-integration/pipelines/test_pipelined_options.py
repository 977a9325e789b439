"""Options of ``--compile`` in pipelines of torchtitan's models, on several processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from pipelines.cases import PipelineCase
from pipelines.option_cases import trained, trained_with_symmetric_memory
from training_cases import Case

from gt_trace.testing import GlooWorkers

LLAMA3 = Case(module="llama3", config="llama3_debugmodel", num_layers=4, seq_len=32)
TP = dataclasses.replace(LLAMA3, parallelism={"tensor_parallel_degree": 2})


@pytest.mark.slow
def test_asynchronous_tensor_parallelism_trains_as_collectives_do(
    four: GlooWorkers, tmp_path: Path
):
    plain = PipelineCase(model=TP, schedule="ZBVZeroBubble")
    fused = dataclasses.replace(plain, options={"async_tensor_parallel": True})
    expected = four.run(trained, plain, str(tmp_path / "plain"))
    found = four.run(trained_with_symmetric_memory, fused, str(tmp_path / "fused"))
    for each in found:
        assert each.counts["async-tensor-parallel: all_gathers_fused"] > 0
        assert each.counts["async-tensor-parallel: reduce_scatters_fused"] > 0
    assert len(found[0].losses) == 2
    assert found[0].losses == pytest.approx(expected[0].losses, rel=1e-5)
