"""What this machine cannot give a run, found before it starts."""

import json

import pytest
from refused_configurations import changed, refusal
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.tools.profiler import Profiler

from gt_trainer.data.shipped_tokenizer import shipped_tokenizer_path
from gt_trainer.models import deepseek_v3, llama3
from gt_trainer.preflight.preflight import check_configuration

GIB = 2**30


def test_more_processes_than_gpus_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "gt_trainer.preflight.machine_violations.installed_device_type", lambda: "cuda"
    )
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    monkeypatch.setattr(
        "gt_trainer.preflight.machine_violations.cuda_violations", lambda config: iter(())
    )
    config = changed(llama3.llama3_debugmodel(), tmp_path)
    check_configuration(config, 4, num_local_ranks=2)
    assert refusal(config, 4, num_local_ranks=4) == (
        "the configuration has 1 problem:\n"
        "  1. --nproc is 4\n"
        "     allowed: at most 2, one process for each cuda device\n"
        "     fix: use fewer processes, or GT_DEVICE=cpu"
    )


def test_masks_that_exceed_the_memory_are_refused_before_the_system_ends_the_run(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "gt_trainer.preflight.machine_violations.available_memory_bytes", lambda: 20 * GIB
    )
    training = {"local_batch_size": 1, "seq_len": 131072}
    config = changed(llama3.llama3_debugmodel(), tmp_path, training=training)
    assert refusal(config, 1, num_local_ranks=1) == (
        "the configuration has 1 problem:\n"
        "  1. --training.seq_len is 131072\n"
        "     allowed: attention masks that fit into memory: they take 80.0 GiB (1 rank(s) x "
        "local_batch_size 1 x seq_len^2 x 5 bytes), and 20.0 GiB are available\n"
        "     fix: use at most 65536, or fewer samples or ranks"
    )
    check_configuration(config, 1, will_train=False)
    fits = changed(config, tmp_path, training={"seq_len": 65536})
    check_configuration(fits, 1, num_local_ranks=1)
    assert "they take 40.0 GiB (2 rank(s) x" in refusal(fits, 2, num_local_ranks=2)
    shared = changed(fits, tmp_path, parallelism={"context_parallel_degree": 2})
    check_configuration(shared, 2, num_local_ranks=2)
    four = refusal(shared, 4, num_local_ranks=4)
    assert "they take 40.0 GiB (4 rank(s) x local_batch_size 1 x seq_len^2 x 5 bytes / " in four
    assert (
        "context_parallel_degree 2), and 20.0 GiB are available\n     fix: use at most 32768"
        in four
    )


def text_problem(tmp_path, path, **options):
    dataloader = {"dataset_path": str(path), "validation_fraction": 0.0}
    config = changed(llama3.llama3_debugmodel(), tmp_path / "run", dataloader=dataloader)
    return refusal(config, options.get("world_size", 1)).replace(str(path), "TEXT")


NO_TEXT = """\
the configuration has 1 problem:
  1. --dataloader.dataset_path is 'TEXT'
     allowed: a folder of text, or None for the standard library's sources
     fix: {}"""


def test_text_that_is_not_there_is_refused(tmp_path):
    assert text_problem(tmp_path, tmp_path / "no" / "such") == NO_TEXT.format(
        "text folder 'TEXT' does not exist; give a folder of .jsonl, .md, .parquet, .py or .txt files"
    )


def test_a_file_in_place_of_a_folder_of_text_is_refused(tmp_path):
    (tmp_path / "book.txt").write_text("call me")
    assert text_problem(tmp_path, tmp_path / "book.txt") == NO_TEXT.format(
        "text folder 'TEXT' is a file; give a folder of .jsonl, .md, .parquet, .py or .txt files"
    )


def test_a_folder_without_text_is_refused(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    assert text_problem(tmp_path, text) == NO_TEXT.format(
        "text folder 'TEXT' has no .jsonl, .md, .parquet, .py or .txt file, also not in its subfolders"
    )


@pytest.mark.parametrize("content", [b"", bytes(range(256))], ids=["empty", "binary"])
def test_files_without_text_in_them_are_refused(tmp_path, content):
    text = tmp_path / "text"
    text.mkdir()
    (text / "weights.txt").write_bytes(content)
    assert text_problem(tmp_path, text) == NO_TEXT.format(
        "none of the 1 document(s) of 'TEXT' (train) has UTF-8 text in it"
    )
    (text / "words.txt").write_text("words " * 1000)
    config = changed(
        llama3.llama3_debugmodel(),
        tmp_path,
        dataloader={"dataset_path": str(text), "validation_fraction": 0.0},
    )
    check_configuration(config, 1)


def test_fewer_documents_than_readers_are_refused(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    (text / "words.txt").write_text("words")
    assert text_problem(tmp_path, text, world_size=2) == NO_TEXT.format(
        "'TEXT' (train) has 1 document(s), fewer than the 2 data-parallel ranks; give more "
        "documents, or use fewer ranks"
    )


def test_less_text_than_one_step_takes_is_refused(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    (text / "words.txt").write_text("words " * 100)
    num_tokens = 16 * 256
    assert text_problem(tmp_path, text) == NO_TEXT.format(
        f"'TEXT' (train) has at most 602 tokens, and one step of all ranks takes {num_tokens:,}; "
        "give more text, or lower --training.seq_len or --training.local_batch_size"
    )


def test_rows_without_the_field_of_text_are_refused(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    (text / "rows.jsonl").write_text('{"content": "words"}\n')
    assert text_problem(tmp_path, text) == NO_TEXT.format(
        "'TEXT/rows.jsonl' has no field 'text'; it has 'content': name the one with the text by "
        "--dataloader.text_field"
    )


def test_the_text_of_a_validation_is_judged_where_it_is_read(tmp_path):
    config = llama3.llama3_debugmodel()
    config.validator.dataloader.dataset_path = "/no/such/folder"
    check_configuration(changed(config, tmp_path), 1)
    assert "  1. --validator.dataloader.dataset_path is '/no/such/folder'" in refusal(
        changed(config, tmp_path, validator={"enable": True}), 1
    )


def test_a_data_set_of_torchtitans_that_is_not_here_is_refused(tmp_path):
    config = changed(llama3.llama3_debugmodel(), tmp_path)
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="c4_test")
    assert refusal(config, 1) == (
        "the configuration has 1 problem:\n"
        "  1. --dataloader.dataset is 'c4_test'\n"
        "     allowed: a data set whose files are here, or on a hub\n"
        "     fix: there is no 'tests/assets/c4_test': give where it is "
        "(--dataloader.dataset_path), or another data set"
    )
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="c5")
    assert (
        "allowed: a data set of torchtitan's: c4, c4_test, c4_validation\n"
        "     fix: choose one of these, or register yours in torchtitan's DATASETS"
    ) in refusal(config, 1)
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="C4")
    check_configuration(config, 1)
    config.dataloader = HuggingFaceTextDataLoader.Config(
        dataset="c4_test", dataset_path=str(tmp_path)
    )
    check_configuration(config, 1)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path):
    config = changed(llama3.llama3_debugmodel(), tmp_path)
    config.model_spec.model.vocab_size = 2000
    shipped = str(shipped_tokenizer_path())
    assert refusal(config, 1).replace(shipped, "TOKENIZER") == (
        "the configuration has 1 problem:\n"
        "  1. --hf_assets_path is 'TOKENIZER'\n"
        "     allowed: the folder of the model's tokenizer (tokenizer.json)\n"
        "     fix: it has 2048 tokens and the model has 2000 embeddings: give the tokenizer that the "
        "model is meant for, or choose a --config with more"
    )


def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 3}))
    config = changed(llama3.llama3_debugmodel(), tmp_path, hf_assets_path=str(tmp_path))
    text = refusal(config, 1)
    assert "  1. --hf_assets_path is " in text
    assert text.endswith(
        ": download the tokenizer from the model's page, and give its folder, or to try things out "
        f"the one that is here, {shipped_tokenizer_path()}"
    )


def test_a_profilers_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    profiler = Profiler.Config(enable_profiling=True, save_traces_folder="file/traces")
    assert refusal(changed(llama3.llama3_debugmodel(), tmp_path, profiler=profiler), 1) == (
        "the configuration has 1 problem:\n"
        "  1. --profiler.save_traces_folder is 'file/traces'\n"
        "     allowed: a folder that can be made and written, in the dump folder or absolute\n"
        "     fix: RUN/file is a file: choose another folder"
    )


def test_all_of_it_is_told_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "gt_trainer.preflight.machine_violations.available_memory_bytes", lambda: GIB
    )
    (tmp_path / "checkpoint" / "step-3").mkdir(parents=True)
    (tmp_path / "checkpoint" / "step-3" / ".metadata").write_bytes(b"")
    config = changed(
        deepseek_v3.deepseek_v3_debugmodel(),
        tmp_path,
        training={"seq_len": 12004},
        dataloader={"dataset_path": "/no/such/text"},
        profiler=Profiler.Config(enable_profiling=True, profile_freq=1),
        hf_assets_path="/no/such/tokenizer",
    )
    flags = [line.split()[1] for line in refusal(config, 1).splitlines() if line[:5].endswith(". ")]
    assert flags == [
        "--training.seq_len",
        "--profiler.profile_freq",
        "--training.seq_len",
        "--checkpoint.folder",
        "--hf_assets_path",
        "--dataloader.dataset_path",
    ]


def test_pinned_memory_is_refused_where_there_is_no_device_to_copy_from(tmp_path):
    config = changed(
        llama3.llama3_debugmodel(),
        tmp_path,
        checkpoint={"async_mode": "async_with_pinned_mem"},
    )
    text = refusal(config, 1)
    assert "  1. --checkpoint.async_mode is 'async_with_pinned_mem'" in text
    assert "'disabled' or 'async' on cpu" in text


def test_a_folder_of_graphs_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    inside = str(tmp_path / "file" / "graphs")
    config = changed(llama3.llama3_debugmodel(), tmp_path / "run", compile={"artifacts": inside})
    text = refusal(config, 1)
    assert f"  1. --compile.artifacts is {inside!r}" in text
    assert "allowed: a folder, or one that can be made" in text
    check_configuration(
        changed(
            llama3.llama3_debugmodel(),
            tmp_path / "run",
            compile={"artifacts": str(tmp_path / "graphs")},
        ),
        1,
    )
