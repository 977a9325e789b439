"""What is wrong with a folder is told at once, all of it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from gt_trainer.command_line.command_line import UsageError, parse_command_line
from gt_trainer.models.hugging_face.folder import folder_problems, read_weights


@pytest.fixture(autouse=True)
def _transformers(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def write_tensors(path: Path, shapes: dict[str, list[int]], *, num_bytes: int) -> None:
    offsets, start = {}, 0
    for name, shape in shapes.items():
        end = start + 4 * shape[0]
        offsets[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
        start = end
    header = json.dumps(offsets).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(num_bytes))


def folder(tmp_path: Path, **config: object) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def test_a_sound_folder_has_no_problem(tmp_path):
    write_tensors(folder(tmp_path) / "model.safetensors", {"a": [2], "b": [1]}, num_bytes=12)
    assert [*folder_problems(tmp_path)] == []
    assert read_weights(tmp_path) == {"a": (2,), "b": (1,)}


def test_a_missing_folder(tmp_path):
    assert [*folder_problems(tmp_path / "no")] == ["there is no such folder"]


def test_an_empty_folder_lacks_two_files(tmp_path):
    assert [*folder_problems(tmp_path)] == ["it has no config.json", "it has no tokenizer.json"]


def test_missing_transformers(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert [*folder_problems(folder(tmp_path))] == [
        "it needs transformers, which is not there: install gt-trainer[hf]"
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "config.json is a JSON list, and must be an object"),
        ("{", "config.json cannot be read: Expecting property name enclosed in double quotes"),
        ("{}", "config.json has no model_type"),
    ],
)
def test_a_config_that_says_nothing(text, problem, tmp_path):
    (folder(tmp_path) / "config.json").write_text(text)
    (found,) = folder_problems(tmp_path)
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            {"auto_map": {"AutoModel": "code.Model"}},
            "config.json has an auto_map, which names Python code to be run: it is never run here",
        ),
        (
            {"is_encoder_decoder": True},
            "its model is an encoder and a decoder, and a step is captured from tokens to logits",
        ),
        ({"quantization_config": {"bits": 4}}, "its weights are quantized"),
    ],
)
def test_a_model_that_is_not_trained(config, problem, tmp_path):
    assert [*folder_problems(folder(tmp_path, **config))] == [problem]


def test_weights_that_are_a_link_to_nothing(tmp_path):
    (folder(tmp_path) / "model.safetensors").symlink_to(tmp_path / "gone")
    (problem,) = folder_problems(tmp_path)
    assert problem.startswith("model.safetensors cannot be read: FileNotFoundError(2, ")


def test_weights_that_are_cut_off(tmp_path):
    write_tensors(folder(tmp_path) / "model.safetensors", {"a": [2]}, num_bytes=7)
    (found,) = folder_problems(tmp_path)
    assert found.startswith("model.safetensors is damaged: it has ")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    assert [*folder_problems(tmp_path)] == ["model.safetensors is damaged: its header is cut off"]
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]")
    assert [*folder_problems(tmp_path)] == [
        "model.safetensors is damaged: its header is no description of tensors"
    ]


def header_of(path: Path, **changed: dict[str, object]) -> None:
    """A file of two tensors of four bytes, whose header says otherwise of one."""
    header = {
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
    }
    text = json.dumps({name: each | changed.get(name, {}) for name, each in header.items()})
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(8))


@pytest.mark.parametrize(
    ("changed", "owner"),
    [
        ({"b": {"shape": [2]}}, "b"),
        ({"b": {"dtype": "F16"}}, "b"),
        ({"b": {"data_offsets": [0, 4]}}, "b"),
        ({"a": {"data_offsets": [0, 3]}}, "a"),
        ({"b": {"data_offsets": [5, 9]}}, "b"),
    ],
)
def test_a_header_that_contradicts_itself(changed, owner, tmp_path):
    path = folder(tmp_path) / "model.safetensors"
    header_of(path)
    assert [*folder_problems(tmp_path)] == []
    header_of(path, **changed)
    assert [*folder_problems(tmp_path)] == [
        f"model.safetensors is damaged: its header gives {owner} memory that is not its own"
    ]


def test_a_dtype_that_safetensors_has_not(tmp_path):
    header_of(folder(tmp_path) / "model.safetensors", a={"dtype": "F33"})
    assert [*folder_problems(tmp_path)] == [
        "model.safetensors is damaged: its header is no description of tensors"
    ]


def test_a_tensor_in_two_files(tmp_path):
    write_tensors(folder(tmp_path) / "model-1.safetensors", {"a": [2]}, num_bytes=8)
    write_tensors(tmp_path / "model-2.safetensors", {"b": [1], "a": [2]}, num_bytes=12)
    assert [*folder_problems(tmp_path)] == [
        "model-1.safetensors and model-2.safetensors both have a"
    ]


def test_an_index_of_several_files(tmp_path):
    write_tensors(folder(tmp_path) / "model-1.safetensors", {"a": [2]}, num_bytes=8)
    write_tensors(tmp_path / "model-2.safetensors", {"b": [1]}, num_bytes=4)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert [*folder_problems(tmp_path)] == []
    assert read_weights(tmp_path) == {"a": (2,), "b": (1,)}
    index.write_text(json.dumps({"weight_map": weight_map | {"b": "model-1.safetensors"}}))
    assert [*folder_problems(tmp_path)] == [
        "model.safetensors.index.json has b in model-1.safetensors, and that file has not"
    ]
    index.write_text(json.dumps({"weight_map": ["a"]}))
    (found,) = folder_problems(tmp_path)
    assert found.startswith("model.safetensors.index.json cannot be read: AttributeError(")


def test_an_index_of_files_that_are_missing(tmp_path):
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (folder(tmp_path) / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [*folder_problems(tmp_path)] == [
        "model.safetensors.index.json names model-1.safetensors, which is not there"
    ]


def test_the_command_line_tells_all_of_it(tmp_path):
    with pytest.raises(UsageError) as caught:
        parse_command_line(["--module", f"hf:{tmp_path}", "--config", "llama3_8b"])
    assert caught.value.problems == (
        f"--module hf:{tmp_path}: it has no config.json",
        f"--module hf:{tmp_path}: it has no tokenizer.json",
        f"--module hf:{tmp_path} is one model: leave out --config llama3_8b",
    )


def test_plans_are_refused(tmp_path):
    with pytest.raises(UsageError) as caught:
        parse_command_line(["plan", "--module", f"hf:{folder(tmp_path)}", "--gpus", "8"])
    assert str(caught.value) == (
        f"plan counts the layers of torchtitan's decoders, and --module hf:{tmp_path} is none"
    )


def test_the_command_line_takes_a_sound_folder(tmp_path):
    command = parse_command_line(["--module", f"hf:{folder(tmp_path)}"])
    assert (command.module, command.config) == (f"hf:{tmp_path}", tmp_path.name)
