"""The loss of a causal language model of transformers without all of its logits at once.

[Note: where the logits go]
Two calls of the model are intercepted, as attributes of the modules: `LabelledForward` stands in
for the forward of the model, and `ProjectionForward` for that of its output projection. While a
call of the model has labels, the projection gives `LazyLogits`. The model hands them to its loss
function, which hands them to `cross_entropy`, and that is computed in chunks. Nothing in the code
of the model knows. Both are objects and no functions, so that a copy of the model has copies of
them that refer to the copy.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn

from infinity.errors import ConfigError, in_words
from infinity.losses.cross_entropy import AutocastState, EntropyPlan, LossReduction
from infinity.losses.lazy_logits import LazyLogits, Projection
from infinity.quantities import format_bytes, parse_bytes
from infinity.sharding.recognize import is_dtensor
from infinity.tiles.tiling import InTiles

log = logging.getLogger("infinity")

Model = TypeVar("Model", bound=nn.Module)


class ProjectionForward:
    """Stands in for the forward of the output projection `module`: gives lazy logits to a thread
    whose call of the model has labels.

    With `max_bytes` None it does what the forward did before.
    """

    def __init__(self, module: nn.Linear, max_bytes: int | None) -> None:
        self.module, self.max_bytes = module, max_bytes
        self.__wrapped__ = module.forward
        self._labelled: set[int] = set()
        self._told = False

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        hidden = args[0] if len(args) == 1 and not kwargs else None
        if (
            self.max_bytes is None
            or threading.get_ident() not in self._labelled
            or not isinstance(hidden, torch.Tensor)
            or torch.compiler.is_compiling()
        ):
            found: torch.Tensor = self.__wrapped__(*args, **kwargs)
            return found
        autocast = AutocastState.now(hidden.device.type)
        projection = Projection(self.module, autocast, self.max_bytes, self._note_whole)
        return LazyLogits.project(projection, hidden)

    @contextmanager
    def labelled(self, has_labels: bool) -> Iterator[None]:
        """A call of the model on this thread, which has labels or not."""
        thread = threading.get_ident()
        before = thread in self._labelled
        change = {True: self._labelled.add, False: self._labelled.discard}
        change[has_labels](thread)
        try:
            yield
        finally:
            change[before](thread)

    def _note_whole(self, by: str) -> None:
        """Somebody asks for values, by the operator `by`."""
        if threading.get_ident() in self._labelled and not self._told:
            self._told = True
            log.warning(
                "infinity.chunked_loss saves nothing here: the forward of the model needs all "
                "logits at once, for %s",
                by,
            )


class LabelledForward:
    """Stands in for the forward of the causal language model `model`: tells `projection` whether a
    call has labels."""

    def __init__(self, model: nn.Module, projection: ProjectionForward) -> None:
        self.projection = projection
        self.__wrapped__ = model.forward
        self._place = list(inspect.signature(model.forward).parameters).index("labels")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        labels = args[self._place] if len(args) > self._place else kwargs.get("labels")
        with self.projection.labelled(labels is not None):
            return self.__wrapped__(*args, **kwargs)


def chunked_loss(model: Model, max_bytes: str | int | None = "256MiB") -> Model:
    """Let a causal language model of transformers compute its loss from chunks of tokens, whose
    logits take at most `max_bytes` at once; returns `model`.

    For calls with `labels`. Loss and gradients are those of the plain model, to rounding; with one
    chunk they are the same bits. `max_bytes` counts the logits (tokens, vocabulary) of a chunk and
    all that is made of them: the conversion to fp32, the log-softmax, gradients. One token at least
    is computed at a time. A step makes all logits twice. With several chunks the gradient of a
    bf16 or fp16 weight of the projection is summed up in fp32, which takes 4 bytes for each of its
    elements in the backward.

    `outputs.logits` of such a call has no values until they are used. What comes then are the
    logits of the plain model, all at once. Use them before `optimizer.step()`. A
    `cross_entropy` of them by code of your own is computed in chunks, too.

    Before or after `infinity.wrap`, and for models that are never wrapped; before `infinity.tile`,
    and before a `wrap` that would cut the projection into tiles: then it stays whole. A second call
    changes `max_bytes`; None takes it off again. After `resize_token_embeddings` call it again. A
    second derivative of the loss cannot be taken.

    Raises `ConfigError` before anything is changed: for `max_bytes` that is no number of bytes or
    has no room for one token, for what is no model of transformers with labels and an output
    projection of class `nn.Linear`, and for a loss function that does not pass its logits to
    `cross_entropy`.
    """
    language_model = _language_model(model)
    head = language_model.get_output_embeddings()
    found = _stand_in(language_model, LabelledForward)
    if max_bytes is None:
        if found is not None:
            _remove(language_model, found)
        return model
    limit = _parsed(max_bytes)
    _check_projection(language_model, head)
    _check_room(head, limit)
    _check_loss(language_model)
    if found is not None and found.projection.module is head:
        found.projection.max_bytes = limit
        return model
    if found is not None:
        _remove(language_model, found)
    projection = ProjectionForward(head, limit)
    labelled = LabelledForward(language_model, projection)
    vars(head)["forward"] = projection
    vars(language_model)["forward"] = labelled
    return model


StandIn = TypeVar("StandIn")


def _stand_in(module: nn.Module, kind: type[StandIn]) -> StandIn | None:
    """The stand-in of the forward of `module`, also below what others have put there since."""
    forward: Any = module.forward
    while forward is not None and not isinstance(forward, kind):
        forward = getattr(forward, "__wrapped__", None)
    return forward


def _remove(model: nn.Module, labelled: LabelledForward) -> None:
    """The forwards are those of before, or do the same where others have put something on top."""
    projection = labelled.projection
    projection.max_bytes = None
    for module, stand_in in ((model, labelled), (projection.module, projection)):
        if vars(module).get("forward") is stand_in:
            del vars(module)["forward"]


# What is refused


def _language_model(model: object) -> Any:
    """The model of transformers that `model` is, or has adapters of PEFT on."""
    found = model
    if isinstance(model, nn.Module) and hasattr(model, "get_base_model"):
        found = cast(Any, model).get_base_model()
    library = sys.modules.get("transformers")
    if library is None or not isinstance(found, library.PreTrainedModel):
        raise ConfigError(
            "infinity.chunked_loss takes a causal language model of transformers, not "
            f"{in_words(model)}; leave it out, or give the model itself and no module around it"
        )
    if (
        "labels" not in inspect.signature(found.forward).parameters
        or found.get_output_embeddings() is None
    ):
        raise ConfigError(
            f"{type(found).__name__} computes no loss from logits of a vocabulary; "
            "infinity.chunked_loss is for models such as AutoModelForCausalLM gives: leave it out"
        )
    return found


def _parsed(max_bytes: object) -> int:
    try:
        return parse_bytes(max_bytes)  # type: ignore[arg-type]
    except ValueError as error:
        raise ConfigError(f"infinity.chunked_loss: max_bytes: {error}") from None


def _check_projection(model: Any, head: Any) -> None:
    """Raise `ConfigError` for an output projection whose product we do not know."""
    name = type(head).__name__
    if isinstance(head, InTiles):
        raise ConfigError(
            f"the output projection of {type(model).__name__} lies in tiles, and "
            "infinity.chunked_loss needs it whole: call chunked_loss before infinity.tile and "
            "infinity.wrap, which then leave it whole"
        )
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise ConfigError(
            f"the output projection of {type(model).__name__} is a {name}, and "
            "infinity.chunked_loss needs a torch.nn.Linear: leave the projection out of adapters "
            "and quantization, or leave out chunked_loss"
        )
    if is_dtensor(head.weight):
        raise ConfigError(
            f"the output projection of {type(model).__name__} is cut over several ranks (a "
            "DTensor), so no rank has all logits of a token; leave it out of the tensor parallel "
            "plan, or leave out infinity.chunked_loss"
        )
    if "forward" in vars(head) and _stand_in(head, ProjectionForward) is None:
        raise ConfigError(
            f"the forward of the output projection of {type(model).__name__} was replaced by "
            f"{in_words(vars(head)['forward'])}; call infinity.chunked_loss before that, or leave "
            "it out"
        )


def _check_room(head: nn.Linear, max_bytes: int) -> None:
    """Raise `ConfigError` where the logits of one token take more than `max_bytes`."""
    dtype = torch.promote_types(head.weight.dtype, torch.float32)  # as losses of transformers do
    autocast = AutocastState(head.weight.device.type, False, dtype)
    plan = EntropyPlan(None, (), autocast, LossReduction("mean", -100, 0.0), max_bytes)
    least = plan.bytes_per_token(head.out_features, dtype)
    if max_bytes < least:
        raise ConfigError(
            f"infinity.chunked_loss: max_bytes is {format_bytes(max_bytes)}, and the logits of one "
            f"token take {format_bytes(least)}, because the vocabulary has {head.out_features:,} "
            "entries; give at least that, better some hundred times as much"
        )


def _check_loss(model: Any) -> None:
    """Raise `ConfigError` where the loss function of the model does something with its logits that
    needs all of them: it is tried on two tokens of a vocabulary of two. A model that has none
    computes its loss itself."""
    if getattr(model, "loss_type", None) is None and not hasattr(model, "_loss_function"):
        return
    asked: list[str] = []
    head = nn.Linear(1, 2, device="cpu", dtype=torch.float32)
    projection = Projection(head, AutocastState("cpu", False, torch.float32), 1 << 10, asked.append)
    hidden = torch.zeros(1, 2, 1)
    labels = torch.zeros(1, 2, dtype=torch.int64)
    function: Callable[..., Any] = model.loss_function
    cause = None
    try:
        function(logits=LazyLogits.project(projection, hidden), labels=labels, vocab_size=2)
    except Exception as error:
        cause = error
    if asked or cause is not None:
        name = getattr(function, "__name__", type(function).__name__)
        why = (
            f"needs all logits at once, for {asked[0]}" if asked else f"failed in a trial: {cause}"
        )
        raise ConfigError(
            f"{name}, the loss function of {type(model).__name__}, {why}; "
            "infinity.chunked_loss follows logits to torch.nn.functional.cross_entropy: use that "
            "in the loss function, or leave out chunked_loss"
        ) from cause
