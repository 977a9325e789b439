"""What the workers of ``test_compile_whole_graph.py`` run: a sharded step, compiled and not."""

from __future__ import annotations

import copy
import os
import tempfile

import torch
from inductor_cases import COMPILER, run_on
from sharded_step_cases import capture_two_microbatches, flat

from gt_passes import CompileWholeGraph


def outputs_captured_and_compiled() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Loss and gradient shards of this rank from the captured graph, and from the compiled one."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        step, model, tokens = capture_two_microbatches()
        unpassed = copy.deepcopy(step.graph_module)
        captured = step.bind(model, executable=unpassed)(tokens)
        run_on(CompileWholeGraph(compiler=COMPILER), step)
        return flat(captured), flat(step.bind(model)(tokens))
