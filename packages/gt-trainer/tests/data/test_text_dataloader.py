"""The dataloader as torchtitan's Trainer and Validator use it, with the shipped tokenizer."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from gt_trainer.data.packed_text import DataResumeError
from gt_trainer.data.shipped_tokenizer import shipped_tokenizer_path
from gt_trainer.data.text_dataloader import StdlibTextDataLoader
from gt_trainer.data.text_source import TextSourceError


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    config = HuggingFaceTokenizer.Config()
    return config.build(tokenizer_path=str(shipped_tokenizer_path()))


def build(
    config: StdlibTextDataLoader.Config, tokenizer: HuggingFaceTokenizer, **options: Any
) -> StdlibTextDataLoader:
    options = {"dp_world_size": 1, "dp_rank": 0, **options}
    return config.build(tokenizer=tokenizer, seq_len=128, local_batch_size=2, **options)


def take(loader: StdlibTextDataLoader, count: int) -> list[torch.Tensor]:
    """[3, B, L] a batch: inputs, positions, labels."""
    stream = iter(loader)
    batches = []
    for _ in range(count):
        inputs, labels = next(stream)
        batches.append(torch.stack([inputs["input"], inputs["positions"], labels]))
    return batches


def test_shipped_tokenizer_works_in_torchtitans_wrapper(tokenizer: HuggingFaceTokenizer) -> None:
    assert tokenizer.get_vocab_size() == 2048
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    token_ids = tokenizer.encode("import os\n", add_bos=True, add_eos=True)
    assert (token_ids[0], token_ids[-1]) == (0, 1)
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == "import os\n"


def test_default_configuration_trains_on_python_sources(tokenizer: HuggingFaceTokenizer) -> None:
    (inputs, positions, labels), second = take(build(StdlibTextDataLoader.Config(), tokenizer), 2)
    assert inputs.shape == second[0].shape == (2, 128)
    assert 0 <= int(inputs.min()) < int(labels.max()) < 2048
    starts = inputs == tokenizer.bos_id
    assert bool((positions[starts] == 0).all())
    # Within a sequence a label is the next input, except where a document ends.
    ends = labels[:, :-1] == tokenizer.eos_id
    assert bool(((labels[:, :-1] == inputs[:, 1:]) | ends).all())


def test_configuration_builds_as_the_validator_builds_it(tokenizer: HuggingFaceTokenizer) -> None:
    config = StdlibTextDataLoader.Config(split="validation")
    passes = [
        list(build(dataclasses.replace(config, infinite=False), tokenizer, dp_world_size=2))
        for _ in range(2)
    ]
    assert len(passes[0]) == len(passes[1]) > 10
    assert all(labels.shape == (2, 128) for _, labels in passes[0])


def test_validation_reads_other_files_than_training() -> None:
    train = StdlibTextDataLoader.Config().open_text()
    validation = StdlibTextDataLoader.Config(split="validation").open_text()
    assert not set(train.documents) & set(validation.documents)


def test_saved_state_resumes_the_identical_stream(tokenizer: HuggingFaceTokenizer) -> None:
    options = {"dp_world_size": 2, "dp_rank": 1}
    whole = take(build(StdlibTextDataLoader.Config(), tokenizer, **options), 9)
    stopped = build(StdlibTextDataLoader.Config(), tokenizer, **options)
    take(stopped, 4)
    resumed = build(StdlibTextDataLoader.Config(), tokenizer, **options)
    resumed.load_state_dict(stopped.state_dict())
    assert all(map(torch.equal, take(resumed, 5), whole[4:]))


def test_empty_state_is_a_fresh_start(tokenizer: HuggingFaceTokenizer) -> None:
    loader = build(StdlibTextDataLoader.Config(), tokenizer)
    loader.load_state_dict({})
    fresh = build(StdlibTextDataLoader.Config(), tokenizer)
    assert torch.equal(take(loader, 1)[0], take(fresh, 1)[0])


def test_worker_process_gives_the_same_stream_and_state(tokenizer: HuggingFaceTokenizer) -> None:
    expected = take(build(StdlibTextDataLoader.Config(), tokenizer), 5)
    with_worker = StdlibTextDataLoader.Config(num_workers=1)
    stopped = build(with_worker, tokenizer)
    assert all(map(torch.equal, take(stopped, 3), expected))
    resumed = build(with_worker, tokenizer)
    resumed.load_state_dict(stopped.state_dict())
    assert all(map(torch.equal, take(resumed, 2), expected[3:]))


def test_refuses_to_resume_on_another_number_of_ranks(tokenizer: HuggingFaceTokenizer) -> None:
    saved = build(StdlibTextDataLoader.Config(), tokenizer, dp_world_size=4, dp_rank=1)
    now = build(StdlibTextDataLoader.Config(), tokenizer, dp_world_size=2, dp_rank=1)
    with pytest.raises(DataResumeError) as error:
        now.load_state_dict(saved.state_dict())
    assert str(error.value) == (
        "the checkpoint's data position is for 4 data-parallel rank(s) and this run has 2 (rank 1 "
        "looks for 'dp_rank_1'): documents are dealt to a fixed number of ranks; resume with the "
        "same data-parallel degree, or leave the position out with "
        "--checkpoint.exclude_from_loading dataloader"
    )


def test_refuses_a_state_without_this_rank(tokenizer: HuggingFaceTokenizer) -> None:
    saved = build(StdlibTextDataLoader.Config(), tokenizer, dp_world_size=2, dp_rank=0)
    now = build(StdlibTextDataLoader.Config(), tokenizer, dp_world_size=2, dp_rank=1)
    with pytest.raises(DataResumeError, match="rank 1 looks for 'dp_rank_1'"):
        now.load_state_dict(saved.state_dict())


def test_reads_a_folder_of_the_users(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    (tmp_path / "poem.txt").write_text("so much depends upon a red wheel barrow\n" * 200)
    config = StdlibTextDataLoader.Config(dataset_path=str(tmp_path), validation_fraction=0.0)
    inputs = take(build(config, tokenizer), 1)[0][0]
    assert "a red wheel barrow\n" in tokenizer.decode(inputs[0].tolist())


def test_refuses_options_that_cannot_work_all_at_once(tokenizer: HuggingFaceTokenizer) -> None:
    config = StdlibTextDataLoader.Config(dataset="c4", num_workers=2)
    with pytest.raises(ValueError, match="dataset") as error:
        build(config, tokenizer)
    assert str(error.value) == (
        "the configuration has 2 problems:\n"
        "  1. --dataloader.dataset is 'c4'\n"
        "     allowed: 'stdlib', the only text with a name\n"
        "     fix: leave the flag out; --dataloader.dataset_path names a folder of your own\n"
        "  2. --dataloader.num_workers is 2\n"
        "     allowed: 0, to read in the training process, or 1: one stream of text is not dealt to "
        "several workers\n"
        "     fix: use 0 or 1"
    )


def test_refuses_a_missing_folder_when_the_text_is_opened() -> None:
    with pytest.raises(TextSourceError, match="text folder '/no/such' does not exist"):
        StdlibTextDataLoader.Config(dataset_path="/no/such").open_text()


def test_importing_the_dataloader_leaves_datasets_and_pandas_unloaded() -> None:
    code = (
        "import gt_trainer.data.text_dataloader, sys; "
        "print(sorted({'datasets', 'pandas', 'pyarrow'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout == "[]\n"
