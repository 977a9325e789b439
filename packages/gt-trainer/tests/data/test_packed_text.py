"""The stream of packed sequences: its content, how ranks share it, how it is resumed."""

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchtitan.components.tokenizer import BaseTokenizer

from gt_trainer.data.packed_text import Batch, DataResumeError, PackedText
from gt_trainer.data.text_source import Document, TextSource, TextSourceError, text_directory

BOS, EOS = 1, 2


class CharTokenizer(BaseTokenizer):
    """One token a character: tests can read the sequences."""

    def encode(self, text: str, *, add_bos: bool, add_eos: bool) -> list[int]:
        return [BOS] * add_bos + [ord(char) for char in text] + [EOS] * add_eos

    def decode(self, token_ids: list[int]) -> str:
        return "".join({BOS: "<", EOS: ">"}.get(token, chr(token)) for token in token_ids)

    def get_vocab_size(self) -> int:
        return 0x110000


class Texts(TextSource):
    """A text source in memory."""

    __slots__ = ("texts",)

    def __init__(self, *texts: str | None) -> None:
        documents = tuple(
            Document(path=f"{i:03}", num_bytes=len(text or "")) for i, text in enumerate(texts)
        )
        super().__init__(name="texts", root=Path("texts"), documents=documents)
        object.__setattr__(self, "texts", texts)

    def read(self, document: Document) -> str | None:
        text: str | None = self.texts[int(document.path)]
        return text

    def why_no_text(self, document: Document) -> str:
        return "nothing"


def packed(source: TextSource, **options: Any) -> PackedText:
    options = {"seq_len": 8, "batch_size": 1, "infinite": False, **options}
    return PackedText(source, tokenizer=CharTokenizer(), **options)


def take(text: PackedText, count: int) -> list[Batch]:
    return list(itertools.islice(text, count))


def same(left: list[Batch], right: list[Batch]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a, b)
        for (left_inputs, left_labels), (right_inputs, right_labels) in zip(
            left, right, strict=True
        )
        for a, b in [
            (left_inputs["input"], right_inputs["input"]),
            (left_inputs["positions"], right_inputs["positions"]),
            (left_labels, right_labels),
        ]
    )


def lines(batches: list[Batch], which: str) -> list[str]:
    decode = CharTokenizer().decode
    rows = []
    for inputs, labels in batches:
        rows += (labels if which == "labels" else inputs[which]).tolist()
    if which == "positions":
        return ["".join(str(position) for position in row) for row in rows]
    return [decode(row) for row in rows]


def test_a_sequence_packs_documents_and_positions_restart_in_each() -> None:
    batches = list(packed(Texts("abc", "defghijklmn", "o"), seed=3))
    assert lines(batches, "input") == ["<defghij", "klmn<abc"]
    assert lines(batches, "labels") == ["defghijk", "lmn>abc>"]
    assert lines(batches, "positions") == ["01234567", "01230123"]


def test_batches_are_int64_of_constant_shape() -> None:
    inputs, labels = next(iter(packed(Texts("abcdef" * 20), seq_len=16, batch_size=3)))
    assert set(inputs) == {"input", "positions"}
    for tensor in (*inputs.values(), labels):
        assert tensor.shape == (3, 16)
        assert tensor.dtype == torch.int64


def test_stream_equals_torchtitans_own_on_the_same_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import datasets
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataset

    source = Texts("ab", "c" * 50, "", "defg", "h" * 17, "i", "j" * 31)
    ours = packed(source, seq_len=11)
    texts = [source.read(document) for document in ours._order(0)]
    config = DatasetConfig(
        path="memory",
        loader=lambda path: datasets.Dataset.from_dict({"text": texts}),
        sample_processor=lambda sample: sample["text"],
    )
    monkeypatch.setitem(DATASETS, "ours", config)
    theirs = HuggingFaceTextDataset("ours", None, CharTokenizer(), seq_len=11)
    expected = [
        ({key: value[None] for key, value in inputs.items()}, labels[None])
        for inputs, labels in theirs
    ]
    assert len(expected) > 8
    assert same(list(ours), expected)


texts_of_any_length = st.lists(st.text("abc", max_size=30), min_size=3, max_size=8)


@settings(max_examples=60, deadline=None)
@given(
    texts=texts_of_any_length,
    seq_len=st.integers(1, 9),
    batch_size=st.integers(1, 3),
    num_before=st.integers(0, 25),
    rank=st.integers(0, 2),
)
def test_resumed_stream_goes_on_as_if_it_had_never_stopped(
    texts: list[str], seq_len: int, batch_size: int, num_before: int, rank: int
) -> None:
    options = {"seq_len": seq_len, "batch_size": batch_size, "infinite": True}
    options |= {"dp_rank": rank, "dp_world_size": 3}
    whole = take(packed(Texts(*texts), **options), num_before + 12)
    stopped = packed(Texts(*texts), **options)
    stream = iter(stopped)
    before = [next(stream) for _ in range(num_before)]
    resumed = packed(Texts(*texts), **options)
    resumed.load_state_dict(stopped.state_dict())
    assert same(before + take(resumed, 12), whole)


def test_resumes_in_the_middle_of_a_document() -> None:
    source = Texts("abcdefghijklmnopqrstuvwxyz")
    stopped = packed(source, seq_len=5)
    next(iter(stopped))
    state = stopped.state_dict()
    assert (state["document"], state["token"]) == (0, 5)
    resumed = packed(source, seq_len=5)
    resumed.load_state_dict(state)
    assert lines(take(resumed, 2), "input") == ["efghi", "jklmn"]
    assert lines(take(packed(source, seq_len=5), 3)[1:], "input") == ["efghi", "jklmn"]


def test_resuming_a_single_pass_gives_every_rank_the_rest_of_its_share() -> None:
    source = Texts(*("abcdefg" * n for n in range(1, 9)))
    for rank in range(2):
        options = {"dp_rank": rank, "dp_world_size": 2, "batch_size": 2}
        whole = list(packed(source, **options))
        stopped = packed(source, **options)
        take(stopped, 2)
        resumed = packed(source, **options)
        resumed.load_state_dict(stopped.state_dict())
        assert len(whole) > 3
        assert same(list(resumed), whole[2:])


def test_resume_may_change_sequence_length_and_batch_size() -> None:
    source = Texts("abcdefghijklmnopqrstuvwxyz")
    stopped = packed(source, seq_len=5, batch_size=2)
    next(iter(stopped))
    resumed = packed(source, seq_len=3, batch_size=1)
    resumed.load_state_dict(stopped.state_dict())
    assert lines(take(resumed, 2), "input") == ["jkl", "mno"]


def test_epochs_read_every_document_once_in_new_orders() -> None:
    source = Texts(*"abcdefgh")  # two tokens of input each: <a
    stream = "".join(lines(take(packed(source, seq_len=2, infinite=True), 24), "input"))
    epochs = [stream[0:16], stream[16:32], stream[32:48]]
    assert [sorted(epoch) for epoch in epochs] == [sorted("<a<b<c<d<e<f<g<h")] * 3
    assert len(set(epochs)) == 3


def test_another_seed_is_another_order() -> None:
    source = Texts(*"abcdefgh")
    assert lines(take(packed(source, seed=0), 2), "input") != (
        lines(take(packed(source, seed=1), 2), "input")
    )


def test_endless_ranks_share_the_documents_of_an_epoch_without_overlap() -> None:
    source = Texts(*"abcdefghi")
    seen = []
    for rank in range(3):
        options = {"seq_len": 2, "infinite": True, "dp_rank": rank, "dp_world_size": 3}
        seen.append("".join(lines(take(packed(source, **options), 3), "input")).replace("<", ""))
    assert [len(part) for part in seen] == [3, 3, 3]
    assert sorted("".join(seen)) == list("abcdefghi")


@settings(max_examples=40, deadline=None)
@given(texts=texts_of_any_length, batch_size=st.integers(1, 2), world_size=st.integers(1, 4))
def test_single_pass_deals_the_same_sequences_to_any_number_of_ranks(
    texts: list[str], batch_size: int, world_size: int
) -> None:
    source = Texts("abcdefghij" * 8, *texts)
    everything = lines(list(packed(source, batch_size=1)), "input")
    ranks = [
        list(packed(source, batch_size=batch_size, dp_rank=rank, dp_world_size=world_size))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1  # or the longest would wait forever
    dealt = [batch for group in zip(*ranks, strict=True) for batch in group]
    num_dealt = len(everything) // (batch_size * world_size) * batch_size * world_size
    assert lines(dealt, "input") == everything[:num_dealt]


def test_single_pass_can_be_taken_again() -> None:
    text = packed(Texts("abcdefgh" * 4))
    assert same(list(text), list(text))


def test_documents_that_are_not_utf8_are_skipped_counted_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "good.txt").write_text("abcdefgh")
    (tmp_path / "latin.txt").write_bytes("schön".encode("latin-1"))
    text = packed(text_directory(tmp_path), infinite=True)
    with caplog.at_level(logging.WARNING):
        assert len(take(text, 5)) == 5
    assert text.num_undecodable == 1
    assert caplog.messages == [f"skipped {tmp_path / 'latin.txt'}: not UTF-8 text"]


def test_refuses_an_endless_stream_of_nothing() -> None:
    with pytest.raises(TextSourceError) as error:
        take(packed(Texts(None, None, None), infinite=True, dp_rank=1, dp_world_size=2), 1)
    assert str(error.value) == (
        "none of the 1 document(s) of texts for data-parallel rank 1 has UTF-8 text in it"
    )


def test_refuses_fewer_documents_than_ranks() -> None:
    with pytest.raises(TextSourceError) as error:
        packed(Texts("a", "b"), infinite=True, dp_rank=2, dp_world_size=4)
    assert str(error.value) == (
        "texts has 2 document(s), fewer than the 4 data-parallel ranks; give more files, or use "
        "fewer ranks"
    )


def test_refuses_a_pass_that_fills_no_batch() -> None:
    with pytest.raises(TextSourceError) as error:
        list(packed(Texts("abcdefgh" * 2), batch_size=2, dp_world_size=2))
    assert str(error.value) == (
        "texts gives 2 sequence(s) of 8 tokens, but one batch on every rank takes 4 (local batch "
        "size 2 x 2 data-parallel ranks); give more text, or lower --training.seq_len or "
        "--training.local_batch_size"
    )


def test_refuses_sizes_out_of_range_all_at_once() -> None:
    with pytest.raises(ValueError, match="seq_len") as error:
        packed(Texts("a"), seq_len=0, batch_size=0, dp_rank=2, dp_world_size=2)
    assert str(error.value) == (
        "seq_len is 0; it must be at least 1; batch_size is 0; it must be at least 1; dp_rank is "
        "2; it must be in [0, 2)"
    )


def test_refuses_to_resume_in_other_documents_or_another_order() -> None:
    state = packed(Texts("abc", "def")).state_dict()
    other = packed(Texts("abc", "def", "g"), seed=7)
    now = other.state_dict()["documents"]
    with pytest.raises(DataResumeError) as error:
        other.load_state_dict(state)
    assert str(error.value) == (
        "cannot continue in the data where the checkpoint stopped: documents (saved "
        f"{state['documents']!r}, now {now!r}), num_documents (saved 2, now 3), seed (saved 0, now "
        "7) changed; resume with the same text as then (now texts) and the same settings, or "
        "start a new run"
    )
