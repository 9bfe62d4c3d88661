"""Adapters of PEFT are merged into a base whose data the engine keeps.

[Note: unit by unit]
PEFT merges one layer after the other, through `weight.data`. A released parameter has no data to
change. So every layer of PEFT in a wrapped model merges inside of `gathered(write=True)`. While all
layers are merged, a unit stays open until a layer needs others: each unit is read once and written
once, and one is on the compute device at a time, with its adapters.
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
    """The merges of one wrapped model. Its methods stand in for those of the layers, and of the
    models, that PEFT made."""

    def __init__(self, hand_over: Callable[[nn.Module], None]) -> None:
        """`hand_over` is told what is left of a model without adapters."""
        self._hand_over = hand_over
        self._depth = 0
        self._open = ExitStack()

    @classmethod
    def attach(cls, model: nn.Module, hand_over: Callable[[nn.Module], None]) -> None:
        """Stand in for methods of modules of `model`, if PEFT made some."""
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
        """The modules of `model` have their own methods again."""
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
            if away:  # other units than those of the layer before
                self._open.close()
                self._open.enter_context(gathered(list(layer.parameters()), write=True))
            with torch.no_grad():
                return method(layer, *args, **of)

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        """Inside of the outermost one, units stay open."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._open.close()


def _compared(model: Any) -> list[nn.Parameter]:
    """The embeddings of what `model` adapts where they should be tied and are not: PEFT compares
    their addresses in the end."""
    both = _embeddings(model.model)
    return [] if _is_one(both) else [p for each in both for p in each.parameters()]


def _embeddings(inner: Any) -> list[nn.Module]:
    """The first and the last layer of `inner`, if its configuration ties them."""
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
    """Inside, a model whose embeddings are one parameter has no last layer, whose address PEFT
    would compare: the parameter need not be there."""
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
