"""What is at odds with ranks that share a sequence, each by name."""

from __future__ import annotations

import dataclasses

from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.muse_glimmer import config_registry

from gt_config import ConfigError, Topology
from gt_trainer.models import any_decoder, llama3
from gt_trainer.preflight.placement_violations import context_parallel_violations

TOPOLOGY = Topology(world=2, cp=2, batch_size=2, seq_len=512)


def config_of(attention=None, **parallelism):
    config = llama3.llama3_debugmodel()
    if attention is not None:
        config.model_spec.model.layers[0].attention.inner_attention = attention
    config.parallelism = dataclasses.replace(config.parallelism, **parallelism)
    return config


def text(config, topology=TOPOLOGY):
    found = [*context_parallel_violations(config, topology)]
    return str(ConfigError(found)) if found else ""


def test_both_balancers_and_none_are_accepted():
    for balancer in ("headtail", "ptrr", None):
        assert text(config_of(context_parallel_load_balancer=balancer)) == ""


def test_an_unknown_balancer_and_a_key_of_masks_are_refused_at_once():
    config = config_of(
        context_parallel_load_balancer="best", context_parallel_ptrr_mask_key="global"
    )
    assert text(config) == (
        "the configuration has 2 problems:\n"
        "  1. --parallelism.context_parallel_load_balancer is 'best'\n"
        "     allowed: None, 'headtail' or 'ptrr'\n"
        "     fix: use one\n"
        "  2. --parallelism.context_parallel_ptrr_mask_key is 'global'\n"
        "     allowed: None: the layers of our models have one mask\n"
        "     fix: leave the flag out"
    )


def test_a_balancer_that_would_balance_nothing_is_refused():
    alone = dataclasses.replace(TOPOLOGY, world=1, cp=1)
    assert text(config_of(context_parallel_load_balancer="ptrr"), alone) == (
        "the configuration has 1 problem:\n"
        "  1. --parallelism.context_parallel_load_balancer is 'ptrr'\n"
        "     allowed: its default 'headtail' with --parallelism.context_parallel_degree 1: nothing "
        "is divided\n"
        "     fix: leave the flag out"
    )
    assert text(config_of(), alone) == ""


def test_blocks_of_queries_are_not_divided():
    uneven = dataclasses.replace(TOPOLOGY, seq_len=320)
    assert text(config_of(), uneven) == ""
    assert text(config_of(context_parallel_load_balancer="ptrr"), uneven) == (
        "the configuration has 1 problem:\n"
        "  1. --training.seq_len is 320\n"
        "     allowed: a multiple of 256 (--parallelism.context_parallel_degree 2 * 128 queries, a "
        "block of ptrr)\n"
        "     fix: use 512, or fewer ranks"
    )
    assert text(config_of(FlexAttention.Config(block_size=(256, 128))), uneven) == (
        "the configuration has 1 problem:\n"
        "  1. --training.seq_len is 320\n"
        "     allowed: a multiple of 512 (--parallelism.context_parallel_degree 2 * 256 queries, a "
        "block of the mask)\n"
        "     fix: use 512, or fewer ranks"
    )


def test_attention_by_where_documents_begin_is_refused():
    assert text(config_of(VarlenAttention.Config())) == (
        "the configuration has 1 problem:\n"
        "  1. --parallelism.context_parallel_degree is 2\n"
        "     allowed: 1 for a model that attends with VarlenAttention: it finds documents by where "
        "they begin and end, and has as many queries of each as keys\n"
        "     fix: leave the flag out, or choose a --config that attends with FlexAttention"
    )


def test_a_model_whose_layers_have_masks_of_their_own_is_refused():
    config = any_decoder.adapt_any(config_registry.muse_glimmer_debugmodel(), is_debug=True)
    config.parallelism = dataclasses.replace(config.parallelism, context_parallel_degree=2)
    assert text(config) == (
        "the configuration has 1 problem:\n"
        "  1. --parallelism.context_parallel_degree is 2\n"
        "     allowed: 1 for a model whose layers have masks of their own: it makes them for whole "
        "sequences in their order, and ranks that share one have it in another\n"
        "     fix: leave the flag out"
    )
