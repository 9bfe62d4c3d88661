"""Computes the loss of a causal language model of transformers without all logits in memory at
once.

[Note: where the logits go]
Two objects intercept calls of the model, as attributes of its modules. `LabelledForward` replaces
the forward of the model, and `ProjectionForward` replaces the forward of its output projection.
While a call of the model has labels, the projection returns `LazyLogits`. The model passes them to
its loss function, and the loss function passes them to `cross_entropy`, which runs in chunks. The
code of the model does not change. Both replacements are objects, not functions: a copy of the model
has copies of them, which refer to the copy.
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
    """Replaces the forward of the output projection `module`: returns lazy logits in a thread with
    a labelled call of the model.

    Otherwise, and if `max_bytes` is None, runs the original forward.
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
            return self.__wrapped__(*args, **kwargs)
        autocast = AutocastState.now(hidden.device.type)
        projection = Projection(self.module, autocast, self.max_bytes, self._note_whole)
        return LazyLogits.project(projection, hidden)

    @contextmanager
    def labelled(self, has_labels: bool) -> Iterator[None]:
        """Around a call of the model on this thread."""
        thread = threading.get_ident()
        before = thread in self._labelled
        change = {True: self._labelled.add, False: self._labelled.discard}
        change[has_labels](thread)
        try:
            yield
        finally:
            change[before](thread)

    def _note_whole(self, by: str) -> None:
        """Warn, once, if the labelled forward itself needs values, for the operator `by`."""
        if threading.get_ident() in self._labelled and not self._told:
            self._told = True
            log.warning(
                "infinity.chunked_loss saves nothing here: the forward of the model needs all "
                "logits at once, for %s",
                by,
            )


class LabelledForward:
    """Replaces the forward of the causal language model `model`: notes in `projection` whether a
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
    """Make a causal language model of transformers compute its loss in chunks of tokens. Returns
    `model`.

    Applies to calls with `labels`. `max_bytes` limits the memory of one chunk: its logits (tokens,
    vocabulary), their fp32 conversion, the log-softmax and the gradients. A chunk has at least one
    token. Loss and gradients equal those of the plain model up to rounding, and bit for bit with
    one chunk. A step computes all logits twice. With several chunks, the gradient of a bf16 or fp16
    weight of the projection is summed in fp32, which takes 4 bytes per element in the backward.

    `outputs.logits` of such a call has no values until your code uses them. Then all logits of the
    plain model are computed at once. Use them before `optimizer.step()`. If your own code passes
    them to `cross_entropy`, it runs in chunks, too.

    Call this before or after `infinity.wrap`, or without it. Call it before `infinity.tile`, and
    before a `wrap` that would cut the projection into tiles: both then leave it whole. A second
    call changes `max_bytes`; None restores the plain loss. Call it again after
    `resize_token_embeddings`. The loss has no second derivative: `create_graph=True` raises
    `RuntimeError`.

    Raises `ConfigError` before anything changes: if `max_bytes` is no number of bytes or too small
    for one token; if `model` is no model of transformers with labels and an output projection of
    class `nn.Linear`; and if its loss function does not pass the logits to `cross_entropy`.
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
    """The replacement of class `kind` for the forward of `module`, also below later wrappers; None
    without one."""
    forward: Any = module.forward
    while forward is not None and not isinstance(forward, kind):
        forward = getattr(forward, "__wrapped__", None)
    return forward


def _remove(model: nn.Module, labelled: LabelledForward) -> None:
    """Restore the original forwards. A replacement below a later wrapper stays, and runs the
    original forward."""
    projection = labelled.projection
    projection.max_bytes = None
    for module, stand_in in ((model, labelled), (projection.module, projection)):
        if vars(module).get("forward") is stand_in:
            del vars(module)["forward"]


# Checks


def _language_model(model: object) -> Any:
    """Return the model of transformers: `model` itself, or the base model of a PEFT model. Raises
    `ConfigError` without one, or if it has no labels or output projection."""
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
    """Raise `ConfigError` unless the output projection is a whole, plain `nn.Linear`."""
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
    """Raise `ConfigError` if the logits of one token take more than `max_bytes`."""
    dtype = torch.promote_types(head.weight.dtype, torch.float32)  # like losses of transformers
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
    """Raise `ConfigError` if the loss function of the model needs all logits at once, or fails.
    Tries it on two tokens of a vocabulary of two. Skips a model without a loss function, which
    computes its loss in its forward."""
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
