"""Activation checkpointing that the engine adds to a model: blocks run their forward again in the
backward, in the state that the first forward found.

[Note: a checkpoint around hooks]
`torch.utils.checkpoint` runs a function. A hook cannot, so it enters the same context before the
forward of a block, and leaves it after that. Tensors that the block saves meanwhile are dropped. In
the backward, torch calls the block once more, with the same inputs, random states and autocast
state. The engine's hooks bring the parameters then, as for any checkpoint of the user. The inputs
are saved before the context is entered, so they go where `Config.activations` says.

[Note: changes of a recomputation]
A recomputation must leave no change behind, and must find the state that the first forward found:
see `activations/found_state`. Containers among the inputs are made again. A block may change
another object among its inputs, such as a cache of keys and values, and this cannot be undone. So a
block with such an input is not recomputed.

[Note: micro-batches that run together]
In vertical order micro-batches use a unit one after the other. A block of one unit begins its turn
before its state is restored, so no other micro-batch sees the restored state. A block of several
units may be interrupted between them. Then a forward that needs another state than its modules have
raises an error.

[Note: checkpoints of the model]
A checkpoint around the call of a block shows in the hooks on saved tensors, and the engine adds
none. A checkpoint inside the call shows when it is entered, which is too late. So the first forward
has both, one inside the other. The next forwards have only the model's, until a forward enters
none. (A reentrant checkpoint inside a block does not show, so both stay.)

[Note: compiled code]
A block that is compiled on its own is compiled in its recomputation, too. If the code around it is
compiled, its forward is a part of that code, and a recomputation would save other tensors. Then the
block is not recomputed.

[Note: blocks that are recomputed at times]
With `recompute="auto"` a block may be recomputed in one step and not in the next
(`activations/treatments`). A forward that is not recomputed copies no tensors. So the next
recomputed forward searches again for the tensors that its block changes.
"""

from __future__ import annotations

import enum
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils import _pytree as trees
from torch.utils import checkpoint as of_torch

from infinity.activations.found_state import FoundState, Locate, Place
from infinity.activations.treatments import Treatments
from infinity.backward import transforms

log = logging.getLogger("infinity")

_UNCHANGEABLE = (
    *(torch.Tensor, type(None), bool, int, float, complex, str, bytes, range, enum.Enum, type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, nn.Module),
    *(FunctionType, BuiltinFunctionType),
)
"""The types of inputs of a recomputed block. Autograd refuses a block that changes a tensor in
place."""

_CHANGEABLE = (
    "it is given a {}, which its forward may change; leave that out (use_cache=False for a cache "
    "of transformers)"
)
_TRANSFORM = (
    "torch.func or torch.autograd.forward_ad transforms its forward, which the backward does not"
)
_COMPILED = (
    "torch.compile compiles the code around it, which the backward does not run again; compile "
    "block after block (block.compile())"
)


def _checkpoint(run: Any, inputs: Sequence[Any]) -> AbstractContextManager[None]:
    """The context of a checkpoint of torch, around a forward that the caller runs. The backward
    runs `run(*inputs)`."""
    make: Any = of_torch._checkpoint_without_reentrant_generator
    options = True, of_torch.noop_context_fn, "default", False, True
    return contextmanager(make)(run, *options, *inputs)


def _forward_mode() -> bool:
    """Whether the caller is inside `torch.autograd.forward_ad.dual_level`."""
    return forward_ad._current_level >= 0


class Around(NamedTuple):
    """The contexts around a forward of a block: the hooks of a checkpoint, and the context that
    counts it. If it `keeps`, saved tensors stay where they are."""

    checkpoint: AbstractContextManager[object] | None = None
    keeps: bool = False
    counting: AbstractContextManager[object] | None = None


class Recomputation:
    """The recomputed blocks of one model, with their `names` by module. With `treatments`, these
    choose the blocks.

    A call with inputs that the block may change is not recomputed.
    """

    def __init__(
        self, names: Mapping[nn.Module, str], treatments: Treatments | None = None
    ) -> None:
        self.treatments = treatments
        """The treatments of `recompute="auto"`; None in other modes."""
        self._names = weakref.WeakKeyDictionary(names)  # the model may die before the engine
        self._changing: weakref.WeakKeyDictionary[nn.Module, dict[bool, set[Place]]] = (
            weakref.WeakKeyDictionary()
        )
        self._late: set[str] = set()
        self._inside: weakref.WeakKeyDictionary[nn.Module, list[FoundState]] = (
            weakref.WeakKeyDictionary()
        )
        self._by_themselves = weakref.WeakSet[nn.Module]()
        self._recomputed: dict[str, None] = {}
        self._warned: set[tuple[str, str]] = set()

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The names of the recomputed blocks, by the last forward of each with gradients, in the
        order of the model."""
        return tuple(name for name in self._names.values() if name in self._recomputed)

    def around(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compiling: bool,
        locate: Locate,
        begin_turn: Callable[[nn.Module], None],
    ) -> Around:
        """The contexts of a forward of `module`. `compiling` says whether torch.compile compiles
        its caller. `locate` returns where a tensor lies in the memory of units. `begin_turn` keeps
        other micro-batches from running."""
        name, treatments = self._names.get(module), self.treatments
        if name is None or (treatments is not None and treatments.gauge.is_inside):
            return Around()  # no block, or inside a block that is counted
        if module in self._by_themselves:
            return Around(counting=self.leave(module, (args, kwargs)))
        inputs, structure = trees.tree_flatten((args, kwargs))
        odd = next((each for each in inputs if not isinstance(each, _UNCHANGEABLE)), None)
        why = "" if odd is None else _CHANGEABLE.format(type(odd).__name__)
        if transforms() or _forward_mode():
            why = _TRANSFORM
        if compiling and module._compiled_call_impl is None:
            why = _COMPILED
        if why:
            self._warn(type(module).__name__, why)
        recomputes, keeps, counting = not why, False, None
        if treatments is not None:
            block = treatments.gauge.begin(name, inputs, recomputable=not why)
            treatment = treatments.of(name, block)
            recomputes, keeps = recomputes and treatment == "recompute", treatment == "keep"
            counting = treatments.gauge.counting(block)
            if not recomputes:
                self._changing.pop(module, None)
        if not recomputes:
            self._recomputed.pop(name, None)
            return Around(None, keeps, counting)
        self._recomputed[name] = None
        entered = self._entered(module, name, inputs, structure, locate, begin_turn)
        return Around(entered, False, counting)

    def leave(self, module: nn.Module, inputs: Any = ()) -> AbstractContextManager[object] | None:
        """The context of a forward of `module` that the model itself recomputes. It counts
        `inputs`, because no hook sees that they are kept."""
        self._recomputed.pop(self._names.get(module, ""), None)
        if self.treatments is None:
            return None
        return self.treatments.gauge.ignoring(trees.tree_leaves(inputs))

    def ended(self, module: nn.Module, checkpoints: bool) -> None:
        """A forward of `module` has ended. `checkpoints` says whether it entered a checkpoint of
        the model, as in transformers. Then the engine adds none to the next forward."""
        if checkpoints:
            self._by_themselves.add(module)
            if self.treatments is not None and module in self._names:
                self.treatments.gauge.forget(self._names[module])
        else:
            self._by_themselves.discard(module)

    def _warn(self, kind: str, why: str) -> None:
        if (kind, why) not in self._warned:
            self._warned.add((kind, why))
            said = "all" if self.treatments is None else "auto"
            log.warning("recompute=%r leaves each %s as it is: %s", said, kind, why)

    @contextmanager
    def _entered(
        self,
        module: nn.Module,
        name: str,
        inputs: list[Any],
        structure: trees.TreeSpec,
        locate: Locate,
        begin_turn: Callable[[nn.Module], None],
    ) -> Iterator[None]:
        changing, training = self._changing.setdefault(module, {}), module.training
        state = FoundState(module, inputs, changing.get(training), self._late, locate)

        def again(*values: Any) -> None:
            arguments, named = trees.tree_unflatten(list(values), structure)
            begin_turn(module)
            self._late |= state.lost()
            with self._noted(module, state), state.restored(name):
                module(*arguments, **named)

        try:
            with self._noted(module, state), _checkpoint(again, inputs):
                yield
        finally:
            changing[training] = state.ended()

    @contextmanager
    def _noted(self, module: nn.Module, state: FoundState) -> Iterator[None]:
        """Inside the context, a forward of `module` that found `state` is under way. See [Note:
        micro-batches that run together]."""
        inside = self._inside.setdefault(module, [])
        for other in inside:
            other.mixed = state.mixed = True
            other.check_mixed()
        inside.append(state)
        try:
            yield
        finally:
            inside.remove(state)
