"""Data of `infinity finetune`: sources, the byte tokenizer, packing, order, and the exact words of
what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.models import data, samples
from infinity.models.data import (
    TextPiece,
    WindowRequest,
    Windows,
    encode,
    load_windows,
    pack,
    read_items,
)
from infinity.models.tokenizer import (
    BYTE_VOCABULARY,
    EOS,
    PAD,
    SPECIAL,
    ByteTokenizer,
    load_tokenizer,
)


def documents(source: Path) -> list[str]:
    """The whole documents of `source`."""
    found, parts = [], []
    for piece in read_items(source):
        parts.append(piece.text)
        if piece.last:
            found.append("".join(parts))
            parts = []
    assert not parts, "a document did not end"
    return found


def refusal(source: Path) -> str:
    with pytest.raises(ValueError) as caught:
        list(read_items(source))
    return str(caught.value)


@pytest.mark.parametrize("packing", [False, True])
def test_tokens_of_a_window_are_those_of_its_samples_without_padding(
    tmp_path: Path, packing: bool
) -> None:
    records = [{"prompt": "a" * (4 + number), "completion": "b"} for number in range(12)]
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    windows = load_windows(WindowRequest(path, None, 0), ByteTokenizer())
    if packing:
        windows = windows.packed()
    assert isinstance(windows.tokens, samples.Rows)
    count, (held_out,) = len(windows.training), windows.validation
    tokens = int(windows.tokens.lengths.sum() - windows.tokens.lengths[held_out])
    padded = windows.training_batch(range(count)).ids.size
    assert count * windows.mean_length == pytest.approx(tokens) and tokens < padded


# Packing


@given(
    count=st.integers(0, 400),
    length=st.integers(1, 30),
    seed=st.integers(0, 2**32),
)
def test_every_token_is_in_exactly_one_window_and_every_window_in_one_part(
    count: int, length: int, seed: int
) -> None:
    tokens = np.arange(count, dtype=np.uint16)
    if count < 2 * length:
        with pytest.raises(ValueError, match="needs at least"):
            pack(tokens, length, seed, "it")
        return
    windows = pack(tokens, length, seed, "it")
    # In order, once, no overlap.
    assert windows.tokens.reshape(-1).tolist() == list(range(count // length * length))
    assert count - windows.tokens.size < length  # less than one window is left out
    rows = sorted(windows.training.tolist() + windows.validation.tolist())
    assert rows == list(range(count // length))
    assert len(windows.validation) >= 1
    assert len(windows.training) >= 1


@given(count=st.integers(2, 60), seed=st.integers(0, 2**32))
def test_every_epoch_is_a_permutation_and_the_seed_alone_decides_it(count: int, seed: int) -> None:
    tokens = np.arange(count * 3, dtype=np.uint16)
    windows = pack(tokens, 3, seed, "it")
    size = len(windows.training)
    order = list(islice(windows.order(), 2 * size))
    assert sorted(order[:size]) == sorted(order[size:]) == windows.training.tolist()
    again = pack(tokens, 3, seed, "it")
    assert order == list(islice(again.order(), 2 * size))
    assert windows.validation.tolist() == again.validation.tolist()


def test_another_seed_gives_another_order_and_another_epoch_too() -> None:
    tokens = np.zeros(1000, np.uint16)
    first, second = pack(tokens, 2, 1, "it"), pack(tokens, 2, 2, "it")
    size = len(first.training)
    epochs = list(islice(first.order(), 2 * size))
    assert epochs[:size] != list(islice(second.order(), size))
    assert epochs[:size] != epochs[size:]


def test_validation_rows_cover_the_held_out_windows_and_respect_the_limit() -> None:
    windows = Windows(np.arange(40).reshape(10, 4), np.arange(5), np.arange(5, 10), 0)
    assert [len(rows) for rows in windows.validation_rows(2, 99)] == [2, 2, 1]
    found = [windows.batch(rows).ids[:, 0].tolist() for rows in windows.validation_rows(2, 2)]
    assert found == [[20, 24], [28, 32]]


def test_too_little_text_is_refused_with_the_number_of_tokens_needed(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("twelve bytes")
    with pytest.raises(ValueError) as caught:
        load_windows(WindowRequest(path, 64, 0), ByteTokenizer())
    assert str(caught.value) == (
        f"{path} has 13 tokens, but a sequence length of 64 needs at least 128: one window "
        "to train on and one held out"
    )


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.touch()
    with pytest.raises(ValueError) as caught:
        load_windows(WindowRequest(path, 8, 0), ByteTokenizer())
    assert str(caught.value).startswith(
        f"{path} has 0 tokens, but a sequence length of 8 needs at least 16"
    )


# Encoding


@given(st.lists(st.lists(st.text(max_size=20), min_size=1, max_size=3), max_size=5))
def test_documents_are_joined_with_one_separator_each(texts: list[list[str]]) -> None:
    pieces = [
        TextPiece(text, i == len(parts) - 1) for parts in texts for i, text in enumerate(parts)
    ]
    expected: list[int] = []
    for parts in texts:
        expected += [*"".join(parts).encode(), EOS]
    tokens = encode(pieces, ByteTokenizer())
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == expected


def test_a_large_vocabulary_is_stored_in_32_bits() -> None:
    class Large(ByteTokenizer):
        vocabulary = 70_000
        separator = 69_999

    tokens = encode([TextPiece("a", True)], Large())
    assert (tokens.dtype, tokens.tolist()) == (np.uint32, [97, 69_999])


def test_the_tokenizer_is_called_with_bounded_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_PIECE", 10)
    portions: list[int] = []

    class Counting(ByteTokenizer):
        def encode(self, texts):  # type: ignore[no-untyped-def]
            portions.append(sum(map(len, texts)))
            return super().encode(texts)

    pieces: Iterator[TextPiece] = (TextPiece("abc", True) for _ in range(20))
    assert len(encode(pieces, Counting())) == 80
    assert max(portions) <= 12


# Sources


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_a_file_is_one_document_however_it_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(data, "_PIECE", size)
    text = "Über\r\nlines\n\n" + "x" * 50 + "\nno newline at the end"
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    assert documents(path) == [text]


def test_a_folder_is_read_recursively_in_sorted_order(tmp_path: Path) -> None:
    for name, text in {
        "b.txt": "3",
        "a/z.py": "2",
        "a/y.md": "1",
        "c.jsonl": '{"text": "4"}',
        "d.bin": "no",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.txt").write_text("hidden")
    assert documents(tmp_path) == ["3", "4", "1", "2"]


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"\0")
    assert refusal(tmp_path).startswith(f"{tmp_path} has no text files (known endings: .c .cc .cfg")


def test_json_lines_give_one_document_each(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        "\n".join(
            [
                json.dumps({"text": "one\ntwo"}),
                "",
                json.dumps({"text": ""}),
                json.dumps({"text": "x", "n": 1}),
            ]
        )
    )
    assert documents(path) == ["one\ntwo", "x"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "cut', "not JSON (character 10: Unterminated string starting at)"),
        ('["text"]', "not a JSON object, as every record is"),
        ('{"text": 3}', 'no string under the key "text"'),
    ],
)
def test_a_broken_json_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n")
    assert refusal(path) == f"{path}, line 3: {reason}"


def test_a_json_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "\xff"}\n')
    assert refusal(path) == f"{path}, line 1: not UTF-8 text (invalid start byte)"


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"fine\n\xffnot")
    assert refusal(path) == f"{path} is not UTF-8 text: invalid start byte (0xff)"


def test_the_standard_library_is_there_capped_and_stable() -> None:
    pieces = list(read_items(None))
    assert 100_000 < sum(len(piece.text.encode()) for piece in pieces) <= data.STDLIB_BYTES
    assert pieces == list(read_items(None))


# Byte tokenizer


def test_every_byte_is_its_own_id_and_comes_back() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(range(BYTE_VOCABULARY)) == bytes(range(256)).decode("utf-8", "replace")
    text = "".join(map(chr, [*range(0x800), 0x20AC, 0xFFFF, 0x10000, 0x10FFFF]))
    (ids,) = tokenizer.encode([text])
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_the_saved_byte_tokenizer_is_the_same_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ByteTokenizer().save(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    text = "".join(
        map(chr, [*range(0x800), 0x1234, 0xFFFF, 0x10000, 0x50000, 0x90000, 0xD0000, 0x10FFFF])
    )
    text += " two  spaces\n\n\ttab don't 12345 "
    ids = saved(text, add_special_tokens=False)["input_ids"]
    assert ids == list(text.encode())
    assert saved.decode(ids) == text
    assert len(saved) == 259
    assert [saved.bos_token_id, saved.eos_token_id, saved.pad_token_id] == sorted(SPECIAL)
    assert saved(text)["input_ids"] == ids  # no special token is added unasked
    tokens = saved.convert_ids_to_tokens(list(range(256)))
    assert len(set(tokens)) == 256
    # Also the 13 bytes that UTF-8 never uses.
    assert saved.convert_tokens_to_ids(tokens) == list(range(256))


def test_a_model_without_tokenizer_gets_bytes_if_asked_and_its_vocabulary_has_room(
    tmp_path: Path,
) -> None:
    assert isinstance(load_tokenizer(tmp_path, PAD + 1, as_bytes=True), ByteTokenizer)
    with pytest.raises(ValueError) as caught:
        load_tokenizer(tmp_path, PAD + 1)
    assert str(caught.value) == (
        f"{tmp_path} has no tokenizer; put its files there, or give --byte-tokenizer to train on "
        "bytes, one token each"
    )
    assert isinstance(load_tokenizer(None, BYTE_VOCABULARY), ByteTokenizer)
    with pytest.raises(ValueError) as caught:
        load_tokenizer(None, 256)
    assert (
        str(caught.value) == "the byte tokenizer has 259 tokens but the model's vocabulary has 256"
    )


def test_the_tokenizer_of_a_directory_is_used_and_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    ByteTokenizer().save(source)
    tokenizer = load_tokenizer(source, BYTE_VOCABULARY)
    assert not isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.separator == EOS
    assert encode([TextPiece("aé", True)], tokenizer).tolist() == [97, 0xC3, 0xA9, EOS]
    tokenizer.save(target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {
        path.name: path.read_bytes() for path in source.iterdir()
    }
    with pytest.raises(ValueError) as caught:
        load_tokenizer(source, 100)
    assert (
        str(caught.value)
        == f"the tokenizer in {source} has 259 tokens but the model's vocabulary has 100"
    )
