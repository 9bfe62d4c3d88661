"""Merges PEFT adapters into a wrapped base model.

[Note: unit by unit]
PEFT merges one layer after the other, through `weight.data`. A released parameter has no data to
change. So every PEFT layer in a wrapped model merges inside `gathered(write=True)`. While PEFT
merges all layers, a unit stays open until a layer needs other units. So each unit is read once and
written once. One unit at a time is on the compute device, with its adapters.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from infinity.modules.gathered import gathered
from infinity.sharding.parameter import ShardedParameter

_OF_LAYERS = ("merge", "unmerge")
_OF_MODELS = ("merge_adapter", "unmerge_adapter", "merge_and_unload", "unload")
_PEFT = "peft.tuners.tuners_utils"


class Merges:
    """The merges of one wrapped model. Its methods replace the merge methods of PEFT's layers and
    models."""

    def __init__(self, hand_over: Callable[[nn.Module], None]) -> None:
        """`hand_over` gets the module that a method returns after it removed the adapters."""
        self._hand_over = hand_over
        self._depth = 0
        self._open = ExitStack()

    @classmethod
    def attach(cls, model: nn.Module, hand_over: Callable[[nn.Module], None]) -> None:
        """Replace the merge methods of the PEFT modules in `model`."""
        peft = sys.modules.get(_PEFT)
        if peft is None:
            return
        merges = cls(hand_over)
        for module in model.modules():
            if isinstance(module, peft.BaseTunerLayer):
                merges._stand_in(module, _OF_LAYERS, merges._on_layer)
            elif isinstance(module, peft.BaseTuner):
                merges._stand_in(module, _OF_MODELS, merges._on_model)

    @staticmethod
    def detach(model: nn.Module) -> None:
        """Give the modules of `model` their own methods again."""
        for module in model.modules():
            for name in (*_OF_LAYERS, *_OF_MODELS):
                vars(module).pop(name, None)

    def _stand_in(self, module: nn.Module, names: tuple[str, ...], run: Callable[..., Any]) -> None:
        reference = weakref.ref(module)
        for name in names:
            if not hasattr(type(module), name):
                continue

            def method(*args: Any, _name: str = name, **options: Any) -> Any:
                here: Any = reference()
                return run(here, getattr(type(here), _name), *args, **options)

            vars(module)[name] = method

    def _on_model(self, model: nn.Module, method: Callable[..., Any], *args: Any, **of: Any) -> Any:
        with self._under_way(), _tied(model.model), gathered(_compared(model), write=True):
            left = method(model, *args, **of)
        if isinstance(left, nn.Module):
            self._hand_over(left)
        return left

    def _on_layer(self, layer: nn.Module, method: Callable[..., Any], *args: Any, **of: Any) -> Any:
        with self._under_way():
            away = [p for p in layer.parameters() if isinstance(p, ShardedParameter)]
            if away:  # its units are not open
                self._open.close()
                self._open.enter_context(gathered(list(layer.parameters()), write=True))
            with torch.no_grad():
                return method(layer, *args, **of)

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        """Units stay open until the outermost context ends."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._open.close()


def _compared(model: Any) -> list[nn.Parameter]:
    """The embeddings of the base of `model`, if its configuration ties them but they have two
    weights. PEFT compares their addresses at the end."""
    both = _embeddings(model.model)
    return [] if _is_one(both) else [p for each in both for p in each.parameters()]


def _embeddings(inner: Any) -> list[nn.Module]:
    """The input and output embeddings of `inner`, if its configuration ties them."""
    if not getattr(getattr(inner, "config", None), "tie_word_embeddings", False):
        return []
    both = inner.get_input_embeddings(), inner.get_output_embeddings()
    return [each for each in both if each is not None]


def _is_one(layers: list[nn.Module]) -> bool:
    """Whether `layers` have one weight."""
    weights = [getattr(each, "weight", None) for each in layers]
    return all(each is weights[0] for each in weights)


@contextmanager
def _tied(inner: Any) -> Iterator[None]:
    """Hide the output embeddings of `inner` while both embeddings are one parameter. PEFT would
    compare its addresses, but the parameter may have no data."""
    own, name = vars(inner), "get_output_embeddings"
    given, ask = {name: own[name]} if name in own else {}, getattr(inner, name, lambda: None)

    def last() -> Any:
        found = ask()
        pair = [each for each in (inner.get_input_embeddings(), found) if each is not None]
        return None if _is_one(pair) else found

    own[name] = last
    try:
        yield
    finally:
        del own[name]
        own.update(given)
