"""Checks config.json of a model directory before `transformers` reads it, names the file in errors
of `transformers`, and says how long a window of text is.

`transformers` checks the types of values, but few of their ranges. A value out of range causes a
later error: a division by zero, a negative dimension, or a loop over a billion layers. So this
module checks the ranges of sizes. Any error while a configuration or a model is built becomes one
sentence that names the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infinity.errors import InfinityError, sentence
from infinity.models.reading import read_json

NAME = "config.json"
_MOST_BYTES = 16 << 20
_MOST_LAYERS, _MOST_EXPERTS, _MOST_WIDTH, _MOST_ROWS = 10_000, 1 << 16, 1 << 24, 1 << 31
_LIMITS = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), _MOST_LAYERS),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), _MOST_EXPERTS),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "head_dim"), _MOST_WIDTH),
    **dict.fromkeys(
        ("num_attention_heads", "num_key_value_heads", "num_heads", "n_head", "n_heads"),
        _MOST_WIDTH,
    ),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), _MOST_ROWS),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions", "n_ctx"), _MOST_ROWS),
}
"""The largest allowed value of each size, under its names in different architectures. No real model
comes near it."""
# They are zero for a model without experts.
_MAY_BE_ZERO = frozenset(("num_local_experts", "num_experts", "n_routed_experts"))


MOST_TOKENS = 1 << 24
"""The longest window, and the most new tokens."""
USUAL_LENGTH = 1_024
"""Tokens of a window of text where no option says so."""


def positions(config: Any) -> int | None:
    """The most tokens of a sequence that the model of a transformers configuration takes; None if
    it has no such limit."""
    most = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else None


def planned_length(config: Any) -> int:
    """The tokens of a window of text for the model of a transformers configuration, where no option
    says so: `USUAL_LENGTH`, or all positions of the model if these are fewer."""
    return min(USUAL_LENGTH, positions(config) or USUAL_LENGTH)


def read_description(path: Path) -> dict[str, Any]:
    """The object in the config.json `path`.

    Raises `ValueError` with `path`, the key and the value, for an impossible size or for NaN.
    Raises `OSError` if the file cannot be read.
    """
    values = read_json(path, _MOST_BYTES)
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not the description of a model: it holds no JSON object")
    for name, value in _leaves(values):
        key = name.rpartition(".")[2]
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"{path}: {name} is NaN, which is not a number")
        least, most = int(key not in _MAY_BE_ZERO), _LIMITS.get(key)
        if most is not None and isinstance(value, int) and not least <= value <= most:
            raise ValueError(
                f"{path}: {name} is {_shown(value)}, and has to be between {least} and {most}"
            )
    return values


def _leaves(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The names and values of all entries that are not containers. The name of b inside of a is
    a.b."""
    waiting: list[tuple[str, Any]] = [("", values)]
    while waiting:
        name, value = waiting.pop()
        inner = (
            value.items()
            if isinstance(value, dict)
            else enumerate(value)
            if isinstance(value, list)
            else None
        )
        if inner is None:
            yield name, value
        else:
            waiting += [(f"{name}.{key}" if name else str(key), each) for key, each in inner]


def _shown(value: int) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:20]}... ({len(text)} digits)"


@contextmanager
def described_by(path: Path | None) -> Iterator[None]:
    """Turn an error inside into a `ValueError` that names the description `path`.

    Without a description (None), and for an `InfinityError`, the error stays as it is.
    """
    try:
        yield
    except Exception as error:
        if path is None or isinstance(error, InfinityError):
            raise
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(
            f"{path} does not describe a model that can be built: {kind}{sentence(error)}"
        ) from error
