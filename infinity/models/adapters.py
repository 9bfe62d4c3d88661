"""LoRA adapters of PEFT on a model, and the weights with these adapters in them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch

from infinity.modules.gathered import gathered
from infinity.weights.matching import plain_name, pretrained_in

ALL = "all-linear"


def with_lora(
    model: torch.nn.Module, rank: int, alpha: float | None, target: str | None
) -> torch.nn.Module:
    """`model` with LoRA adapters of `rank` (Hu et al., 2021), the only trainable parameters.

    `alpha` is by default twice the rank. `target` has names of modules with commas between, by
    default all linear layers but the head. Raises `ValueError` if the model has no such module.
    """
    import peft

    names: Any = ALL if target is None or target == ALL else target.split(",")
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=cast("int", 2 * rank if alpha is None else alpha),
        target_modules=names,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by an old name
        return cast("torch.nn.Module", peft.get_peft_model(cast("Any", model), config))


def base_of(model: torch.nn.Module) -> torch.nn.Module:
    """The model of transformers in `model`, which may have adapters."""
    return cast("torch.nn.Module", pretrained_in(model)[1])


def trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the trainable parameters of a wrapped `model` on the host. All ranks call it."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            with gathered(parameter):
                found[name] = parameter.detach().cpu().clone()
    return found


def merged(
    model: torch.nn.Module,
    weights: Iterable[tuple[str, torch.Tensor]],
    adapters: Mapping[str, torch.Tensor],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `weights` of the model with adapters as those of the plain model: by its names, and
    each with its low-rank product, which is computed in fp32."""
    from peft.tuners.lora import LoraLayer

    prefix, _ = pretrained_in(model)
    layers = {
        f"{path}.base_layer.weight": (path, module)
        for path, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }
    for name, value in weights:
        if name in adapters:
            continue
        if name in layers:
            path, layer = layers[name]
            a, b = (adapters[f"{path}.lora_{which}.default.weight"].float() for which in "AB")
            product = b @ a
            if getattr(layer, "fan_in_fan_out", False):
                product = product.T
            value = value.float().add_(product, alpha=layer.scaling["default"]).to(value.dtype)
        yield plain_name(name, prefix), value
        del value  # free it before the next unit is gathered
