"""The default recipe, and how users add to it and leave out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from expecttest import assert_expected_inline
from pass_graphs import capture
from torch.fx import GraphModule

from gt_config import CompileConfig
from gt_passes import (
    GraphPass,
    PassContext,
    PassPipeline,
    PassReport,
    RecipeError,
    UnknownPassError,
    default_recipe,
    register_pass,
    registry,
)


@pytest.fixture
def context() -> PassContext:
    return PassContext.from_graph(capture(lambda x: x.cos(), torch.ones(2)))


def recipe(context: PassContext, **options: object) -> PassPipeline:
    return default_recipe(CompileConfig(**options), context=context)


def names(context: PassContext, **options: object) -> list[str]:
    return [graph_pass.name for graph_pass in recipe(context, **options).passes]


def test_the_recipe_of_a_whole_step(context: PassContext):
    assert names(context) == ["remove-dead-code", "canonicalize-views", "share-all-gathers"]


def test_passes_can_be_left_out(context: PassContext):
    assert names(context, disable_passes=("canonicalize-views",)) == [
        "remove-dead-code",
        "share-all-gathers",
    ]


def test_added_passes_run_at_the_end_also_a_second_time(context: PassContext):
    assert names(context, passes=("remove-dead-code",))[-1] == "remove-dead-code"
    assert len(names(context, passes=("remove-dead-code",))) == 4


def test_all_unknown_names_are_one_error(context: PassContext):
    with pytest.raises(UnknownPassError) as error:
        names(context, passes=("remove-code",), disable_passes=("canonicalise-views",))
    assert error.value.names == ("remove-code", "canonicalise-views")


def test_contradictions_are_one_error(context: PassContext, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "_PASSES", dict(registry._PASSES))

    @register_pass
    @dataclass(frozen=True, kw_only=True)
    class CapBuckets(GraphPass):
        name: ClassVar[str] = "cap-buckets"
        preserves_numerics: ClassVar[bool] = True

        cap_bytes: int

        def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
            return PassReport(changed=False)

    with pytest.raises(RecipeError) as error:
        names(context, passes=("cap-buckets", "remove-dead-code"),
              disable_passes=("cap-buckets", "remove-dead-code"))  # fmt: skip
    assert_expected_inline(
        str(error.value),
        """\
the recipe cannot be built:
  - 'cap-buckets' is disabled, and the recipe has only remove-dead-code, canonicalize-views, share-all-gathers
  - 'cap-buckets' is both added and disabled
  - 'remove-dead-code' is both added and disabled
  - 'cap-buckets' cannot be added by name, for want of cap_bytes: give PassPipeline an instance""",
    )


def test_options_reach_the_pipeline(context: PassContext, tmp_path):
    graph_module = capture(lambda x: x.cos(), torch.ones(2))
    pipeline = default_recipe(
        CompileConfig(verify_passes=False),
        context=context,
        dump_directory=tmp_path,
        estimate_peak_bytes=lambda gm: 5,
    )
    report = pipeline.run(graph_module)
    assert not report.verified
    assert report.records[0].before.peak_memory_bytes == 5
    assert len(list(tmp_path.iterdir())) == 6
