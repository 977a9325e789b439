"""Options that our placement does not honour. It is tested with models, in tests-integration."""

from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC

from gt_config import ConfigError
from gt_trainer.preflight.placement_violations import unsupported_placement


def test_options_that_the_placement_honours_pass():
    parallelism = ParallelismConfig(
        spmd_backend="partial_dtensor", tensor_parallel_degree=2, context_parallel_degree=2
    )
    assert not [*unsupported_placement(parallelism, TrainingConfig(), activation_checkpoint=None)]


def test_every_option_that_it_does_not_honour_is_refused_at_once():
    violations = unsupported_placement(
        ParallelismConfig(spmd_backend="full_dtensor"),
        TrainingConfig(enable_cpu_offload=True),
        activation_checkpoint=FullAC.Config(),
    )
    assert str(ConfigError(violations)) == (
        "the configuration has 3 problems:\n"
        "  1. --parallelism.spmd_backend is 'full_dtensor'\n"
        "     allowed: 'partial_dtensor', whose collectives a capture records\n"
        "     fix: leave the flag out\n"
        "  2. --training.enable_cpu_offload is True\n"
        "     allowed: False: it configures torch's FSDP2, which is not used here\n"
        "     fix: leave the flag out\n"
        "  3. activation-checkpoint is 'FullAC.Config'\n"
        "     allowed: none: recomputation is decided on the captured graph\n"
        "     fix: choose activation-checkpoint:none, and see --compile.memory_policy"
    )
