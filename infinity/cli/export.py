"""`infinity export`: writes a checkpoint as a directory for `from_pretrained`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from infinity.cli.failure import plain_failures, say
from infinity.cli.options import AsJson, Debug, parse_size
from infinity.errors import ConfigError, naming
from infinity.quantities import format_bytes

if TYPE_CHECKING:
    import torch

    from infinity.checkpoint.contents import Contents
    from infinity.checkpoint.export import Exported, Selection

CONFIG, ADAPTER = "config.json", "adapter_config.json"
MOST_FILE_BYTES = 256 << 20
"""The largest file that is copied beside the weights."""
_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    **{name: name for name in ("bfloat16", "float16", "float32")},
}


class Description:
    """The files beside the weights: configuration, tokenizer, chat template.

    They come from the first of `places` that contains `needed`. Links are followed only if the user
    `names` the place, because files in a checkpoint are not trusted.
    """

    def __init__(self, places: list[Path], needed: str, names: bool) -> None:
        found = next((place for place in places if (place / needed).is_file()), None)
        self.directory, self._needed, self._names = found, needed, names
        self.files: dict[str, bytes] = {}
        if found is not None:
            for name in _wanted(needed):
                if (found / name).is_file():
                    self.files[name] = self._content(found / name)

    def _content(self, path: Path) -> bytes:
        from infinity.checkpoint.files import open_plain
        from infinity.models.reading import open_regular

        with naming(path), open_regular(path) if self._names else open_plain(path) as file:
            content = file.read(MOST_FILE_BYTES + 1)
        if len(content) > MOST_FILE_BYTES:
            raise ConfigError(
                f"{path} has more than {format_bytes(MOST_FILE_BYTES)}, so it is not what its name "
                "says"
            )
        return content

    def config(self) -> dict[str, Any]:
        """The values of config.json. Empty if there is no such file."""
        from infinity.models.reading import parse_json

        if CONFIG not in self.files:
            return {}
        values = parse_json(self.files[CONFIG], str((self.directory or Path()) / CONFIG))
        if not isinstance(values, dict):
            raise ConfigError(f"{self.directory}/{CONFIG} holds no JSON object")
        return values

    def dtype(self) -> str | None:
        """The dtype of the weights in config.json."""
        config = self.config()
        found = config.get("dtype", config.get("torch_dtype"))
        return _DTYPES.get(str(found))

    def set_dtype(self, dtype: str) -> None:
        """Set the dtype of the weights in config.json."""
        config = self.config()
        if config:
            config.pop("torch_dtype", None)
            content = json.dumps(config | {"dtype": dtype}, indent=2, ensure_ascii=False)
            self.files[CONFIG] = f"{content}\n".encode()


def _wanted(needed: str) -> tuple[str, ...]:
    from infinity.models.tokenizer import TOKENIZER_FILES

    if needed == ADAPTER:
        return (ADAPTER, *TOKENIZER_FILES)
    return (CONFIG, "generation_config.json", *TOKENIZER_FILES)


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A checkpoint, or the directory of a run, of which the last one is taken.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The directory to make.")],
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where config.json and the tokenizer are.",
            show_default="the checkpoint, and the directory that it is in",
        ),
    ] = None,
    dtype: Annotated[
        Literal["auto", "bf16", "fp16", "fp32"],
        typer.Option(help="Of the weights; auto: what config.json says, else as they are stored."),
    ] = "auto",
    trainable_only: Annotated[
        bool, typer.Option("--trainable-only", help="Only parameters that an optimizer updates.")
    ] = False,
    adapters_only: Annotated[
        bool, typer.Option("--adapters-only", help="Only what PEFT added, as PEFT reads it.")
    ] = False,
    adapter: Annotated[str, typer.Option(help="The name of the adapter in PEFT.")] = "default",
    shard_size: Annotated[
        int,
        typer.Option(
            parser=parse_size, metavar="BYTES", show_default="4GiB", help="Most bytes of one file."
        ),
    ] = 4 << 30,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier export.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint as safetensors for transformers and PEFT. Needs no GPU, and memory for
    only a piece of a tensor.

    OUT appears when it is complete. Trained weights are stored in fp32, and rounded to the dtype.
    """
    with plain_failures(debug):
        if trainable_only and adapters_only:
            raise ConfigError("give --trainable-only or --adapters-only, not both")
        from infinity.checkpoint import export as exporting
        from infinity.checkpoint.contents import Contents, latest

        where = latest(checkpoint)
        _refuse_models(where)
        exporting.check_target(out, where, overwrite)
        described = _described(where, model, ADAPTER if adapters_only else CONFIG)
        contents = Contents(where)
        selection = _selection(contents, trainable_only, adapter if adapters_only else None)
        name = _DTYPES[dtype] if dtype != "auto" else described.dtype()
        if name is not None:
            described.set_dtype(name)
        written = exporting.export(
            contents, out, selection, _torch_dtype(name), described.files, overwrite, shard_size
        )
        _show(where, written, as_json)
        if CONFIG not in described.files and not (adapters_only or as_json):
            say(f"no {CONFIG} was found, which from_pretrained needs; --model DIR says where it is")


def _refuse_models(directory: Path) -> None:
    """Raise `ConfigError`, with the call that loads it, if `directory` is a model or adapters
    instead of a checkpoint: an output of `infinity finetune` or of a Trainer."""
    from infinity.checkpoint.files import is_whole
    from infinity.weights.tensors import INDEX, SINGLE

    def has(*names: str) -> bool:
        return any((directory / name).is_file() for name in names)

    if is_whole(directory):
        return
    if has(ADAPTER) and has("adapter_model.safetensors"):
        raise ConfigError(
            f"{directory} has adapters for PEFT already, so there is nothing to export: "
            f"PeftModel.from_pretrained(model, {str(directory)!r}) loads them, and "
            f"AutoPeftModelForCausalLM.from_pretrained({str(directory)!r}).merge_and_unload() "
            "merges them into their model"
        )
    if has(CONFIG) and has(SINGLE, INDEX):
        raise ConfigError(
            f"{directory} is a whole model already, so there is nothing to export: "
            f"AutoModelForCausalLM.from_pretrained({str(directory)!r}) loads it"
        )


def _show(checkpoint: Path, written: Exported, as_json: bool) -> None:
    if not as_json:
        typer.echo(
            f"{written.directory}: {written.tensors} tensors of {checkpoint}, "
            f"{format_bytes(written.nbytes)} in {len(written.files)} files"
        )
        return
    facts = {
        "checkpoint": str(checkpoint),
        "output": str(written.directory),
        "tensors": written.tensors,
        "bytes": written.nbytes,
        "files": written.files,
    }
    typer.echo(json.dumps(facts))


def _described(checkpoint: Path, model: Path | None, needed: str) -> Description:
    """The files beside the weights. Raises `ConfigError` if a needed file is missing."""
    places = [checkpoint, checkpoint.absolute().parent] if model is None else [model]
    described = Description(places, needed, names=model is not None)
    if described.directory is None and (model is not None or needed == ADAPTER):
        shown = " or ".join(map(str, places))
        raise ConfigError(f"there is no {needed} in {shown}; --model DIR says where it is")
    return described


def _selection(contents: Contents, trainable: bool, adapter: str | None) -> Selection:
    from infinity.checkpoint.export import adapters_only, everything, trained_only

    if adapter is not None:
        return adapters_only(contents, adapter)
    return trained_only(contents) if trainable else everything(contents)


def _torch_dtype(name: str | None) -> torch.dtype | None:
    import torch

    return None if name is None else getattr(torch, name)
