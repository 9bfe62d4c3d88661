"""Finds the model to train: a preset by name, or a Hugging Face directory."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import os
import re
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from infinity.errors import ConfigError, WeightsError, naming
from infinity.models.description import NAME, described_by, positions, read_description
from infinity.models.reading import open_regular
from infinity.models.tokenizer import BOS, BYTE_VOCABULARY, EOS, PAD
from infinity.weights.four_bit import is_four_bit
from infinity.weights.load import Weights, check_complete, open_weights
from infinity.weights.tensors import INDEX, SINGLE, cached

if TYPE_CHECKING:
    import torch

_SAMPLES, _SAMPLE_BYTES = 64, 4096
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

_LLAMA = {"model_type": "llama", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
_GPT2 = {"model_type": "gpt2", "n_positions": 1024}

PRESETS: dict[str, dict[str, Any]] = {
    "llama-tiny": _LLAMA
    | {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "llama-100m": _LLAMA
    | {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 14,
        "num_attention_heads": 12,
    },
    "llama-1b": _LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "llama-7b": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "gpt2-tiny": _GPT2 | {"n_embd": 128, "n_layer": 4, "n_head": 4},
}
"""Shapes of models that are built from scratch, with the vocabulary of the byte tokenizer."""


@dataclass(frozen=True)
class ModelSource:
    """A model that can be built: its `transformers` configuration, the directory of its weights if
    it has any, and the file `described` with the configuration."""

    name: str
    config: Any
    directory: Path | None
    described: Path | None = None

    def check_length(self, length: int) -> None:
        """Raise `ValueError` if the model has fewer than `length` positions."""
        most = positions(self.config)
        if most is not None and most < length:
            raise ValueError(
                f"a sequence length of {length} is more than the {most} positions of {self.name}"
            )

    def check_positions(self) -> None:
        """Raise `ValueError` if the model takes no positions, so that samples of one window would
        see each other."""
        from transformers import AutoModelForCausalLM

        kind = AutoModelForCausalLM._model_mapping[type(self.config)]
        if "position_ids" not in inspect.signature(kind.forward).parameters:
            raise ValueError(
                f"{kind.__name__} takes no position_ids, so samples in one window would see each "
                "other; leave out --packing"
            )

    def check_weights(self, option: str) -> None:
        """Raise `ValueError` if the model has no weights, so that adapters of `option` would go
        with random ones."""
        if self.directory is None:
            raise ValueError(
                f"{option} trains adapters of a model that has weights, and those of the preset "
                f"{self.name} are random; give --model a directory or a downloaded id, or leave "
                f"out {option}"
            )

    def check_kind(self) -> None:
        """Raise `ValueError` unless the configuration is of a causal language model."""
        from transformers import AutoModelForCausalLM

        if type(self.config) not in AutoModelForCausalLM._model_mapping:
            raise ValueError(
                f"{self.name} is of type {self.config.model_type!r}, which is not a causal "
                "language model"
            )

    @property
    def in_four_bits(self) -> bool:
        """Whether the files have weights in 4 bits of bitsandbytes."""
        return self.directory is not None and is_four_bit(
            getattr(self.config, "quantization_config", None)
        )

    def digest(self) -> str:
        """Tells the weights of models of one shape apart, also where files have no times of their
        own: from the sizes of the files and `_SAMPLES` pages of each. "" without files."""
        found = hashlib.blake2b(digest_size=8)
        for path in sorted(self.directory.glob("*.safetensors")) if self.directory else ():
            with naming(path), open_regular(path) as file:
                size = file.seek(0, os.SEEK_END)
                found.update(f"{path.name} {size}".encode())
                for begin in range(0, size, max(size // _SAMPLES, _SAMPLE_BYTES)):
                    file.seek(begin)
                    found.update(file.read(_SAMPLE_BYTES))
        return found.hexdigest() if self.directory else ""

    def build(self, checkpoint_activations: bool = False) -> torch.nn.Module:
        """Build a causal language model. Inside `infinity.init()` it is on the meta device. A model
        in 4 bits knows its files from then on.

        Raises `ValueError` like `check_kind`, if the configuration is invalid, or if the model
        cannot recompute activations; for a model in 4 bits `ConfigError` if bitsandbytes is
        missing, and `WeightsError` if a tensor is.
        """
        from transformers import AutoModelForCausalLM

        self.check_kind()
        if self.in_four_bits:
            return self._recomputing(self._from_files(), checkpoint_activations)
        with described_by(self.described):
            model = AutoModelForCausalLM.from_config(self.config, trust_remote_code=False)
        return self._recomputing(model, checkpoint_activations)

    def _from_files(self) -> Any:
        from transformers import AutoModelForCausalLM

        require_bitsandbytes(f"{self.name}, which is in 4 bits,")
        model, found = AutoModelForCausalLM.from_pretrained(
            self.directory,
            config=self.config,
            dtype=self.config.dtype or "auto",
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
        )
        if found["missing_keys"]:
            (first, *_) = sorted(found["missing_keys"])
            raise WeightsError(
                f"{self.directory} has no tensor for {first}; it belongs to another model"
            )
        # A base in 4 bits that a run has made has the name of its model.
        model.name_or_path = model.config.name_or_path = self.config.name_or_path
        return model

    def weights(self, model: torch.nn.Module) -> Weights | None:
        """The values in the files for `model`, which `build` has made. None if there are no files,
        or if the model knows them. Raises `WeightsError` if a parameter has no tensor."""
        if self.directory is None or self.in_four_bits:
            return None
        found = open_weights(self.directory, model)
        check_complete(found, model)
        return found

    @staticmethod
    def _recomputing(model: Any, checkpoint_activations: bool) -> torch.nn.Module:
        from torch.utils.checkpoint import checkpoint

        if checkpoint_activations:
            if not model.supports_gradient_checkpointing:
                raise ValueError(
                    f"{type(model).__name__} cannot recompute activations; add "
                    "--no-checkpoint-activations"
                )
            recompute = partial(checkpoint, use_reentrant=False)
            model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=recompute)
        return cast("torch.nn.Module", model)


def require_bitsandbytes(what: str) -> None:
    """Raise `ConfigError` if bitsandbytes is missing, which `what` needs."""
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"{what} needs bitsandbytes; install it with: pip install bitsandbytes accelerate"
        )


def find_model(name: str, precision: str) -> ModelSource:
    """The model called `name`: a directory with config.json and model.safetensors, the id of a
    model in the cache of the hub, or one of `PRESETS`.

    `precision` (bf16, fp16, fp32, or auto for the model's own) sets the dtype in the configuration.
    Raises `ValueError` that lists the presets for an unknown name, and `FileNotFoundError` for an
    incomplete directory.
    """
    directory = Path(name) if name in PRESETS else cached(name) or Path(name)
    if name in PRESETS and not directory.is_dir():
        config = _preset(name)
        source = ModelSource(name, config, None)
    elif directory.is_dir():
        config = _directory_config(directory)
        if directory != Path(name):
            config.name_or_path = name  # adapters name their base, also to other machines
        source = ModelSource(name, config, directory, directory / NAME)
    else:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]!r}? A model is" if near else "it is"
        if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
            folder = name.partition("/")[2]
            hint = (
                f"if it is the id of a model of the hub, download it first: hf download {name} "
                f"--local-dir {folder}, and give --model {folder}. A model is"
            )
        raise ValueError(
            f"unknown model {name!r}; {hint} a directory with config.json and "
            f"model.safetensors, or one of the presets: {', '.join(PRESETS)}"
        )
    if precision in DTYPES:
        source.config.dtype = DTYPES[precision]
    return source


def _preset(name: str) -> Any:
    from transformers import AutoConfig

    values = dict(PRESETS[name])
    return AutoConfig.for_model(
        values.pop("model_type"),
        vocab_size=BYTE_VOCABULARY,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        **values,
    )


def _directory_config(directory: Path) -> Any:
    if not (directory / NAME).is_file():
        raise FileNotFoundError(
            f"{directory} has no {NAME}, so it is not a Hugging Face model directory"
        )
    if not any((directory / name).is_file() for name in (SINGLE, INDEX)):
        raise FileNotFoundError(
            f"{directory} has neither {SINGLE} nor {INDEX} (weights in pickle files are "
            "never loaded)"
        )
    from transformers import AutoConfig

    read_description(directory / NAME)
    with described_by(directory / NAME):
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
