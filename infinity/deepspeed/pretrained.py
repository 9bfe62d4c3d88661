"""Models of transformers at stage 3 of a DeepSpeed configuration. Their weights are streamed.

In DeepSpeed, `from_pretrained` and `from_config` build models inside `deepspeed.zero.Init`, and
then fill them rank by rank with code for DeepSpeed's parameters. Here they work as inside of
`infinity.zero.Init()`, and do not see stage 3.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from infinity.deepspeed.zero import Init

_MODULE = "transformers.modeling_utils"
_NOTICE = "Detected DeepSpeed ZeRO-3: activating zero.init() for this model"
"""The log message of transformers for such a model."""
_BUILDERS = ("from_pretrained", "_from_config")
_RESIZE = "resize_token_embeddings"
CHANGED = (*_BUILDERS, _RESIZE)
"""The replaced methods of `PreTrainedModel`."""


def load_streamed() -> None:
    """From now on, models of transformers are built without memory if the configuration has stage
    3, even if transformers is imported later."""
    if _MODULE in sys.modules:
        _replace(sys.modules[_MODULE])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Changes one module when it is imported, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> Any:
        """The module's own spec, with a loader that calls `_replace` at its end."""
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def execute(module: ModuleType) -> None:
            run(module)
            _replace(module)

        spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


def _replace(module: Any) -> None:
    """Make the builders of `PreTrainedModel` work as inside of `infinity.init()`."""
    for name in _BUILDERS:
        found = vars(module.PreTrainedModel).get(name)
        if isinstance(found, classmethod) and not hasattr(found.__func__, "_infinity"):
            setattr(module.PreTrainedModel, name, classmethod(_building(found.__func__)))
    resize = vars(module.PreTrainedModel).get(_RESIZE)
    if resize is not None and not hasattr(resize, "_infinity"):
        setattr(module.PreTrainedModel, _RESIZE, _without_notice(resize))


def _building(build: Callable[..., Any]) -> Callable[..., Any]:
    def built(cls: Any, *args: Any, **options: Any) -> Any:
        from transformers.integrations import is_deepspeed_zero3_enabled

        if not is_deepspeed_zero3_enabled():
            return build(cls, *args, **options)
        logging.getLogger(_MODULE).info(_NOTICE)
        with _without_stage_3(), Init():
            # `Init` may have replaced it, so it is asked again.
            return getattr(cls, build.__name__)(*args, **options)

    vars(built)["_infinity"] = True
    return built


def _without_notice(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method` without the log message. A model without memory can be read and changed like any
    other."""

    def resized(model: Any, *args: Any, **options: Any) -> Any:
        with _without_stage_3():
            return method(model, *args, **options)

    vars(resized)["_infinity"] = True
    return resized


@contextmanager
def _without_stage_3() -> Iterator[None]:
    """Inside the context, transformers does not see the configuration."""
    from transformers.integrations import deepspeed

    found = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed._hf_deepspeed_config_weak_ref = None
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = found
