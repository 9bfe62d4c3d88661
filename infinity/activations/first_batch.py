"""Estimates whether the activations of the first batch fit, and warns before they cause an
out-of-memory error.

The inputs of the first block of the first training forward show the tokens of a micro-batch and the
hidden size. By then the engine has allocated its memory.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as trees

from infinity.config import Config
from infinity.device import ComputeDevice
from infinity.free_memory import read_host
from infinity.losses.chunked_loss import ProjectionForward
from infinity.placement.activations import DecoderShape, activation_bytes
from infinity.quantities import format_bytes
from infinity.tier import TIERS

log = logging.getLogger("infinity")


class FirstBatch:
    """Looks at the first training forward of one of the `blocks` of `model`, once.

    `away` bytes of the tensors that blocks save may leave the device.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Mapping[nn.Module, str],
        config: Config,
        away: float,
        device: ComputeDevice,
    ) -> None:
        self._model = weakref.ref(model)  # it may die before the engine
        self._blocks = weakref.WeakSet(blocks)
        self._config, self._away, self._device = config, away, device
        self.is_due = not config.inference
        """Whether the first training forward is still to come."""

    def look(self, block: nn.Module, inputs: Any, checkpointed: bool) -> None:
        """A training forward of `block` begins with these `inputs`. `checkpointed` says whether a
        checkpoint of the model is around it. Logs a warning if the estimate exceeds the free
        memory."""
        hidden = _hidden_states(inputs) if block in self._blocks else None
        if hidden is None:
            return
        self.is_due = False
        model, device = self._model(), self._device
        memory = read_host() if device.unified_memory else device.memory()
        if model is None or memory is None:
            return
        recomputes = checkpointed or self._config.recompute != "off" or _checkpoints(model)
        words, most = _logits(model)
        tokens = hidden.shape[:-1].numel()
        layers = sum(type(each) is type(block) for each in self._blocks)
        decoder = DecoderShape(layers, hidden.shape[-1], words, hidden.dtype.itemsize)
        saved, working, logits = activation_bytes(decoder, tokens, recomputes)
        if most is not None:
            logits = min(logits, most)
        stays = max(saved - self._away, 0)
        if stays + working + logits <= memory.free:
            return
        log.warning(
            "a micro-batch of %d tokens may not fit: by an estimate, activations take %s and "
            "logits %s, and %s of %s are free; %s",
            tokens,
            format_bytes(int(stays + working)),
            format_bytes(logits),
            format_bytes(memory.free),
            memory.owner,
            ", or ".join(self._ways_out(recomputes, logits > stays + working and most is None)),
        )

    def _ways_out(self, recomputes: bool, chunks: bool) -> list[str]:
        ways = ["give it fewer tokens"]
        if not recomputes:
            ways.append('set recompute="all"')
        if chunks:
            ways.append("call infinity.chunked_loss(model)")
        elif TIERS[self._config.activations].is_device and not self._device.unified_memory:
            ways.append('set activations="cpu"')
        return [*ways, "lower gpu_memory"]


def _hidden_states(inputs: Any) -> torch.Tensor | None:
    """The first floating-point tensor of shape (batch, tokens, hidden), if any."""
    for value in trees.tree_leaves(inputs):
        if isinstance(value, torch.Tensor) and value.dim() == 3 and value.is_floating_point():
            return value
    return None


def _checkpoints(model: nn.Module) -> bool:
    """Whether layers of transformers recompute activations inside their calls."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _logits(model: nn.Module) -> tuple[int, int | None]:
    """The number of logits of a token, 0 if it is not known, and the most bytes that logits may
    take if the loss is computed in chunks."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        return 0, None
    forward = vars(head).get("forward")
    most = forward.max_bytes if isinstance(forward, ProjectionForward) else None
    return getattr(head, "out_features", 0), most
