"""LoRA adapters of PEFT on a model, and the weights with these adapters in them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch

from infinity.modules.gathered import gathered
from infinity.weights.matching import plain_name, pretrained_in

ALL = "all-linear"


def with_lora(
    model: torch.nn.Module, rank: int, alpha: float | None = None, target: str | None = None
) -> torch.nn.Module:
    """`model` with LoRA adapters of `rank` (Hu et al., 2021), the only trainable parameters.

    `alpha` is by default twice the rank. `target` has names of modules with commas between, by
    default all linear layers but the head. Raises `ValueError` if the model has no such module.
    """
    import peft

    names: Any = ALL
    if target is not None and target != ALL:
        names = [name.strip() for name in target.split(",")]
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=cast("int", 2 * rank if alpha is None else alpha),
        target_modules=names,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        # Of an old name, of Conv1D and banks, which PEFT handles, and of tied layers, which
        # `check_merge` handles.
        warnings.simplefilter("ignore")
        made: Any = peft.get_peft_model(cast("Any", model), config)
    for name in () if names == ALL else names:
        if not any(f".{path}".endswith(f".{name}") for path in made.targeted_module_names):
            raise ValueError(f"--lora-target names {name!r}, and the model has no such layer")
    return cast("torch.nn.Module", made)


def check_merge(model: torch.nn.Module) -> None:
    """Raise `ValueError` if a layer with adapters has no weight of its own to add them to."""
    counts = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
    for path, layer in _layers(model):
        weight = layer.get_base_layer().weight
        if not hasattr(layer, "lora_A") or not len(layer.lora_A) or counts[id(weight)] > 1:
            name = plain_name(path, pretrained_in(model)[0])
            raise ValueError(
                f"--merge cannot add the adapters of {name}, because its weight is an embedding or "
                "tied to one; leave out --merge, or give --lora-target other layers"
            )


def _layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers with adapters and their paths."""
    from peft.tuners.lora import LoraLayer

    for path, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield path, module


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
    prefix, _ = pretrained_in(model)
    layers = {f"{path}.base_layer.weight": (path, layer) for path, layer in _layers(model)}
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
