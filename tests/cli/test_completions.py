"""Records with completions: which tokens are learned, what the template of the tokenizer says, and
that training counts these labels and no others."""

from __future__ import annotations

import csv
import json
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from infinity.cli.main import app
from infinity.models import tokenizer as tokenizers
from infinity.models.data import WindowRequest, Windows, load_windows, read_items
from infinity.models.patience import within
from infinity.models.records import DataRecord
from infinity.models.samples import Rows, unpacked
from infinity.models.tokenizer import (
    BOS,
    BYTE_VOCABULARY,
    EOS,
    ByteTokenizer,
    DirectoryTokenizer,
    Tokenizer,
    load_tokenizer,
)

pytestmark = pytest.mark.usefixtures("one_thread")

CHAT = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if loop.last and m.role == 'assistant' %}!{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>!{% endif %}"
)
TALK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "héllo"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "two"},
]


def tokenizer(where: Path, template: str | None) -> Tokenizer:
    """The byte-level tokenizer of a directory, with a chat template."""
    where.mkdir(exist_ok=True)
    ByteTokenizer().save(where)
    if template is not None:
        (where / "chat_template.jinja").write_text(template)
    return load_tokenizer(where, BYTE_VOCABULARY)


def test_a_template_that_never_ends_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a clock: the notice and the end come at once."""
    loop = "{% for i in range(99999) %}"
    by = tokenizer(tmp_path / "model", loop * 4 + "x" + "{% endfor %}" * 4)
    source = write_lines(tmp_path / "talk.jsonl", {"messages": TALK})
    monkeypatch.setattr(tokenizers, "within", partial(within, notice=0, most=0))
    where = f"the chat template in {tmp_path / 'model' / 'chat_template.jinja'}"
    with pytest.raises(ValueError, match=f"talk.jsonl, line 1: .*{where} took more than .*; "):
        load(source, by)
    assert where in caplog.text


def test_only_what_does_not_end_is_given_up() -> None:
    """What ends is returned, and what it raises is raised; nothing comes after it."""

    def fail() -> None:
        raise KeyError("x")

    for _ in range(100):
        assert within(lambda: 3, "a") == 3
        with pytest.raises(KeyError):
            within(fail, "a")


def learned(rows: Rows | Any, number: int = 0) -> tuple[str, str]:
    """A row as text, and its labels with a dot for each that does not count."""
    batch = unpacked(rows[[number]].astype(np.int64))
    special = {BOS: "^", EOS: "$", -100: "."}

    def text(ids: Any) -> str:
        return "".join(special[i] if i in special else chr(i) for i in ids.tolist())

    return text(batch.ids[0]), text(batch.labels[0])


def load(source: Path, by: Tokenizer, length: int = 256) -> Windows:
    return load_windows(WindowRequest(source, length, 0), by)


def write_lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


@pytest.mark.parametrize("name", ["directory", "bytes"])
def test_a_completion_and_its_end_are_learned(name: str, tmp_path: Path) -> None:
    by = tokenizer(tmp_path / "model", None) if name == "directory" else ByteTokenizer()
    sample = {"prompt": "2+2=", "completion": "4"}
    windows = load(write_lines(tmp_path / "a.jsonl", sample, sample | {"completion": "44"}), by)
    assert learned(windows.tokens) == ("2+2=4$", "....4$")
    whole = windows.tokens[[0, 1]]
    assert whole.shape == (2, 7)
    assert learned(whole)[0] == "2+2=4$$", "what fills a row up"
    assert learned(whole)[1] == "....4$."
    assert isinstance(windows.tokens, Rows)
    assert windows.notes == ()


def test_every_answer_of_a_conversation_is_learned(tmp_path: Path) -> None:
    by = tokenizer(tmp_path / "model", CHAT)
    shared = [
        {"from": {"user": "human", "assistant": "gpt"}.get(each["role"], each["role"])}
        | {"value": each["content"]}
        for each in TALK
    ]
    path = write_lines(
        tmp_path / "a.jsonl",
        {"messages": TALK},
        {"conversations": shared},
        {"prompt": TALK[:4], "completion": TALK[4:]},
    )
    windows = load(path, by)
    text = "^<system>s</><user>hÃ©llo</><assistant>one</><user>more</><assistant>two</>"
    labels = "." * text.index("one") + "one</>" + "." * len("<user>more</><assistant>") + "two</>"
    assert [learned(windows.tokens, n) for n in (0, 1)] == [(text, labels)] * 2
    assert learned(windows.tokens, 2) == (text, "." * text.index("two") + "two</>")


def test_a_template_that_rewrites_answers_has_its_last_one_learned(tmp_path: Path) -> None:
    by = tokenizer(tmp_path / "model", FORGETFUL)
    windows = load(write_lines(tmp_path / "a.jsonl", *[{"messages": TALK[1:]}] * 2), by)
    assert learned(windows.tokens)[1].strip(".") == "two"
    assert windows.notes == (
        "2 earlier answers are not learned, because the chat template rewrites them",
    )


def test_an_instruction_is_a_conversation_where_there_is_a_template(tmp_path: Path) -> None:
    record = {"instruction": "add", "input": "1 2", "output": "3", "text": "all of it"}
    path = write_lines(tmp_path / "a.jsonl", record, record | {"input": None})
    chat = load(path, tokenizer(tmp_path / "chat", CHAT))
    assert learned(chat.tokens) == (
        "^<user>add\n\n1 2</><assistant>3</>",
        "." * len("^<user>add\n\n1 2</><assistant>") + "3</>",
    )
    plain = load(path, ByteTokenizer())
    text = "### Instruction:\nadd\n\n### Input:\n1 2\n\n### Response:\n"
    assert learned(plain.tokens) == (f"{text}3$", "." * len(text) + "3$")
    assert "Input" not in learned(plain.tokens, 1)[0]


def test_a_text_that_a_tokenizer_begins_begins_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by = tokenizer(tmp_path / "model", None)
    assert isinstance(by, DirectoryTokenizer)
    monkeypatch.setattr(by, "_start", [BOS])  # as Llama's does
    windows = load(write_lines(tmp_path / "a.jsonl", *[{"prompt": "a", "completion": "b"}] * 2), by)
    assert learned(windows.tokens) == ("^ab$", "..b$")


def test_samples_that_are_too_long_are_cut_and_said(tmp_path: Path) -> None:
    samples = [{"prompt": "x" * n, "completion": "yyyy"} for n in (2, 6, 20)]
    windows = load(write_lines(tmp_path / "a.jsonl", *samples), ByteTokenizer(), 8)
    assert [learned(windows.tokens, n)[1] for n in range(2)] == ["..yyyy$", "......yy"]
    assert windows.notes == (
        "2 of 3 samples have more than 8 tokens and are cut",
        "1 of 3 samples have no completion in these, and are left out",
    )


# Files


def test_the_same_records_come_from_every_kind_of_file(tmp_path: Path) -> None:
    records = [{"prompt": 'a, "b"\nc', "completion": str(number)} for number in range(3)]
    write_lines(tmp_path / "a.jsonl", *records)
    write_lines(tmp_path / "lines.json", *records)
    (tmp_path / "a.json").write_text(json.dumps(records, indent=1))
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        with (tmp_path / name).open("w", newline="", encoding="utf-8-sig") as file:
            rows = csv.DictWriter(file, ["prompt", "completion"], delimiter=delimiter)
            rows.writeheader()
            rows.writerows(records)
    names = ["a.jsonl", "lines.json", "a.json", "a.csv", "a.tsv"]
    for name in names:
        found = list(read_items(tmp_path / name))
        assert [item.values for item in found if isinstance(item, DataRecord)] == records, name
        assert all(str(tmp_path / name) in item.where for item in found)


def test_parquet_and_saved_data_sets_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    records = [{"messages": TALK}] * 3
    made = datasets.Dataset.from_list(records)
    made.to_parquet(tmp_path / "a.parquet")
    made.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": made}).save_to_disk(str(tmp_path / "splits"))
    for name in ("a.parquet", "saved"):
        found = list(read_items(tmp_path / name))
        assert [item.values for item in found if isinstance(item, DataRecord)] == records
    with pytest.raises(ValueError, match=r"has several splits; give one of them: .*/splits/train$"):
        list(read_items(tmp_path / "splits"))


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(Exception, match=r"pip install 'zero-infinity\[finetune\]'$"):
        list(read_items(tmp_path / "a.parquet"))


def test_what_describes_a_data_set_is_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# A data set")
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data" / "train.jsonl", {"prompt": "a", "completion": "b"})
    (item,) = read_items(tmp_path)
    assert isinstance(item, DataRecord)


def test_records_are_text_where_this_is_asked(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}')
    (piece,) = read_items(tmp_path / "a.json", as_text=True)
    assert piece[0] == '{"a": 1}'


# Training


def finetuned(where: Path, *options: object) -> dict[str, Any]:
    fixed = ["--model", where / "model", "--data", where / "a.jsonl", "--nvme", where / "nvme"]
    sizes = ["--sequence-length", 64, "--gpu-memory", "16MiB", "--cpu-memory", "32MiB"]
    words = ["finetune", *fixed, *sizes, "--precision", "fp32", "--lr", 0, "--json", *options]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_loss_of_a_step_is_the_mean_over_its_labels(tmp_path: Path) -> None:
    """However they are spread over its batches."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM(
        LlamaConfig(**shape, num_attention_heads=2, vocab_size=BYTE_VOCABULARY)
    )
    model.save_pretrained(tmp_path / "model")
    by = tokenizer(tmp_path / "model", CHAT)
    (tmp_path / "nvme").mkdir()
    talks = [
        {"messages": [TALK[1], {"role": "assistant", "content": "word " * (1 + n % 5)}]}
        for n in range(9)
    ]
    windows = load(write_lines(tmp_path / "a.jsonl", *talks), by, 64)
    batch = windows.training_batch(list(islice(windows.order(), 8)))
    ids, labels = (torch.from_numpy(each) for each in batch[:2])
    expected = float(model(input_ids=ids, labels=labels).loss.detach())
    assert batch.counted == int((labels[:, 1:] != -100).sum())
    common = ["--steps", 1, "--eval-batches", 1]
    losses = [
        finetuned(tmp_path, *common, "--batch-size", size, "--accumulate", 8 // size, *more)
        for size, more in (
            (8, ["--checkpoint", tmp_path / "steps"]),
            (2, []),
            (2, ["--accumulation-order", "vertical"]),
        )
    ]
    assert [each["loss"]["first"] for each in losses] == pytest.approx([expected] * 3, rel=1e-6)
    held_out = windows.batch(next(windows.validation_rows(8, 1)))
    ids, labels = (torch.from_numpy(each) for each in held_out[:2])
    validated = float(model(input_ids=ids, labels=labels).loss.detach())
    assert losses[0]["loss"]["validation"] == pytest.approx(validated, rel=1e-6)
    # A checkpoint of a run has what from_pretrained needs beside weights.
    arguments = ["export", tmp_path / "steps", tmp_path / "out"]
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exit_code == 0, result.stderr
    again = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == CHAT
    assert isinstance(load_tokenizer(tmp_path / "out", BYTE_VOCABULARY), DirectoryTokenizer)
