"""Quantizes a checkpoint to 4 bits, tensor by tensor, into files that transformers loads.

[Note: blocks]
bitsandbytes quantizes blocks of 64 weights alone, and then the scales of all blocks together. So a
part of a weight has the codes that it has in the whole weight. Its function takes many times the
memory of its argument. Here it gets a part at a time, and the scales of all parts at the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from infinity.directories.directory import Directory
from infinity.directories.drafts import Drafts, drafting_directory, remove_leftovers
from infinity.errors import ConfigError, WeightsError, naming
from infinity.models.description import NAME
from infinity.models.shards import SHARD_BYTES, draft_weights
from infinity.models.source import ModelSource, find_model, require_bitsandbytes
from infinity.weights.matching import Matches, match
from infinity.weights.pretrained import convert_dtypes
from infinity.weights.tensors import open_tensors

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState

RECORD = "infinity-4bit.json"
"""The file that says what a directory was made from."""
_PART = 1 << 18  # weights; a multiple of a block
_BLOCK, _NESTED = 64, 256
_KIND = "nf4"
_ALIGNED, _SMALL = 8, 1 << 12  # bytes
_COPIED = (".json", ".jinja", ".model", ".txt")  # of tokenizers and generation
_LARGEST_COPY = 256 << 20


def quantize(source: str | Path, target: str | Path, *, dtype: torch.dtype | None = None) -> Path:
    """Write the causal language model `source` to the directory `target` with its linear layers in
    4 bits: nf4 with nested scales. Returns `target`.

    `source` is a directory with safetensors files, or the id of a downloaded model. The tensors are
    those that `from_pretrained(source, dtype=dtype, quantization_config=...)` and `save_pretrained`
    of transformers write on a CPU, bit for bit, so the same layers stay as they are: the head,
    embeddings, norms and banks of experts. These have `dtype`, which is by default that of the
    model, and products are computed in it. Files of the tokenizer are copied.

    One tensor at a time is in memory. `target` appears when all of its files are on the drive. If
    it was made from the files of `source` as they are now, it is left as it is. If they have
    changed, it is replaced.

    Raises `ConfigError` if bitsandbytes is missing, if `source` cannot be quantized, or if `target`
    is a directory that this function has not made; `ValueError` for an unknown model;
    `WeightsError` if a file changes meanwhile; and `FileError` if a file cannot be written.
    """
    require_bitsandbytes("infinity.quantize")
    origin = find_model(str(source), "auto")
    check_base(origin)
    target = Path(target)
    recipe = _recipe(origin, dtype)
    if _is_made(target, recipe):
        return target
    if target.is_dir() and any(target.iterdir()) and not (target / RECORD).is_file():
        raise ConfigError(
            f"{target} is not empty, and it is no base in 4 bits; choose another directory"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with Directory(target.parent) as parent:
        remove_leftovers(parent)
    base = _Base(origin, dtype)
    with drafting_directory(target, "directory") as drafts:
        names = draft_weights(drafts, base.tensors(), SHARD_BYTES)
        with naming(target):
            base.config.save_pretrained(drafts.path)
        copy_others(base.directory, drafts)
        if _recipe(origin, dtype) != recipe:
            raise WeightsError(f"{base.directory} has changed while it was read; quantize it again")
        sizes = {name: (drafts.path / name).stat().st_size for name in names}
        drafts.write(RECORD, json.dumps({**recipe, "files": sizes}, indent=2).encode())
    return target


def check_base(source: ModelSource) -> None:
    """Raise `ConfigError` or `ValueError` if `source` cannot be quantized."""
    source.check_kind()
    if source.directory is None:
        raise ConfigError(
            f"{source.name} is a preset, which has no weights to quantize; give the directory of a "
            "model"
        )
    settings = getattr(source.config, "quantization_config", None)
    if settings is not None:
        method = settings.get("quant_method", "?") if isinstance(settings, dict) else settings
        raise ConfigError(
            f"{source.name} is quantized already ({method}); give the model that it was made from, "
            "or use it as it is"
        )


def dtype_of(config: Any) -> torch.dtype | None:
    """The dtype in a configuration of transformers. None if it has none."""
    dtype = getattr(config, "dtype", None)
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _recipe(source: ModelSource, dtype: torch.dtype | None) -> dict[str, Any]:
    """What decides the tensors of a quantized `source`, as JSON values."""
    files = {}
    for path in sorted(Path(str(source.directory)).iterdir()):
        if path.name == NAME or path.suffix == ".safetensors":
            status = path.stat()
            files[path.name] = [status.st_size, status.st_mtime_ns]
    settings = {"format": 1, "kind": _KIND, "dtype": str(dtype)}
    return {**settings, "source": files, "digest": source.digest()}


def _is_made(target: Path, recipe: dict[str, Any]) -> bool:
    """Whether `target` was made by `recipe` and has all of its files."""
    try:
        found = json.loads((target / RECORD).read_text())
        sizes = found.pop("files")
        return bool(
            found == recipe
            and all((target / name).stat().st_size == size for name, size in sizes.items())
        )
    except (OSError, ValueError, LookupError, AttributeError):
        return False


class _Base:
    """The tensors of a model, on their way to 4 bits. It has no memory of its own."""

    def __init__(self, source: ModelSource, dtype: torch.dtype | None) -> None:
        """Raises `ConfigError` if a weight cannot be quantized as it lies in the files."""
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig
        from transformers.quantizers import AutoHfQuantizer

        self.directory = Path(str(source.directory))
        self._stored = open_tensors(self.directory)
        self._dtype = dtype or dtype_of(source.config) or self._first_dtype()
        self.config = source.config
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(
                self.config, dtype=self._dtype, trust_remote_code=False
            )
        self.config.dtype = self._dtype
        self.config.architectures = [type(model).__name__]
        convert_dtypes(model, model._get_dtype_plan(self._dtype) or {})
        state = model.state_dict()
        self._dtypes = {name: value.dtype for name, value in state.items()}
        wanted = {name: tuple(value.shape) for name, value in state.items()}
        self._matches = match(self._stored, model, "", wanted)
        settings = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=_KIND,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=self._dtype,
        )
        self.config.quantization_config = settings
        quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=False)
        quantizer.preprocess_model(model, device_map=None)
        self._transposed = _linear_weights(model)
        _check(self._matches, self._transposed)

    def _first_dtype(self) -> torch.dtype:
        dtypes = (self._stored.dtype(name) for name in sorted(self._stored.names()))
        return next((each for each in dtypes if each.is_floating_point), torch.float32)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the quantized model, by their names in the files of `source`.

        Small ones of uneven size come last. After them a file has no place for others, which must
        be aligned.
        """
        late = []
        for name, value in self._in_order():
            if value.nbytes % _ALIGNED and value.nbytes < _SMALL:
                late.append((name, value))
            else:
                yield name, value
            del value
        yield from sorted(late, key=lambda each: -each[1].itemsize)

    def _in_order(self) -> Iterator[tuple[str, torch.Tensor]]:
        from transformers.core_model_loading import dot_natural_key

        matches = self._matches
        made = {key: name for name, key in matches.direct.items()}
        for conversion in {id(each): each for each in matches.converted.values()}.values():
            made.update(dict.fromkeys((key for _, key in conversion.sources), conversion.target))
        for key in sorted(made, key=dot_natural_key):
            value, name = self._stored.read(key), made[key]
            if name not in self._transposed:
                yield key, value.to(self._dtypes[name]) if value.is_floating_point() else value
                continue
            codes, state = quantize_tensor(
                value.T if self._transposed[name] else value, self._dtype
            )
            del value
            yield key, codes
            for part, tensor in state.as_dict(packed=True).items():
                yield f"{key}.{part}", tensor


def _linear_weights(model: Any) -> dict[str, bool]:
    """The names of the weights of `model` that bitsandbytes quantizes, and whether it does so with
    their transpose."""
    from bitsandbytes.nn import Linear4bit
    from transformers.pytorch_utils import Conv1D

    return {
        f"{path}.weight": issubclass(layer.source_cls, Conv1D)
        for path, layer in model.named_modules()
        if isinstance(layer, Linear4bit)
    }


def _check(matches: Matches, quantized: dict[str, bool]) -> None:
    where = matches.tensors.where
    if not quantized:
        raise ConfigError(f"{where} has no linear layer that bitsandbytes quantizes")
    for name, stored, needed in matches.wrong:
        raise ConfigError(f"{name} in {where} has shape {stored}, the model needs {needed}")
    for name in quantized:
        if name in matches.converted:
            raise ConfigError(
                f"{name} is made from several tensors of {where}; save the model with "
                "save_pretrained(..., save_original_format=False), and quantize that"
            )
        if name not in matches.direct:
            raise WeightsError(f"{where} has no tensor for {name}; it belongs to another model")


def quantize_tensor(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, QuantState]:
    """The codes of `weight` in `dtype`, and their scales, as `quantize_4bit` of bitsandbytes makes
    them; see [Note: blocks]."""
    from bitsandbytes.functional import QuantState, quantize_4bit, quantize_blockwise

    flat = weight.reshape(-1)
    count = flat.numel()
    codes = torch.empty(-(-count // 2), 1, dtype=torch.uint8)
    scales = torch.empty(-(-count // _BLOCK), dtype=torch.float32)
    code: Any = None
    for begin in range(0, count, _PART):
        part = flat[begin : begin + _PART].to(dtype)
        made, state = quantize_4bit(
            part, blocksize=_BLOCK, compress_statistics=False, quant_type=_KIND
        )
        codes[begin // 2 : begin // 2 + len(made)] = made
        scales[begin // _BLOCK : begin // _BLOCK + len(state.absmax)] = state.absmax
        code = state.code
    offset = scales.mean()
    absmax, nested = quantize_blockwise(scales - offset, blocksize=_NESTED)
    return codes, QuantState(
        absmax=absmax,
        shape=weight.shape,
        code=code,
        blocksize=_BLOCK,
        quant_type=_KIND,
        dtype=dtype,
        offset=offset,
        state2=nested,
    )


def copy_others(directory: Path, drafts: Drafts) -> None:
    """Copy what describes a tokenizer and generation."""
    for path in sorted(directory.iterdir()):
        is_own = path.name == NAME or path.name.startswith("infinity-")
        if is_own or path.suffix not in _COPIED or path.name.endswith(".index.json"):
            continue
        with naming(path):
            if path.is_file() and path.stat().st_size <= _LARGEST_COPY:
                drafts.write(path.name, path.read_bytes())
