"""The state of a model before `infinity.wrap`, to be restored exactly if `wrap` fails."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from infinity.sharding.parameter import ShardedParameter
from infinity.sharding.recognize import is_dtensor
from infinity.sharding.tensor_parallel import attach, local

_TABLES = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict)]
"""The dicts that every module has: of parameters, buffers, submodules and hooks."""


class Snapshot:
    """Keeps the classes, attributes and tables of the modules of `model`, and the classes and data
    of its parameters.

    Data is kept by reference, so its memory is freed only when the last step of `wrap` is done.
    That does not raise the peak of host memory: the arenas are allocated as a whole before the
    first parameter moves.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kinds: list[tuple[Any, type[nn.Module]]] = [(m, type(m)) for m in model.modules()]
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for module in model.modules():
            tables = [vars(module).get(name) for name in _TABLES]
            self._tables += [
                (table, dict(table)) for table in (vars(module), *tables) if isinstance(table, dict)
            ]
        self._parameters = [
            (p, type(p), local(p) if is_dtensor(p) else p.data) for p in model.parameters()
        ]
        self._contents: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters of the model before `wrap`."""
        return [parameter for parameter, _, _ in self._parameters]

    def keep_contents(self, buffers: Iterable[torch.Tensor]) -> None:
        """Copy the content of `buffers`, which will be written in place."""
        self._contents = [(local(buffer), local(buffer).clone()) for buffer in buffers]

    def restore(self) -> None:
        """Put everything back: the same objects, with the same bits in the same memory."""
        for module, kind in self._kinds:
            if type(module) is not kind:  # it was put into tiles
                module.__class__ = kind
        for table, entries in self._tables:
            table.clear()  # entries that come back keep their order
            table.update(entries)
        for parameter, form, data in self._parameters:
            if isinstance(parameter, ShardedParameter):
                type(parameter).source.make_dense()
            parameter.__class__ = form
            if is_dtensor(parameter):
                attach(parameter, data)
            else:
                parameter.data = data
        with torch.no_grad():
            for buffer, content in self._contents:
                buffer.copy_(content)
