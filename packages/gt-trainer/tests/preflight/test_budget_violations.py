"""A budget below what the state of training takes is refused in the launching process."""

import pytest
from refused_configurations import changed, refusal

from gt_autoparallel import PlacementRequest
from gt_config import AutoParallelConfig
from gt_trainer.models import llama3
from gt_trainer.preflight.plan_file_violations import model_on_meta
from gt_trainer.preflight.preflight import check_configuration

NUM_RANKS, GIB = 4, 2**30


def configuration(folder, gib, *, is_placed=True):
    """A run of one small layer on 2 x 2 ranks."""
    config = llama3.llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:1]
    solver = AutoParallelConfig(memory_budget_gib=gib)
    return changed(
        config,
        folder,
        training={"seq_len": 32, "local_batch_size": 2},
        parallelism={"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
        compile={"autoparallel": is_placed, "autoparallel_solver": solver},
    )


@pytest.fixture(scope="module")
def least_gib(tmp_path_factory) -> float:
    """Parameters, gradients and Adam's two states, a quarter of each."""
    assert PlacementRequest().optimizer_state_copies == 2
    model = model_on_meta(configuration(tmp_path_factory.mktemp("least"), 1.0))
    return 4 * sum(each.nbytes for each in model.parameters()) / NUM_RANKS / GIB


def test_a_budget_that_parameters_exceed_is_refused(least_gib, tmp_path):
    gib = 0.999 * least_gib
    for will_train in (True, False):
        found = refusal(configuration(tmp_path, gib), NUM_RANKS, will_train=will_train)
        assert found == (
            "the configuration has 1 problem:\n"
            f"  1. --compile.autoparallel_solver.memory_budget_gib is {gib!r}\n"
            f"     allowed: at least {least_gib + 0.0005:.3f} on 4 ranks: so much do parameters, "
            "gradients and optimizer state take, cut over all of them, without any activation\n"
            "     fix: allow more, or use more ranks"
        )


def test_a_budget_that_the_solver_has_to_judge_is_accepted(least_gib, tmp_path):
    check_configuration(configuration(tmp_path, 1.001 * least_gib), NUM_RANKS)


def test_frozen_parameters_have_no_gradients(least_gib, tmp_path, monkeypatch):
    def frozen(config):
        return model_on_meta(config).requires_grad_(requires_grad=False)

    monkeypatch.setattr("gt_trainer.preflight.preflight.model_on_meta", frozen)
    check_configuration(configuration(tmp_path, 0.76 * least_gib), NUM_RANKS)
    assert "is 0.0" in refusal(configuration(tmp_path, 0.74 * least_gib), NUM_RANKS)
