"""What stands for a parameter while torch loads a state dict."""

from __future__ import annotations

from typing import Any

import torch


class LoadTarget(torch.Tensor):
    """Stands for a parameter while torch loads a state dict: it has its shape, and keeps what is
    copied into it."""

    _is_param = True  # for `isinstance(target, nn.Parameter)`
    given: torch.Tensor | None = None
    """What was copied into it."""

    @classmethod
    def of(cls, parameter: torch.Tensor) -> LoadTarget:
        """One for `parameter`."""
        some = torch.empty((), dtype=parameter.dtype, device=parameter.device)
        target = some.expand(parameter.shape).as_subclass(cls)
        target.requires_grad_(parameter.requires_grad)
        return target

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "copy_" and isinstance(args[0], LoadTarget):
            args[0].given = args[1]
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
