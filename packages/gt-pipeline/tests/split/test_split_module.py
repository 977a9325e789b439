"""Copies of the part of a model that a stage keeps."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch
from split_models import Decoder, LayerShelf, Nested, Shelved
from torch import nn
from torch.profiler import ProfilerActivity, profile

from gt_pipeline.errors import StageNamesError, TiedParametersError
from gt_pipeline.split import RemovalPolicy, SharedGroup, split_module, stage_modules
from gt_pipeline.split.removal import PassThrough

IDENTITY = RemovalPolicy(attribute="identity", entry="identity")


def names_of(module: nn.Module) -> list[str]:
    return list(module.state_dict())


@pytest.mark.parametrize("dict_like", [True, False], ids=["ModuleDict", "ModuleList"])
def test_what_is_kept_keeps_its_names_and_values(dict_like: bool):
    model = Decoder(4, dict_like=dict_like)
    stage = split_module(model, ["layers.2", "layers.3", "norm"])
    whole = model.state_dict()
    assert names_of(stage) == [
        name for name in whole if name.startswith(("layers.2.", "layers.3.", "norm."))
    ]
    for name, value in stage.state_dict().items():
        assert torch.equal(value, whole[name])
        assert value.data_ptr() != whole[name].data_ptr()
    assert stage.embed is None
    assert stage.head is None
    assert type(stage.layers) is type(model.layers)
    assert len(stage.layers) == 2


def test_the_whole_model_stays_as_it_was():
    model = Decoder(3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    split_module(model, ["layers.1"])
    assert names_of(model) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_stages_one_after_the_other_compute_what_the_model_does():
    model = Decoder(4, dict_like=False)
    names = [["embed", "layers.0"], ["layers.1", "layers.2"], ["layers.3", "norm", "head"]]
    stages = stage_modules(model, names, range(3))
    tokens = torch.arange(8).reshape(2, 4)
    passed = tokens
    for stage in stages.values():
        passed = stage(passed)
    assert torch.equal(passed, model(tokens))


def test_a_name_of_a_container_keeps_all_of_it():
    stage = split_module(Decoder(3), ["layers"])
    assert list(stage.layers.keys()) == ["0", "1", "2"]


def test_a_container_with_nothing_listed_stays_and_is_empty():
    stage = split_module(Decoder(3), ["norm"])
    assert isinstance(stage.layers, nn.ModuleDict)
    assert len(stage.layers) == 0


def test_containers_in_containers_keep_their_names():
    model = Nested()
    stage = split_module(model, ["towers.left.2", "towers.right.0", "towers.right.2"])
    assert names_of(stage) == [
        "seen",
        "towers.left.2.weight",
        "towers.left.2.bias",
        "towers.right.0.weight",
        "towers.right.0.bias",
        "towers.right.2.weight",
        "towers.right.2.bias",
    ]
    assert set(names_of(stage)) <= set(names_of(model))
    x = torch.rand(2, 8)
    expected = model.towers["right"][2](model.towers["right"][0](model.towers["left"][2](x)))
    stage.dropout = PassThrough()
    assert torch.equal(stage(x), expected)


def test_a_sequential_that_is_not_listed_is_an_attribute_like_any_other():
    stage = split_module(nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Sequential()}), ["a"])
    assert list(stage.keys()) == ["a"]
    model = Shelved(nn.Sequential(nn.Linear(2, 2)))
    model.head = nn.Linear(2, 2)
    assert split_module(model, ["head"]).shelf is None


def test_a_model_that_is_a_sequential_splits_by_its_numbers():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 1))
    first, last = stage_modules(model, [["0", "1"], ["2", "3"]], [0, 1]).values()
    assert names_of(last) == ["2.weight", "2.bias", "3.weight", "3.bias"]
    x = torch.rand(3, 2)
    assert torch.equal(last(first(x)), model(x))


def test_a_parameter_of_a_shell_stays_where_it_is_listed():
    model = Nested()
    assert split_module(model, ["towers.left.0"]).position is None
    stage = split_module(model, ["position", "towers.left.0"])
    assert torch.equal(stage.position, model.position)
    assert isinstance(stage.position, nn.Parameter)


def test_buffers_of_a_shell_are_on_every_stage_and_not_shared_with_the_model():
    model = Nested()
    stage = split_module(model, ["towers.left.0"])
    stage.seen += 1
    assert (stage.seen.item(), model.seen.item()) == (1, 0)


def test_a_list_that_is_none_of_pytorchs_is_split_by_its_protocol():
    model = Shelved(LayerShelf([nn.Linear(2, 2) for _ in range(3)]))
    stage = split_module(model, ["shelf.layer1"])
    assert names_of(stage) == ["shelf.layer1.weight", "shelf.layer1.bias"]
    x = torch.rand(1, 2)
    assert torch.equal(stage(x), model.shelf[1](x))


def test_a_list_that_counts_its_children_itself_is_refused_and_told_what_to_do():
    class Counting(LayerShelf):
        def __init__(self, layers: list[nn.Module]) -> None:
            super().__init__(layers)
            self.count = len(layers)

        def __len__(self) -> int:
            return self.count

    model = Shelved(Counting([nn.Linear(2, 2) for _ in range(3)]))
    with pytest.raises(StageNamesError) as caught:
        split_module(model, ["shelf.layer1"])
    assert str(caught.value) == (
        "stage of Shelved with 'shelf.layer1':\n"
        "  - 'shelf' (Counting) keeps its own record of its children: deleting entries does not "
        "shorten it; use RemovalPolicy(entry='identity')"
    )
    stage = split_module(model, ["shelf.layer1"], policy=IDENTITY)
    x = torch.rand(1, 2)
    assert torch.equal(stage(x), model.shelf[1](x))


def test_attributes_modes_hooks_and_settings_of_what_is_kept_survive():
    model = Decoder(2).eval()
    model.title = "kept"
    model.layers["1"].linear.weight.requires_grad_(False)
    calls: list[str] = []
    model.layers["1"].register_forward_hook(lambda *_: calls.append("hook"))
    stage = split_module(model, ["layers.1"])
    assert stage.title == "kept"
    assert not stage.training
    assert not stage.layers["1"].linear.weight.requires_grad
    stage(torch.rand(1, 8))
    assert calls == ["hook"]


class TestPolicy:
    def test_none_stands_in_for_entries_if_asked(self):
        stage = split_module(
            Decoder(2, dict_like=False), ["layers.1"], policy=RemovalPolicy(entry="none")
        )
        assert [layer is None for layer in stage.layers] == [True, False]
        assert "layers.1.linear.weight" in names_of(stage)

    def test_identity_returns_its_first_argument(self):
        stage = split_module(Decoder(3, dict_like=False), ["layers.1"], policy=IDENTITY)
        x = torch.rand(1, 8)
        assert len(stage.layers) == 3
        assert stage.layers[0](x, "mask") is x
        assert stage.norm(hidden=x, other=1) is x

    def test_a_callable_sees_name_and_child_and_says_what_to_put(self):
        seen: list[tuple[str, str]] = []

        def replace(name: str, child: nn.Module) -> nn.Module | None:
            seen.append((name, type(child).__name__))
            return None if name == "norm" else nn.Identity()

        policy = RemovalPolicy(attribute=replace, entry=replace)
        stage = split_module(Decoder(2), ["head", "layers.0"], policy=policy)
        assert seen == [("embed", "Embedding"), ("norm", "LayerNorm"), ("layers.1", "Block")]
        assert stage.norm is None
        assert isinstance(stage.layers["1"], nn.Identity)

    def test_a_replacement_may_not_bring_parameters(self):
        policy = RemovalPolicy(attribute=lambda name, child: nn.Linear(1, 1))
        with pytest.raises(StageNamesError) as caught:
            split_module(Decoder(1), ["layers.0", "norm"], policy=policy)
        assert str(caught.value) == (
            "stage of Decoder with 'layers.0', 'norm':\n"
            "  - the replacement of 'embed' has parameters of its own\n"
            "  - the replacement of 'head' has parameters of its own"
        )

    def test_an_unknown_policy_is_refused(self):
        with pytest.raises(ValueError, match="RemovalPolicy") as caught:
            RemovalPolicy(attribute="delete", entry="drop")  # type: ignore[arg-type]
        assert str(caught.value) == (
            "RemovalPolicy: attribute is 'delete', must be a callable or one of 'none', "
            "'identity'; entry is 'drop', must be a callable or one of 'delete', 'none', 'identity'"
        )


class TestNames:
    def test_every_wrong_name_is_listed_with_what_exists(self):
        with pytest.raises(StageNamesError) as caught:
            split_module(
                Decoder(2), ["norms", "layers.7", "norm", "norm", "layers.0.linear", "layers.0"]
            )
        assert str(caught.value) == (
            "stage of Decoder with 'norms', 'layers.7', 'norm', 'norm', 'layers.0.linear', "
            "'layers.0':\n"
            "  - 'norm' is listed 2 times\n"
            "  - there is no 'norms': Decoder has embed, layers, norm, head; did you mean 'norm'?\n"
            "  - there is no 'layers.7': layers has 0, 1\n"
            "  - 'layers.0.linear' lies in another name that is listed too"
        )

    def test_no_name_and_the_empty_name_are_refused(self):
        with pytest.raises(StageNamesError, match="the stage is empty"):
            split_module(Decoder(1), [])
        with pytest.raises(StageNamesError, match="there is no '': Decoder has embed"):
            split_module(Decoder(1), [""])

    def test_long_lists_of_what_exists_are_cut(self):
        with pytest.raises(StageNamesError, match=r"22, 23 and 16 more$"):
            split_module(Decoder(40, width=1), ["layers.99"])

    def test_a_stage_that_does_not_exist_is_refused(self):
        with pytest.raises(StageNamesError, match="there is no stage 2: stages are 0 to 1"):
            stage_modules(Decoder(1), [["embed", "layers"], ["norm", "head"]], [0, 2])


class TestTies:
    def test_parameters_that_would_come_apart_are_named(self):
        model = Decoder(1)
        model.head.weight = model.embed.weight
        with pytest.raises(TiedParametersError) as caught:
            split_module(model, ["embed", "layers.0"])
        assert str(caught.value) == (
            "stage of Decoder with 'embed', 'layers.0':\n"
            "  - 'embed.weight' would stay and 'head.weight' go, but they are one parameter: put "
            "them on one stage, or declare SharedGroup(('embed.weight', 'head.weight'))"
        )

    def test_parameters_that_share_memory_are_tied(self):
        model = Decoder(1)
        model.head.weight = nn.Parameter(model.embed.weight.data)
        with pytest.raises(TiedParametersError, match=r"'head\.weight' go"):
            split_module(model, ["embed"])

    def test_on_one_stage_they_stay_one(self):
        model = Decoder(1)
        model.head.weight = model.embed.weight
        stage = split_module(model, ["embed", "head"])
        assert stage.head.weight is stage.embed.weight

    def test_in_a_declared_group_each_stage_gets_its_copy(self):
        model = Decoder(1)
        model.head.weight = model.embed.weight
        groups = [SharedGroup(("embed.weight", "head.weight"))]
        names = [["embed"], ["layers", "norm", "head"]]
        first, last = stage_modules(model, names, [0, 1], shared_groups=groups).values()
        assert torch.equal(first.embed.weight, last.head.weight)
        assert first.embed.weight is not last.head.weight
        assert last.embed is None

    def test_a_module_under_two_names_is_kept_under_both_or_refused(self):
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
        model["b"] = model["a"]
        stage = split_module(model, ["a", "b"])
        assert stage["a"] is stage["b"]
        with pytest.raises(TiedParametersError, match=r"'a\.weight' would stay and 'b\.weight' go"):
            split_module(model, ["a"])

    def test_a_layer_that_is_repeated_is_one_layer_on_each_stage_that_has_it(self):
        layer = nn.Linear(2, 2)
        model = Shelved(nn.ModuleList([layer] * 4))
        groups = [
            SharedGroup(tuple(f"shelf.{index}.{each}" for index in range(4)))
            for each in ("weight", "bias")
        ]
        names = [["shelf.0"], ["shelf.1", "shelf.2", "shelf.3"]]
        first, last = stage_modules(model, names, [0, 1], shared_groups=groups).values()
        assert (len(first.shelf), len(last.shelf)) == (1, 3)
        assert len(set(last.shelf)) == 1
        x = torch.rand(1, 2)
        assert torch.equal(last(first(x)), model(x))

    def test_a_container_under_two_names_is_pruned_once(self):
        model = nn.Module()
        model.one = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        model.other = model.one
        stage = split_module(model, ["one.1", "other.1"])
        assert stage.one is stage.other
        assert names_of(stage) == ["one.1.weight", "one.1.bias", "other.1.weight", "other.1.bias"]

    def test_a_container_under_two_names_keeps_what_is_listed_under_either(self):
        model = nn.Module()
        model.one = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(3)])
        model.other = model.one
        groups = [
            SharedGroup((f"one.{index}.weight", f"other.{index}.weight")) for index in range(3)
        ]
        stage = split_module(model, ["one.0", "other.2"], shared_groups=groups)
        assert stage.one is stage.other
        assert [name for name, _ in stage.named_parameters()] == ["one.0.weight", "one.2.weight"]


class TestMemory:
    def test_a_split_costs_the_memory_of_what_it_keeps(self, tmp_path: Path):
        model = Decoder(8, width=512, vocabulary=4096)
        model.everything = list(model.parameters())  # a reference that a deep copy would follow
        kept = ["layers.2", "layers.3", "norm"]
        kept_bytes = sum(
            parameter.numel() * parameter.element_size()
            for name, parameter in model.named_parameters()
            if name.startswith(tuple(f"{each}." for each in kept))
        )
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            stage = split_module(model, kept)
        peak = peak_bytes(profiled, tmp_path / "trace.json")
        assert kept_bytes <= peak <= 1.05 * kept_bytes
        assert len(list(stage.parameters())) == 6

    def test_the_measure_above_sees_what_a_deep_copy_costs(self, tmp_path: Path):
        model = Decoder(2, width=64)
        whole_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            copied = [parameter.detach().clone() for parameter in model.parameters()]
        assert whole_bytes <= peak_bytes(profiled, tmp_path / "trace.json") <= 1.05 * whole_bytes
        assert len(copied) == len(list(model.parameters()))

    def test_on_the_meta_device_nothing_is_allocated(self, tmp_path: Path):
        with torch.device("meta"):
            model = Decoder(4, width=8192, vocabulary=100_000)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            stage = split_module(model, ["embed", "layers.0"])
        assert stage.layers["0"].linear.weight.is_meta
        assert peak_bytes(profiled, tmp_path / "trace.json") < 1024

    def test_a_stage_does_not_keep_the_whole_model_alive(self):
        model = Decoder(2)
        dropped = [weakref.ref(model), weakref.ref(model.head.weight)]
        stage = split_module(model, ["layers.0"])
        del model
        assert [each() for each in dropped] == [None, None]
        assert stage.layers["0"] is not None

    def test_a_reference_to_a_dropped_layer_says_where_the_layer_is(self):
        model = Decoder(2)
        model.aside = [model.layers["1"]]
        stage = split_module(model, ["layers.0"])
        with pytest.raises(RuntimeError, match=r"'layers\.1' is on another pipeline stage"):
            stage.aside[0](torch.zeros(1))


def peak_bytes(profiled: profile, file: Path) -> int:
    """The most bytes that the CPU allocator had given out at once while profiled."""
    profiled.export_chrome_trace(str(file))
    events = [
        event
        for event in json.loads(file.read_text())["traceEvents"]
        if event.get("name") == "[memory]"
    ]
    held = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak
