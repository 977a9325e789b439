"""Patterns and modules that the model does not have are refused before it trains."""

from dataclasses import replace

from refused_configurations import changed, refusal

from gt_trainer.models.llama3 import llama3_debugmodel
from gt_trainer.preflight.preflight import model_name_violations


def test_patterns_of_no_parameter_and_parameters_of_no_pattern_are_refused(tmp_path):
    config = changed(llama3_debugmodel(), tmp_path)
    (group,) = config.optimizer.param_groups
    config.optimizer.param_groups = [replace(group, pattern=each) for each in ("nonsense", "norm")]
    text = refusal(config, 1)
    assert "the configuration has 2 problems" in text
    assert "--optimizer.param_groups.0.pattern is 'nonsense'" in text
    assert "--optimizer.param_groups.1.pattern is 'norm'" in text
    assert "let the last pattern be '.*'" in text
    config.optimizer.param_groups = [replace(group, pattern=each) for each in ("norm", ".*")]
    assert not [*model_name_violations(config)]


def test_saved_operators_of_no_module_are_refused(tmp_path):
    def with_saved(*names):
        options = {"memory_policy": "full_recompute", "full_recompute_saved_ops": names}
        return changed(llama3_debugmodel(), tmp_path, compile=options)

    text = refusal(with_saved("layers.*.attention::aten.nonsense", "blocks.*::aten.mm"), 1)
    assert "the configuration has 2 problems" in text
    assert "there is no aten.nonsense" in text
    assert "--compile.full_recompute_saved_ops is 'blocks.*::aten.mm'" in text
    assert not [*model_name_violations(with_saved("layers.*.attention::aten.mm.default"))]
