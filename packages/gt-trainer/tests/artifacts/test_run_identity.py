"""A run's identity counts everything that a capture reads, and is the same on ranks that are alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch._functorch.config

from gt_config import Fingerprint, explain_difference, refuse_stale
from gt_config.errors import StaleFingerprintError
from gt_trainer.artifacts import run_identity
from gt_trainer.artifacts.run_identity import (
    NO_PART_OF_THE_GRAPH,
    PACKAGES,
    Machine,
    RunSettings,
    definitions,
    step_identity,
    topology_of_run,
)
from gt_trainer.artifacts.stage_names import StageNames
from gt_trainer.dry_run.fake_step import fake_step
from gt_trainer.launcher import run_in_child
from gt_trainer.models import llama3
from gt_trainer.steps.recipe import passes_of

WORLD_SIZE = 4
Change = Callable[[dict[str, Any]], None]


def identity(change: Change = lambda parts: None, *, rank: int = 0) -> Fingerprint:
    """Of llama3's debug model on FSDP 2 x TP 2, with something changed."""
    config = llama3.llama3_debugmodel()
    config.parallelism = dataclasses.replace(config.parallelism, tensor_parallel_degree=2)
    config.training.seq_len, config.training.local_batch_size = 32, 2
    with fake_step(config, WORLD_SIZE, rank=rank) as step:
        parts: dict[str, Any] = {
            "settings": RunSettings(
                compile=config.compile,
                topology=topology_of_run(step.parallel_dims, config.training, config.parallelism),
                model=config.model_spec.model,
                loss=config.loss,
                parallelism=config.parallelism,
                training=config.training,
                debug=config.debug,
                machine=Machine(device="cpu"),
            ),
            "model": step.model,
            "loss_fn": step.loss_fn,
            "arguments": step.inputs,
            "passes": passes_of(config.compile, "STEP"),
        }
        change(parts)
        return step_identity(parts.pop("settings"), **parts)


@cache
def unchanged() -> Fingerprint:
    return in_child(identity)


def in_child(function: Callable[..., Any]) -> Any:
    """Process groups, and what DTensor keeps of them, end with the child."""
    return run_in_child(function, timeout_seconds=300)


def with_settings(**fields: Any) -> Change:
    def change(parts: dict[str, Any]) -> None:
        settings = parts["settings"]
        held = {
            name: dataclasses.replace(getattr(settings, name), **value)
            for name, value in fields.items()
        }
        parts["settings"] = dataclasses.replace(settings, **held)

    return change


def with_hook(parts: dict[str, Any]) -> None:
    parts["model"].norm.register_forward_hook(lambda module, args, result: None)


def with_evaluation(parts: dict[str, Any]) -> None:
    parts["model"].layers["0"].eval()


def with_frozen_weight(parts: dict[str, Any]) -> None:
    parts["model"].norm.weight.requires_grad_(False)


def with_longer_batch(parts: dict[str, Any]) -> None:
    tokens, labels, count, extra = parts["arguments"]
    parts["arguments"] = (torch.cat([tokens, tokens], dim=1), labels, count, extra)


def with_other_mask(parts: dict[str, Any]) -> None:
    mask = parts["arguments"][3]["attention_masks"]
    parts["arguments"][3]["attention_masks"] = mask.to(torch.uint8)


def without_last_pass(parts: dict[str, Any]) -> None:
    parts["passes"] = parts["passes"][:-1]


def with_another_layer(parts: dict[str, Any]) -> None:
    config = parts["settings"].model
    layers = [dataclasses.replace(each) for each in config.layers]
    layers[2].attention = dataclasses.replace(layers[2].attention, n_heads=8)
    parts["settings"] = dataclasses.replace(
        parts["settings"], model=dataclasses.replace(config, layers=layers)
    )


def with_scale_set_by_hand(parts: dict[str, Any]) -> None:
    parts["model"].layers["0"].attention.scaling = 0.5


def with_attribute_of_the_users(parts: dict[str, Any]) -> None:
    parts["model"].norm.clamp_to = 3


def with_other_forward(parts: dict[str, Any]) -> None:
    own = parts["model"].norm.forward
    parts["model"].norm.forward = lambda x: own(x) * 2


def with_partitioner_budget(parts: dict[str, Any]) -> None:
    torch._functorch.config.activation_memory_budget = 0.5


def with_autocast(parts: dict[str, Any]) -> None:
    torch.set_autocast_enabled("cpu", True)


def with_stage(parts: dict[str, Any]) -> None:
    layers = tuple(range(len(parts["settings"].model.layers)))
    parts["stage"] = StageNames(stage_index=0, num_stages=1, layers=layers)


def with_plan(parts: dict[str, Any]) -> None:
    run_identity.identity_of_plan = lambda options, model, renamed: "a digest"  # in a child


CHANGES: dict[str, tuple[Change, str]] = {
    "memory policy": (
        with_settings(compile={"memory_policy": "selective"}),
        "config.memory_policy",
    ),
    "world": (with_settings(topology={"world": 8}), "topology.world"),
    "reshard": (
        with_settings(parallelism={"fsdp_reshard_after_forward": "always"}),
        'parallelism["fsdp_reshard_after_forward"]',
    ),
    "backend": (
        with_settings(parallelism={"spmd_backend": "full_dtensor"}),
        'parallelism["spmd_backend"]',
    ),
    "reduction": (
        with_settings(training={"mixed_precision_reduce": "bfloat16"}),
        'training["mixed_precision_reduce"]',
    ),
    "loss": (with_settings(loss={"num_chunks": 4}), 'loss["num_chunks"]'),
    "determinism": (with_settings(debug={"deterministic": True}), 'debug["deterministic"]'),
    "device": (with_settings(machine={"device": "cuda"}), 'environment["device"]'),
    "capability": (
        with_settings(machine={"capability": "9.0"}),
        'environment["device capability"]',
    ),
    "hook": (with_hook, 'model["modules"]["norm"]'),
    "mode": (with_evaluation, 'model["modules"]["layers.*"]'),
    "gradient": (with_frozen_weight, 'model["parameters"]["norm.weight"]'),
    "layer": (with_another_layer, 'model["config"]["layers"]'),
    "batch": (with_longer_batch, 'batch["leaves"]["[0]"]'),
    "mask": (with_other_mask, 'batch["leaves"]["[3][\'attention_masks\']"]'),
    "pass": (without_last_pass, "passes"),
    "autocast": (with_autocast, 'global_modes["autocast"]'),
    "scale": (with_scale_set_by_hand, 'model["attributes"]["layers.*.attention.scaling"]'),
    "attribute": (with_attribute_of_the_users, 'model["attributes"]["norm.clamp_to"]'),
    "forward": (with_other_forward, 'model["attributes"]["norm.forward"]'),
    "partitioner": (
        with_partitioner_budget,
        'pytorch["functorch.activation_memory_budget"]',
    ),
    "stage": (with_stage, 'stage["is_first"]'),
    "plan": (with_plan, "plan"),
    "microbatches": (lambda parts: parts.update(num_microbatches=2), 'batch["num_microbatches"]'),
}


def test_every_change_is_named():
    def identities() -> dict[str, Fingerprint]:
        return {name: identity(change) for name, (change, _) in CHANGES.items()}

    for name, found in in_child(identities).items():
        paths = [each.path for each in explain_difference(unchanged(), found)]
        assert any(path.startswith(CHANGES[name][1]) for path in paths), (name, paths)


def test_a_stored_graph_is_refused_by_each_field_of_which_its_fingerprint_is_made():
    current = unchanged()
    assert len(current.fields) > 500
    for path, text in current.fields.items():
        stored = Fingerprint(fields={**current.fields, path: f"{text} once"})
        assert stored.digest != current.digest
        with pytest.raises(StaleFingerprintError) as refused:
            refuse_stale(stored=stored, current=current)
        assert [each.path for each in refused.value.differences] == [path]


def test_versions_and_sources_of_each_package_are_fields():
    for package in PACKAGES:
        assert f'environment["{package}"]' in unchanged().fields
        assert len(unchanged().fields[f'environment["sources of {package}"]']) == 66
    for name in ("python", "torch", "torch git", "torch cuda", "torchtitan", "transformers"):
        assert f'environment["{name}"]' in unchanged().fields
    assert 'definitions["torchtitan.models.llama3.model"]' in unchanged().fields


def test_a_changed_source_file_changes_the_digest(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "made_up_package"
    package.mkdir()
    (package / "__init__.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    digests = []
    for text in ("x = 1\n", "x = 2\n", "x = 1\n"):
        (package / "__init__.py").write_text(text)
        run_identity.sources_digest.cache_clear()
        digests.append(run_identity.sources_digest("made_up_package"))
    assert digests[0] == digests[2] != digests[1]
    assert run_identity.sources_digest("no_such_package") is None


def test_ranks_that_are_alike_have_one_identity():
    found = {in_child(lambda rank=rank: identity(rank=rank)).digest for rank in range(WORLD_SIZE)}
    assert found == {unchanged().digest}


def test_what_is_left_out_are_fields_that_exist():
    config = llama3.llama3_debugmodel()
    parts = {
        "run": config,
        "model": config.model_spec.model,
        "loss": config.loss,
        "parallelism": config.parallelism,
        "training": config.training,
        "debug": config.debug,
    }
    assert {*parts, "pytorch"} == NO_PART_OF_THE_GRAPH.keys()
    for name, part in parts.items():
        assert {field.name for field in dataclasses.fields(part)} >= NO_PART_OF_THE_GRAPH[name]


def test_code_in_a_folder_of_the_users_counts_with_all_of_its_package(tmp_path, monkeypatch):
    package = tmp_path / "users_model"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "operations.py").write_text("def act(x): return x * 2")
    (package / "model.py").write_text(
        "from torch import nn\nfrom users_model.operations import act\n"
        "class Net(nn.Module):\n    def forward(self, x): return act(x)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def digest() -> str:
        return in_child(_digest_of_users_model)

    before = digest()
    assert digest() == before
    (package / "operations.py").write_text("def act(x): return x * 300")
    assert digest() != before


def _digest_of_users_model() -> str:
    from users_model.model import Net

    return str(dict(definitions(Net(), None)))


def test_neither_names_of_machines_nor_paths_enter():
    import os
    import socket

    text = unchanged().to_json()
    assert socket.gethostname() not in text
    assert os.getcwd() not in text
