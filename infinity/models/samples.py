"""Samples with a completion: the context that the model reads, and the answer that it learns.

[Note: which tokens are learned]
The loss counts completions only: the answers of the assistant, with their end tokens. A token
belongs to a completion if its first character does. All earlier text is context.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from infinity.models.records import DataRecord
from infinity.models.tokenizer import Text, TextPart, Tokenizer

_SPEAKERS = {"human": "user", "gpt": "assistant"}
"""Role names in ShareGPT, and in messages."""
_KNOWN = "text, messages, prompt and completion, or instruction and output"
_PORTION = 1 << 20
"""Characters that are tokenized at a time."""


def is_document(record: DataRecord) -> bool:
    """Whether `record` is a text to learn as a whole. Raises `ValueError` for an unknown kind."""
    keys = record.values.keys()
    if "messages" in keys or "conversations" in keys:
        return False
    if keys >= {"prompt", "completion"} or keys >= {"instruction", "output"}:
        return False
    if "text" in keys:
        return True
    shown = ", ".join(map(repr, list(keys)[:8])) or "nothing"
    raise ValueError(f"{record.where}: it has {shown:.200}, and a record has {_KNOWN}")


def document(record: DataRecord) -> str:
    """The text of a document. Raises `ValueError` if it is no string."""
    return _string(record, "text")


class Renderer:
    """Turns records into texts. Conversations are rendered with the chat template of
    `tokenizer`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.skipped = 0
        """Answers that are not learned because the template rewrites them."""

    def text(self, record: DataRecord) -> Text:
        """The text of `record`. Raises `ValueError` that begins with its place."""
        values = record.values
        if "messages" in values or "conversations" in values:
            key = "messages" if "messages" in values else "conversations"
            return self._conversation(record, _messages(record, key))
        if "prompt" in values:
            if isinstance(values["prompt"], list):
                before = _messages(record, "prompt")
                messages = [*before, *_messages(record, "completion")]
                return self._conversation(record, messages, len(before))
            return _plain(_string(record, "prompt"), _string(record, "completion"))
        return self._instruction(record)

    def _instruction(self, record: DataRecord) -> Text:
        task, answer = _string(record, "instruction"), _string(record, "output")
        more = _string(record, "input") if record.values.get("input") is not None else ""
        if self._tokenizer.has_template:
            question = f"{task}\n\n{more}" if more else task
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            return self._conversation(record, messages)
        more = f"### Input:\n{more}\n\n" if more else ""
        return _plain(f"### Instruction:\n{task}\n\n{more}### Response:\n", answer)

    def _conversation(
        self, record: DataRecord, messages: list[dict[str, Any]], first: int = 0
    ) -> Text:
        """Render `messages`. The answers of the assistant from message `first` on are learned."""
        if not self._tokenizer.has_template:
            raise ValueError(
                f"{record.where}: it has messages, and the tokenizer has no chat template; put a "
                "chat_template.jinja beside it, or write prompt and completion"
            )
        answers = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
        if not answers:
            raise ValueError(f"{record.where}: no message is the assistant's: nothing to learn")
        tools = record.values.get("tools")
        try:
            return self._rendered(messages, answers, tools)
        except ValueError as error:
            raise ValueError(f"{record.where}: {error}") from None

    def _rendered(self, messages: list[dict[str, Any]], answers: list[int], tools: Any) -> Text:
        render = self._tokenizer.render
        whole = render(messages, tools, False)
        parts: list[TextPart] = []
        done = 0
        for i in answers:
            end = render(messages[: i + 1], tools, False) if i + 1 < len(messages) else whole
            # Not every template marks the beginning of an answer.
            begins = (render(messages[:i], tools, mark) for mark in (True, False))
            begin = next((text for text in begins if end.startswith(text)), None)
            if begin is None or not whole.startswith(end) or len(begin) < done:
                self.skipped += 1
                continue
            parts.append(TextPart(whole[done : len(begin)], False))
            parts.append(TextPart(whole[len(begin) : len(end)], True))
            done = len(end)
        if not parts:
            raise ValueError("the chat template hides where the answer of the assistant begins")
        return Text([*parts, TextPart(whole[done:], False)], is_rendered=True)


def _plain(prompt: str, completion: str) -> Text:
    return Text([TextPart(prompt, False), TextPart(completion, True)], is_rendered=False)


def _string(record: DataRecord, key: str) -> str:
    value = record.values.get(key)
    if not isinstance(value, str):
        raise ValueError(f'{record.where}: no string under the key "{key}"')
    return value


def _messages(record: DataRecord, key: str) -> list[dict[str, Any]]:
    """The messages under `key`, each with a role and with text or tool calls. Raises
    `ValueError`."""
    found = record.values.get(key)
    if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
        raise ValueError(f'{record.where}: no list of messages under the key "{key}"')
    messages = []
    for each in found:
        message = dict(each)
        if "from" in message:
            message["role"] = _SPEAKERS.get(message.pop("from"), message.get("role", "system"))
            message["content"] = message.pop("value", None)
        if not isinstance(message.get("role"), str):
            raise ValueError(f'{record.where}: a message of "{key}" has no role')
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise ValueError(f'{record.where}: a message of "{key}" has no text as its content')
        messages.append({name: value for name, value in message.items() if value is not None})
    return messages


class Rows:
    """Samples of different lengths, padded when they are read.

    A token that the loss does not count is stored as ~id, which is negative. `shape` is (rows, most
    tokens of a row).
    """

    def __init__(self, length: int, separator: int) -> None:
        self._values, self._ends, self._fill = array("i"), array("q", [0]), ~separator
        self._length = length

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self._length

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each row."""
        ends = np.array(self._ends, np.int64)
        return ends[1:] - ends[:-1]

    def joined(self, groups: Sequence[Sequence[int]]) -> Batch:
        """The rows of each of `groups` one after another, padded to the longest group. The first
        token of a row is no label."""
        parts = [[self[[number]][0] for number in group] for group in groups]
        width = max(sum(map(len, rows)) for rows in parts)
        joined = np.full((len(groups), width), self._fill, np.int64)
        positions = np.zeros_like(joined)
        for at, rows in enumerate(parts):
            begin = 0
            for row in rows:
                end = begin + len(row)
                joined[at, begin:end] = row
                joined[at, begin] = min(row[0], ~row[0])
                positions[at, begin:end] = np.arange(len(row))
                begin = end
        return unpacked(joined)._replace(positions=positions)

    def shrink(self) -> None:
        """Make the longest row the length of a window."""
        self._length = int(self.lengths.max(initial=2))

    def append(self, row: npt.NDArray[np.int32]) -> None:
        """Add a row of shape (tokens,)."""
        self._values.frombytes(row.astype(np.int32, copy=False).tobytes())
        self._ends.append(len(self._values))

    def __getitem__(self, numbers: Any) -> npt.NDArray[np.int32]:
        """The rows `numbers`, of shape (rows, tokens of the longest)."""
        bounds = [(self._ends[int(n)], self._ends[int(n) + 1]) for n in numbers]
        width = max((end - begin for begin, end in bounds), default=0)
        rows = np.full((len(bounds), width), self._fill, np.int32)
        for row, (begin, end) in zip(rows, bounds, strict=True):
            row[: end - begin] = self._values[begin:end]
        return rows


class Batch(NamedTuple):
    """Inputs of a model, of shape (rows, tokens), and the number of labels that count. `positions`
    begin again with each sample of a row; None for one sample a row.

    A model compares a label with the output for the token before it, so the first label of a row
    never counts.
    """

    ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    counted: int
    positions: npt.NDArray[np.int64] | None = None


def unpacked(rows: npt.NDArray[np.int64]) -> Batch:
    """The batch of `rows`, as stored in `Rows`. Labels that do not count are -100."""
    hidden = rows < 0
    labels = np.where(hidden, -100, rows)
    return Batch(np.where(hidden, ~rows, rows), labels, int((~hidden[:, 1:]).sum()))


class Encoded(NamedTuple):
    """Rows, and notes on them for the user."""

    rows: Rows
    notes: tuple[str, ...]


def encode_records(records: Iterable[DataRecord], tokenizer: Tokenizer, length: int) -> Encoded:
    """One row for each record, cut to `length` tokens. A record without a completion in these
    tokens is left out. Raises `ValueError` for an invalid record."""
    renderer, rows = Renderer(tokenizer), Rows(length, tokenizer.separator)
    total = cut = lost = 0
    for texts in _portions(renderer, records):
        for ids, learned in tokenizer.encode_texts(texts):
            total += 1
            cut += len(ids) > length
            row = np.where(learned, ids.astype(np.int32), ~ids.astype(np.int32))[:length]
            if (row[1:] >= 0).any():
                rows.append(row)
            else:
                lost += 1
    notes = []
    if cut:
        notes.append(f"{cut} of {total} samples have more than {length} tokens and are cut")
    if lost:
        notes.append(f"{lost} of {total} samples have no completion in these, and are left out")
    if renderer.skipped:
        notes.append(
            f"{renderer.skipped} earlier answers are not learned, because the chat template "
            "rewrites them"
        )
    return Encoded(rows, tuple(notes))


def _portions(renderer: Renderer, records: Iterable[DataRecord]) -> Iterable[Sequence[Text]]:
    waiting: list[Text] = []
    size = 0
    for record in records:
        waiting.append(renderer.text(record))
        size += sum(len(part.text) for part in waiting[-1].parts)
        if size >= _PORTION:
            yield waiting
            waiting, size = [], 0
    yield waiting
