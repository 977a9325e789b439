"""What is counted of debug models."""

import pytest
import torch
from torch import nn

from gt_trainer.device import intended_for
from gt_trainer.models.deepseek_v3 import deepseek_v3_debugmodel
from gt_trainer.models.llama3 import llama3_debugmodel
from gt_trainer.planning.candidates import NoRecipeError
from gt_trainer.planning.counted_model import _layer, _widths, counted_model


def test_every_parameter_is_counted_once():
    with intended_for("cuda"):
        for make in (llama3_debugmodel, deepseek_v3_debugmodel):
            config = make()
            counted = counted_model(config)
            with torch.device("meta"):
                model = config.model_spec.model.build()
            assert counted.num_parameters == sum(p.numel() for p in model.parameters())
            assert counted.output_products == model.lm_head.weight.numel()
            assert counted.loss_chunks == config.loss.num_chunks


def test_layers_have_what_their_configuration_says():
    with intended_for("cuda"):
        dense = counted_model(llama3_debugmodel())
        sparse = counted_model(deepseek_v3_debugmodel())
    assert (len(dense.layers), dense.dim, dense.num_experts) == (6, 256, None)
    assert dense.layers[0].expert_parameters == 0
    assert dense.layers[0].repeated_dense < dense.layers[0].dense_products
    of_experts = sparse.layers[-1]
    assert (sparse.num_experts, of_experts.sent_copies) == (8, 3.0)
    assert 0 < of_experts.expert_outputs_width < of_experts.outputs_width
    # 16 heads, whose queries and keys are 192 wide and whose values 128.
    assert (of_experts.query_width, of_experts.keys_values_width) == (3072, 3072 + 2048)
    assert (dense.layers[0].query_width, dense.layers[0].keys_values_width) == (256, 512)
    assert of_experts.expert_products == of_experts.expert_parameters * 3 / 8


def test_degrees_that_a_model_cannot_have_do_not_matter():
    with intended_for("cuda"):
        config = llama3_debugmodel()
        config.parallelism.tensor_parallel_degree = 3
        assert counted_model(config).num_parameters > 0


def test_a_layer_without_attention_is_refused_with_what_it_has():
    layer = nn.ModuleDict({"mixer": nn.Linear(2, 2, bias=False)})
    with pytest.raises(NoRecipeError, match=r"no attention\.wo\.weight.*it has mixer\.weight"):
        _layer(layer, None, 0)


def test_keys_and_values_of_projections_of_their_own_are_counted():
    rows = {"attention.wq.weight": 16, "attention.wk.weight": 4, "attention.wv.weight": 4}
    shapes = {name: torch.Size([width, 16]) for name, width in rows.items()}
    assert _widths(shapes, 16) == (16, 8)
