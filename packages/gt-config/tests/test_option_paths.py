"""Options by their paths: values, defaults, choices, copies."""

import dataclasses

from gt_config import CompileConfig, EpOverlapConfig
from gt_config.option_paths import (
    default_option,
    option_at,
    option_choices,
    option_paths,
    with_option,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Extended(CompileConfig):
    prefetch_layers: int = 2
    added: bool = False


def test_every_field_has_a_path_also_one_that_a_subclass_adds():
    paths = option_paths(Extended)
    assert {"mode", "ep_overlap.num_chunks", "added"} <= {*paths}
    assert "ep_overlap" not in paths
    assert {*paths} - {*option_paths(CompileConfig)} == {"added"}


def test_values_are_read_and_replaced_at_any_depth():
    config = Extended(ep_overlap=EpOverlapConfig(num_chunks=4))
    assert option_at(config, "ep_overlap.num_chunks") == 4
    changed = with_option(with_option(config, "ep_overlap.num_chunks", 3), "mode", "none")
    assert changed == Extended(mode="none", ep_overlap=EpOverlapConfig(num_chunks=3))


def test_defaults_are_those_of_the_class():
    assert default_option(CompileConfig, "prefetch_layers") == 1
    assert default_option(Extended, "prefetch_layers") == 2
    assert default_option(Extended, "ep_overlap.num_chunks") == 2


def test_choices_are_listed_where_they_can_be():
    assert option_choices(CompileConfig, "ep_overlap.chunk_dim") == ("batch", "seq")
    assert option_choices(Extended, "added") == (False, True)
    assert option_choices(CompileConfig, "prefetch_layers") == ()
