"""`infinity generate`: continues prompts with a causal language model that stays in its weight
files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infinity.cli import options as o
from infinity.cli.failure import require_extras, say
from infinity.cli.knobs import configured, mirrors
from infinity.cli.ranks import World, joined
from infinity.quantities import format_bytes

if TYPE_CHECKING:
    from infinity.engine import Engine
    from infinity.models.generation import Decoding, Generator, PromptBatch
    from infinity.models.source import ModelSource

LEFT_OUT = (
    *("gradients", "optimizer", "moment_precision", "algorithm"),  # of training
    *("activations", "recompute", "partition_activations"),
    *("activation_memory", "gradient_precision", "split_master", "copy_on_write", "update"),
    *("delayed_after", "durability", "verify", "threads", "instruction_set"),
    "deterministic",
    "inference",  # always on
    *("stage", "collective_timeout", "poison", "device"),
)
_TEXT = "Text"
_MOST_TOKENS = 1 << 24

Model = Annotated[
    str, typer.Option(help="A Hugging Face directory, or a downloaded id of the hub.")
]
Prompt = Annotated[str | None, typer.Option(help="The text to continue.", rich_help_panel=_TEXT)]
Prompts = Annotated[
    Path | None,
    typer.Option(help="A text file with a prompt on each line.", rich_help_panel=_TEXT),
]
MaxNewTokens = Annotated[
    int,
    typer.Option(
        min=1, max=_MOST_TOKENS, help="Tokens to make for each prompt.", rich_help_panel=_TEXT
    ),
]
BatchRows = Annotated[
    int,
    typer.Option(
        "--batch",
        min=1,
        max=_MOST_TOKENS,
        help="Prompts that are continued together: they share what each token reads.",
        rich_help_panel=_TEXT,
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        min=0.0,
        callback=o.finite,
        help="0 takes the likeliest token; above, tokens are drawn.",
        rich_help_panel=_TEXT,
    ),
]
TopP = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Draw among the likeliest tokens that have this probability together.",
        rich_help_panel=_TEXT,
    ),
]
Seed = Annotated[
    int, typer.Option(min=0, max=o.MOST, help="Seed of what is drawn.", rich_help_panel=_TEXT)
]
KvMemory = Annotated[
    Any,
    typer.Option(
        parser=o.parse_size,
        metavar="BYTES",
        help="Refuse a KV cache that takes more; it lies on the compute device, beside "
        "--gpu-memory.",
        show_default="no limit",
        rich_help_panel=o.PANEL,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print texts and figures as one JSON object.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")]


@mirrors(before="kv_memory", leave_out=LEFT_OUT, precision="auto")
def generate(
    model: Model,
    prompt: Prompt = None,
    prompts: Prompts = None,
    max_new_tokens: MaxNewTokens = 128,
    batch: BatchRows = 8,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    kv_memory: KvMemory = None,
    as_json: AsJson = False,
    debug: Debug = False,
    **knobs: Any,
) -> None:
    """Continue prompts with a model that is larger than the compute device.

    Weights that do not fit into --gpu-memory and --cpu-memory are read from their safetensors files
    for each token. Nothing is written there. --nvme is needed only for weights that have to be
    converted. The text goes to stdout, figures to stderr.
    """
    with joined(debug) as world:
        require_extras("transformers", what="`infinity generate`")
        from infinity.models.generation import Decoding

        decoding = Decoding(max_new_tokens, temperature, top_p, seed)
        texts = _texts(prompt, prompts)
        summary = _run(model, texts, batch, decoding, kv_memory, knobs, world, as_json)
        if world.is_first and as_json:
            typer.echo(json.dumps(summary, allow_nan=False))
        elif world.is_first:
            _show(summary)
        world.wait()


def _texts(prompt: str | None, prompts: Path | None) -> list[str]:
    """The prompts. Raises `ValueError` unless exactly one option gives them."""
    from infinity.models.generation import read_prompts

    if (prompt is None) == (prompts is None):
        raise ValueError("give --prompt TEXT, or --prompts FILE with a prompt on each line")
    return [prompt] if prompt is not None else read_prompts(Path(str(prompts)))


def _run(
    name: str,
    texts: list[str],
    rows: int,
    decoding: Decoding,
    kv_memory: int | None,
    knobs: dict[str, Any],
    world: World,
    quiet: bool,
) -> dict[str, Any]:
    """Check options and prompts before the model is built, then generate. Returns the figures."""
    from infinity.models import generation
    from infinity.models.source import find_model
    from infinity.models.tokenizer import load_tokenizer

    config = configured({**knobs, "inference": True}, world.share)
    source = find_model(name, config.precision)
    source.check_kind()
    if source.directory is None:
        raise ValueError(f"{name} is a preset, which has no weights; give --model DIR")
    vocabulary = source.config.get_text_config(decoder=True).vocab_size
    tokenizer = load_tokenizer(source.directory, vocabulary, way_out="")
    batches = generation.make_batches(texts, tokenizer, rows)
    generation.check_length(source, batches, decoding.max_new_tokens)
    kv_bytes = _check_key_values(source, batches, decoding.max_new_tokens, kv_memory)
    if world.is_first and not quiet:
        say(f"the KV cache takes up to {format_bytes(kv_bytes)} beside --gpu-memory")
    model, engine = assemble(source, config, world)
    with engine:
        generator = generation.Generator(model, source, tokenizer, engine.device)
        return _generate(generator, engine, batches, decoding, world.is_first and not quiet) | {
            "kv_cache_bytes": kv_bytes
        }


def _check_key_values(
    source: ModelSource, batches: list[PromptBatch], new_tokens: int, most: int | None
) -> int:
    """Bytes of the largest KV cache. Raises `ValueError` if they exceed `most`."""
    from infinity.models.generation import check_key_values, key_value_bytes

    dtype = getattr(source.config, "dtype", None)
    itemsize = getattr(dtype, "itemsize", {"float32": 4}.get(str(dtype), 2 if dtype else 4))
    largest = 0
    for batch in batches:
        # The last token is never an input.
        length, rows = batch.length + new_tokens - 1, len(batch.prompts)
        nbytes = key_value_bytes(source.config, rows, length, itemsize)
        check_key_values(nbytes, most, rows, length)
        largest = max(largest, nbytes)
    return largest


def assemble(source: ModelSource, config: Any, world: World) -> tuple[Any, Engine]:
    """Build the model without memory, and wrap it for inference."""
    import infinity
    from infinity.weights.load import check_complete, open_weights

    with infinity.init(exact=False):
        model = source.build()
    weights = open_weights(source.directory, model)  # type: ignore[arg-type]
    check_complete(weights, model)
    infinity.wrap(model, config, weights=weights, group=world.group)
    return model, infinity.engine(model)


def _generate(
    generator: Generator,
    engine: Engine,
    batches: list[PromptBatch],
    decoding: Decoding,
    shows: bool,
) -> dict[str, Any]:
    """Run all batches, and print the texts if `shows`. Returns the figures."""

    def read() -> int:
        return int(engine.recorder.counters().get("nvme bytes read", 0))

    def told(text: str) -> None:
        typer.echo(text, nl=False)

    before, streams = read(), len(batches) == len(batches[0].prompts) == 1
    found = []
    for continuations in generator.run(batches, decoding, told if shows else None):
        found += [each._asdict() for each in continuations]
        for each in continuations if shows else ():
            typer.echo("" if streams else each.text)
    tokens = generator.tokens
    return {
        "continuations": found,
        "new_tokens": tokens,
        "seconds": generator.seconds,
        "tokens_per_second": tokens / max(generator.seconds, 1e-9),
        "read_bytes_per_token": (read() - before) / max(tokens, 1),
        "on_compute_device_bytes": engine.report().gpu_resident,
        "cached_bytes": engine.report().cached,
    }


def _show(summary: dict[str, Any]) -> None:
    say(
        f"{summary['new_tokens']} tokens in {summary['seconds']:.1f} s: "
        f"{summary['tokens_per_second']:.2f} tokens per second, "
        f"{format_bytes(round(summary['read_bytes_per_token']))} read for each"
    )
