"""`infinity generate`: continues prompts with a causal language model that stays in its weight
files."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import dataclass
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
    from infinity.models.generation import Decoding, Generator, Message, PromptBatch
    from infinity.models.source import ModelSource
    from infinity.models.tokenizer import Tokenizer

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

Model = Annotated[
    str, typer.Option(help="A Hugging Face directory, or a downloaded id of the hub.")
]
Prompt = Annotated[str | None, typer.Option(help="The text to continue.", rich_help_panel=_TEXT)]
Prompts = Annotated[
    Path | None,
    typer.Option(help="A text file with a prompt on each line.", rich_help_panel=_TEXT),
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="Ask with the chat template of the model. Without a prompt: a conversation, until an "
        "empty line or Ctrl-D.",
        rich_help_panel=_TEXT,
    ),
]
System = Annotated[
    str | None,
    typer.Option(help="What the system says at the start of --chat.", rich_help_panel=_TEXT),
]
MaxNewTokens = Annotated[
    int,
    typer.Option(
        min=1, max=o.MOST_TOKENS, help="Tokens to make for each prompt.", rich_help_panel=_TEXT
    ),
]
BatchRows = Annotated[
    int,
    typer.Option(
        "--batch",
        min=1,
        max=o.MOST_TOKENS,
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


@dataclass(frozen=True)
class Asked:
    """The prompts, or none for a conversation. `rows` prompts are continued together. `kv_memory`
    bounds the bytes of the KV cache, and `quiet` prints no text."""

    prompts: list[str] | None
    is_chat: bool
    system: str | None
    rows: int
    decoding: Decoding
    kv_memory: int | None
    quiet: bool


@mirrors(before="kv_memory", leave_out=LEFT_OUT, precision="auto")
def generate(
    model: Model,
    prompt: Prompt = None,
    prompts: Prompts = None,
    chat: Chat = False,
    system: System = None,
    max_new_tokens: MaxNewTokens = 128,
    batch: BatchRows = 8,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    kv_memory: KvMemory = None,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
    **knobs: Any,
) -> None:
    """Continue prompts with a model that is larger than the compute device, or talk with it.

    Weights that do not fit into --gpu-memory and --cpu-memory are read from their safetensors files
    for each token. Nothing is written there. --nvme is needed only for weights that have to be
    converted. The text goes to stdout, figures to stderr.
    """
    with joined(debug) as world:
        require_extras("transformers", what="`infinity generate`")
        from infinity.models.generation import Decoding

        decoding = Decoding(max_new_tokens, temperature, top_p, seed)
        if system is not None and not chat:
            raise ValueError("--system is the start of a conversation; add --chat")
        texts = _texts(prompt, prompts, chat)
        quiet = as_json or not world.is_first
        asked = Asked(texts, chat, system, batch, decoding, kv_memory, quiet)
        summary = _run(model, asked, knobs, world)
        if world.is_first and as_json:
            typer.echo(json.dumps(summary, allow_nan=False))
        elif world.is_first:
            _show(summary)
        world.wait()


def _texts(prompt: str | None, prompts: Path | None, chat: bool) -> list[str] | None:
    """The prompts; None for a conversation. Raises `ValueError` unless one option gives them."""
    from infinity.models.generation import read_prompts

    if chat and prompt is None and prompts is None:
        return None
    if (prompt is None) == (prompts is None):
        raise ValueError(
            "give --prompt TEXT, or --prompts FILE with a prompt on each line, or --chat for a "
            "conversation"
        )
    return [prompt] if prompt is not None else read_prompts(Path(str(prompts)))


def _run(name: str, asked: Asked, knobs: dict[str, Any], world: World) -> dict[str, Any]:
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
    if asked.is_chat and not tokenizer.has_template:
        raise ValueError(
            f"{name} has no chat template, so it is not made for conversations; leave out "
            "--chat to continue a text"
        )
    batches, kv_bytes = None, 0
    if asked.prompts is not None:
        if not asked.quiet and not asked.is_chat:
            _warn_of_template(name, asked.prompts, tokenizer)
        chats = [generation.conversation(each, asked.system) for each in asked.prompts]
        batches = generation.make_batches(
            asked.prompts, tokenizer, asked.rows, chats if asked.is_chat else None
        )
        kv_bytes = _check(source, batches, asked)
        if not asked.quiet:
            say(f"the KV cache takes up to {format_bytes(kv_bytes)} beside --gpu-memory")
    model, engine = assemble(source, config, world)
    with engine:
        generator = generation.Generator(model, tokenizer, engine.device)
        output = _Output(generator, engine, asked)
        if batches is not None:
            output.run(batches)
        else:
            kv_bytes = _converse(output, source, tokenizer, asked, world)
        return output.summary() | {"kv_cache_bytes": kv_bytes}


def _warn_of_template(name: str, prompts: list[str], tokenizer: Tokenizer) -> None:
    from infinity.models.generation import asks_without_template

    if asks_without_template(prompts[0], tokenizer):
        say(
            f"{name} has a chat template, and the prompt is continued without it; --chat asks with "
            "the template"
        )


def _check(source: ModelSource, batches: list[PromptBatch], asked: Asked) -> int:
    """Bytes of the largest KV cache. Raises `ValueError` if they are too many, or a prompt is too
    long."""
    from infinity.models.generation import check_length

    check_length(source, batches, asked.decoding.max_new_tokens)
    return _check_key_values(source, batches, asked.decoding.max_new_tokens, asked.kv_memory)


def _converse(
    output: _Output, source: ModelSource, tokenizer: Tokenizer, asked: Asked, world: World
) -> int:
    """Answer each line of stdin, with all turns before it, until an empty line or its end. The
    first of several ranks reads. Returns the bytes of the largest KV cache."""
    from infinity.models.generation import conversation, make_batches

    messages: list[Message] = []
    largest = 0
    while line := world.from_first(_read_line):
        messages += conversation(line, None if messages else asked.system)
        batches = make_batches([line], tokenizer, 1, [messages])
        largest = max(largest, _check(source, batches, asked))
        output.run(batches)
        messages.append({"role": "assistant", "content": output.found[-1]["text"]})
    return largest


def _read_line() -> str:
    """A line of the user; empty at the end."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  (`input` then edits lines)
    try:
        return input("> " if is_terminal else "").strip()
    except EOFError:
        return ""


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
    from infinity.models.generation import set_generation_config

    with infinity.init(exact=False):
        model = source.build()
    set_generation_config(model, source)
    infinity.wrap(model, config, weights=source.weights(model), group=world.group)
    return model, infinity.engine(model)


class _Output:
    """The continuations so far, and their figures. Texts are printed as they come."""

    def __init__(self, generator: Generator, engine: Engine, asked: Asked) -> None:
        self._generator, self._engine, self._asked = generator, engine, asked
        self._before = self._read()
        self.found: list[dict[str, Any]] = []

    def _read(self) -> int:
        return int(self._engine.recorder.counters().get("nvme bytes read", 0))

    def run(self, batches: list[PromptBatch]) -> None:
        """Continue all batches. The text of a single prompt is printed while it grows."""
        shows, streams = not self._asked.quiet, len(batches) == len(batches[0].prompts) == 1

        def told(text: str) -> None:
            typer.echo(text, nl=False)

        decoding = self._asked.decoding
        for continuations in self._generator.run(batches, decoding, told if shows else None):
            self.found += [each._asdict() for each in continuations]
            for each in continuations if shows else ():
                typer.echo("" if streams else each.text)

    def summary(self) -> dict[str, Any]:
        """The figures."""
        generator, report = self._generator, self._engine.report()
        return {
            "continuations": self.found,
            "new_tokens": generator.tokens,
            "seconds": generator.seconds,
            "tokens_per_second": generator.tokens / max(generator.seconds, 1e-9),
            "read_bytes_per_token": (self._read() - self._before) / max(generator.tokens, 1),
            "on_compute_device_bytes": report.gpu_resident,
            "cached_bytes": report.cached,
        }


def _show(summary: dict[str, Any]) -> None:
    say(
        f"{summary['new_tokens']} tokens in {summary['seconds']:.1f} s: "
        f"{summary['tokens_per_second']:.2f} tokens per second, "
        f"{format_bytes(round(summary['read_bytes_per_token']))} read for each"
    )
