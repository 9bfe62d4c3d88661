"""Tries on a few small parameters whether an optimizer of torch computes the same numbers for its
parameters together and one by one, as `infinity.adapt` needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.optim.workbench import host_copy, options_of, same

_SHAPES = (
    ((3, 4), (5, 2), (4, 4)),  # some take only matrices
    ((6,), (4, 3), (2, 3, 2, 2)),
)
_SCALES = (1.0, 1e-3, 30.0, 1.0, 1e-2, 1e3, 1.0, 0.1, 5.0, 1.0, 1e-2, 1.0)
"""Sizes of the gradients, step by step: some are clipped by a norm, others are not."""
_WITHOUT = {3: (0,), 6: (1, 2), 8: (0, 1, 2)}
"""The parameters without a gradient, by the step."""
_RATE = 0.05
_LARGE = (64, 128)
"""The shape of a parameter that is large enough for states in 8 bits."""


class _Outcome(NamedTuple):
    """The result of some steps."""

    weights: list[torch.Tensor]
    states: list[dict[str, Any]]
    options: list[list[dict[str, Any]]]
    """The group of each optimizer after each step."""


def try_out(
    kind: type[torch.optim.Optimizer], settings: Mapping[str, Any], group: Mapping[str, Any]
) -> None:
    """Run `kind` with `settings` on small parameters, with the options of `group`, together and one
    by one.

    Raises `ConfigError` if weights or states differ, and if it cannot run.
    """
    options = {name: value for name, value in options_of(group).items() if name != "param_names"}
    if (
        "lr" in settings
        or "lr" in options
        or "lr" in kind([_parameter((2, 2))], **settings).defaults
    ):
        options["lr"] = _RATE  # a schedule may begin with 0
    failure: Exception | None = None
    ran = False
    for shapes in _SHAPES:
        try:
            together = _play(kind, settings, options, shapes, alone=False)
            alone = _play(kind, settings, options, shapes, alone=True)
        except Exception as error:  # whatever a class of the user raises
            failure = error
            continue
        ran = True
        if not _agree(together, alone):
            package = kind.__module__.partition(".")[0]
            raise ConfigError(
                f"{kind.__name__} of {package} computes other numbers when it has few of the "
                "parameters (it looks at all of them together, for a norm, an average or random "
                "numbers), and infinity.adapt runs it for one unit of a wrapped model after the "
                "other; use infinity.AdamW or one of its family, or an optimizer that looks at one "
                "parameter at a time"
            )
    if not ran:
        raise ConfigError(
            f"infinity.adapt tries {kind.__name__} on small parameters before it gets those of a "
            f"wrapped model, and that failed: {failure}"
        ) from failure


def has_modes(kind: type) -> bool:
    """Whether optimizers of class `kind` change parameters between training and evaluation."""
    return all(callable(getattr(kind, name, None)) for name in ("train", "eval"))


def begin(optimizer: torch.optim.Optimizer) -> None:
    """Set an optimizer with modes to training."""
    if has_modes(type(optimizer)):
        cast("Any", optimizer).train()


def refuse_strange_states(kind: type[torch.optim.Optimizer], settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if `kind` keeps states in tensors of a class of its own, which no file
    can hold. It is tried with a parameter that is large enough for such states."""
    parameter = nn.Parameter(torch.zeros(_LARGE))
    parameter.grad = torch.zeros(_LARGE)
    with torch.random.fork_rng(devices=[]):
        try:
            optimizer = kind([parameter], **settings)
            begin(optimizer)
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
        except Exception:  # of a class of the user; `try_out` reports it
            return
    for name, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, torch.Tensor) and type(value) is not torch.Tensor:
            raise ConfigError(
                f"the state {name!r} of {kind.__name__} is a {type(value).__name__}, a tensor of a "
                "class of its own, and infinity.adapt keeps plain tensors; use infinity.AdamW with "
                "Config(moment_precision='int8')"
            )


def _parameter(shape: Sequence[int], seed: int = 0) -> nn.Parameter:
    return nn.Parameter(_numbers(shape, seed))


def _numbers(shape: Sequence[int], seed: int) -> torch.Tensor:
    made = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(tuple(shape), generator=made, dtype=torch.float32, device="cpu")


def _play(
    kind: type[torch.optim.Optimizer],
    settings: Mapping[str, Any],
    options: Mapping[str, Any],
    shapes: Sequence[Sequence[int]],
    alone: bool,
) -> _Outcome:
    """Take steps with one optimizer for all parameters, or with one for each. The latter step in
    the opposite order, so that random numbers go to other parameters."""
    parameters = [_parameter(shape, seed) for seed, shape in enumerate(shapes)]
    each = [[parameter] for parameter in parameters] if alone else [parameters]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        optimizers = [kind([dict(options_of(options), params=mine)], **settings) for mine in each]
        for optimizer in optimizers:
            begin(optimizer)
        after = []
        for step, scale in enumerate(_SCALES):
            for number, (parameter, shape) in enumerate(zip(parameters, shapes, strict=True)):
                there = number not in _WITHOUT.get(step, ())
                seed = 1000 + 10 * step + number
                parameter.grad = _numbers(shape, seed).mul_(scale) if there else None
            for optimizer in reversed(optimizers):
                step_of(optimizer)
            after.append(_carried([optimizer.param_groups[0] for optimizer in optimizers]))
        for made in optimizers if has_modes(kind) else ():
            cast("Any", made).eval()
    states = [
        {name: host_copy(value) for name, value in optimizer.state.get(parameter, {}).items()}
        for number, parameter in enumerate(parameters)
        for optimizer in [optimizers[number if alone else 0]]
    ]
    return _Outcome([parameter.detach() for parameter in parameters], states, after)


def step_of(optimizer: torch.optim.Optimizer) -> None:
    """One step. If there is no gradient, an error of an optimizer that needs one is ignored."""
    try:
        optimizer.step()
    except Exception:
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            raise


def _carried(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The options of the groups of some optimizers after a step. Groups without a gradient get them
    from groups with one, as in `workbench.Carried`."""
    there = [any(p.grad is not None for p in group["params"]) for group in groups]
    seen = [group for group, has in zip(groups, there, strict=True) if has] or list(groups)
    for group, has in zip(groups, there, strict=True):
        if not has:
            group.update(options_of(seen[0]))
    return [options_of(group) for group in seen]


def _agree(together: _Outcome, alone: _Outcome) -> bool:
    for whole, parts in zip(together.options, alone.options, strict=True):
        if not all(same(part, whole[0]) for part in parts):
            return False
    return same(together.weights, alone.weights) and same(together.states, alone.states)
