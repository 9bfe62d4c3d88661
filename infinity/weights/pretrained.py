"""`from_pretrained` of transformers inside `infinity.init()`: its parameters are read from their
files later, one at a time.

transformers builds the model on the meta device, loads its weights, and initializes the parameters
that the files lack. This file replaces the second step: a read of a tensor becomes an operation on
the tape. So later code, which initializes heads or resizes embeddings, works as after any other
constructor. transformers ties, initializes and reports as usual.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.weights.four_bit import Codes, has_codes, without_assembly
from infinity.weights.lost_buffers import PretrainedCall, found_again
from infinity.weights.matching import Matches, StoredRead, match
from infinity.weights.tape import Operation
from infinity.weights.taping import Taping
from infinity.weights.tensors import Tensors, open_files

_ALL = "from_pretrained"
_LOAD = "_load_pretrained_model"
_FINISH = "_finalize_model_loading"
_INITIALIZED = "_is_hf_initialized"
"""The attribute of tensors that transformers must not initialize."""


@contextmanager
def streamed(taping: Taping) -> Iterator[None]:
    """Inside the context, `from_pretrained` notes on the tape of `taping` which files have the
    values of each parameter.

    Does nothing if transformers was not imported.
    """
    if "transformers" not in sys.modules:
        yield
        return
    from transformers import PreTrainedModel

    steps = {name: vars(PreTrainedModel).get(name) for name in (_ALL, _LOAD, _FINISH)}
    if None in steps.values():
        yield  # another version: its weights are taped as they are copied, and stay in memory
        return
    whole = PreTrainedModel.from_pretrained.__func__
    read = PreTrainedModel._load_pretrained_model
    finish = PreTrainedModel._finalize_model_loading

    calls: list[PretrainedCall] = []  # the innermost last

    def from_pretrained(cls: Any, *args: Any, **options: Any) -> Any:
        calls.append(PretrainedCall(cls, args[1:], options))
        try:
            with taping.paused():  # numbers drawn while it is built are not used
                return whole(cls, *args, **options)
        finally:
            calls.pop()

    def load(
        model: Any,
        state_dict: Any,
        checkpoint_files: Any,
        load_config: Any,
        expected_keys: Any = None,
    ) -> Any:
        with taping.paused(False):
            if expected_keys is not None:  # an adapter, which is small; not on the meta device
                options = replace(load_config, device_map=None)
                return read(model, state_dict, checkpoint_files, options, expected_keys)
            _check(model, load_config, calls[-1].options)
            return _load(taping, model, state_dict, checkpoint_files, load_config)

    def finalize(model: Any, load_config: Any, *args: Any, **options: Any) -> Any:
        load_config = replace(load_config, device_map=None)  # `wrap` moves all to the device
        with found_again(taping, model, calls[-1], load_config.dtype), taping.paused(False):
            return finish(model, load_config, *args, **options)

    setattr(PreTrainedModel, _ALL, classmethod(from_pretrained))
    setattr(PreTrainedModel, _LOAD, staticmethod(load))
    setattr(PreTrainedModel, _FINISH, staticmethod(finalize))
    try:
        yield
    finally:
        for name, step in steps.items():
            setattr(PreTrainedModel, name, step)


def _load(taping: Taping, model: Any, state: Any, files: Sequence[str] | None, options: Any) -> Any:
    """Note where the values of `model` come from. Returns the result of
    `_load_pretrained_model`."""
    from transformers.utils.loading_report import LoadStateDictInfo

    in_codes = has_codes(options.hf_quantizer)
    rules = options.weight_mapping or []
    if in_codes:
        rules = without_assembly(rules, options.hf_quantizer)
    if state is not None:
        sliced = {name: each for name, each in state.items() if _is_sliced(each)}
        tensors = Tensors("the state dict")
        tensors.give({n: each for n, each in state.items() if n not in sliced}, "state_dict")
        tensors.offer(sliced)
    else:
        tensors = open_files(files or [])
    with taping.paused():
        there = model.state_dict()
        wanted = {name: tuple(value.shape) for name, value in there.items()}
        # Conversions read the model when they run, and its modules may be replaced before that.
        outline = model if options.hf_quantizer is None or in_codes else deepcopy(model)
        matches = match(tensors, outline, "", wanted, rules)
        codes = Codes(model, matches) if in_codes else None
        wrong = {name for name, _, _ in matches.wrong}
        convert_dtypes(model, options.dtype_plan or {})
    model._weight_conversions = [rule for rule in rules if rule.was_used()]
    for name in wanted:
        if name in matches and name not in wrong:
            _read_later(taping, model, name, matches)
            if codes is not None:
                codes.describe(name)
    return LoadStateDictInfo(
        missing_keys=matches.missing | _equal_to_tied(model, matches),
        unexpected_keys=matches.unexpected,
        mismatched_keys={(name, *shapes) for name, *shapes in matches.wrong},
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    ), None


def _check(model: Any, options: Any, asked: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for options that do not allow reads later. The caller `asked` for some;
    transformers derives others."""
    name = f"{type(model).__name__}.from_pretrained inside infinity.init()"
    quantizer = options.hf_quantizer
    if quantizer is not None and not (_is_dense(quantizer) or has_codes(quantizer)):
        config = quantizer.quantization_config
        kind = type(config).__name__
        other = f", or give quantization_config={kind}(dequantize=True)"
        raise ConfigError(
            f"{name} cannot keep weights as {kind} has them, because parameters have no memory "
            f"yet; load the model outside of init(){other if hasattr(config, 'dequantize') else ''}"
        )
    if quantizer is not None and asked.get("device_map") is None:
        return  # the quantizer has chosen one
    if options.device_map is not None and set(map(str, options.device_map.values())) != {"cpu"}:
        raise ConfigError(
            f"{name} places nothing on devices; leave device_map out, infinity.wrap moves "
            "parameters to the compute device"
        )


def _is_sliced(value: Any) -> bool:
    """Whether `value` is read when it is indexed, as tensors of GGUF files are."""
    return not isinstance(value, torch.Tensor) and hasattr(value, "shape")


def _is_dense(quantizer: Any) -> bool:
    """Whether parameters are plain tensors after `quantizer` has loaded them."""
    if not quantizer.pre_quantized:
        return False
    keeps_blocks = getattr(quantizer, "supported", True)  # of GGUF: False if it unpacks all blocks
    return not keeps_blocks or getattr(quantizer.quantization_config, "dequantize", False)


def convert_dtypes(model: nn.Module, plan: dict[str, torch.dtype]) -> None:
    """Give parameters the dtypes in `plan`, as transformers does: some stay in fp32."""
    if not plan:
        return
    from transformers.core_model_loading import build_glob_alternation

    alternation, groups, _ = build_glob_alternation(list(plan))
    for name, parameter in model.named_parameters():
        found = alternation.search(name)
        if found is not None:
            parameter.data = parameter.data.to(plan[groups[found.lastgroup or ""]])


def _read_later(taping: Taping, model: nn.Module, name: str, matches: Matches) -> None:
    """Have the parameter `name` read from its file when its values are needed. A buffer is read
    now."""
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    given = module._parameters.get(key)
    if given is None:
        buffer = module._buffers[key]
        if buffer is not None:
            value = matches.read(name).to(buffer.dtype, copy=True)
            vars(value)[_INITIALIZED] = True
            module._buffers[key] = value
        return
    read = StoredRead(matches, name, given.dtype)
    with taping.paused():
        handle = torch.empty_like(given, device="meta", requires_grad=False)
        place = taping.tape.place(handle, torch.device("cpu"))
        taping.tape.note(Operation(read, [], {}, [place], []))
        # As transformers does, also if the constructor has frozen it.
        parameter = taping.parameter_kind(handle, requires_grad=given.is_floating_point())
        vars(parameter)[_INITIALIZED] = True
    setattr(module, key, parameter)


def _equal_to_tied(model: Any, matches: Matches) -> set[str]:
    """The parameters that are tied to a parameter with the same stored values. transformers ties
    them if they count as missing."""
    return {
        target
        for target, source in getattr(model, "all_tied_weights_keys", {}).items()
        if target in matches
        and source in matches
        and torch.equal(matches.read(target), matches.read(source))
    }
