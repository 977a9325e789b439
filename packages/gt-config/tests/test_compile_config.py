"""The configuration dataclasses: frozen, plain, documented field by field."""

import ast
import dataclasses
import inspect
import textwrap
from typing import get_type_hints

import pytest

from gt_config import AutoParallelConfig, CompileConfig, EpOverlapConfig, Topology
from gt_config._field_types import describe_hint

CONFIGS = [CompileConfig, AutoParallelConfig, EpOverlapConfig]
ALL = [*CONFIGS, Topology]


@pytest.mark.parametrize("cls", ALL)
def test_dataclasses_are_frozen_slotted_and_keyword_only(cls):
    params = cls.__dataclass_params__
    assert params.frozen
    assert "__dict__" not in dir(cls)
    assert all(field.kw_only for field in dataclasses.fields(cls))


@pytest.mark.parametrize("cls", ALL)
def test_every_field_has_a_docstring_for_help_texts(cls):
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    documented = {
        statement.target.id
        for statement, following in zip(definition.body, definition.body[1:], strict=False)
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
    }
    assert documented == {field.name for field in dataclasses.fields(cls)}


@pytest.mark.parametrize("cls", CONFIGS)
def test_every_field_is_of_a_type_that_a_command_line_can_render(cls):
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if not dataclasses.is_dataclass(hint):
            describe_hint(hint)  # raises TypeError for anything outside the plain set


@pytest.mark.parametrize("cls", CONFIGS)
def test_every_field_has_a_default(cls):
    assert cls() == cls()


def test_defaults_are_a_verified_trace_without_inductor_that_saves_everything():
    config = CompileConfig()
    assert config.mode == "aot_fx_trace"
    assert config.inductor_compilation == "none"
    assert config.memory_policy == "save_all"
    assert config.verify_passes is True
    assert config.on_shape_change == "error"
    assert config.ep_overlap == EpOverlapConfig(
        enabled=False,
        num_chunks=2,
        chunk_dim="batch",
        strategy="graph",
        module_fqn="layers.*",
        disable_early_grad_accumulation=False,
    )


def test_a_trainer_can_subclass_to_derive_what_its_framework_reads():
    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    class TrainerCompileConfig(CompileConfig):
        @property
        def enable(self) -> bool:
            return self.mode != "none"

    assert TrainerCompileConfig().enable
    assert not dataclasses.replace(TrainerCompileConfig(), mode="none").enable
