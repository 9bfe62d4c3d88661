"""`infinity generate`: the texts of plain transformers, figures that are exact, and what it
refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from infinity.cli.main import app
from infinity.models.generation import TextStream, key_value_bytes, make_batches, read_prompts
from infinity.models.tokenizer import EOS, ByteTokenizer
from support.generating import llama, mixtral

pytestmark = pytest.mark.usefixtures("one_thread")

BUDGETS = ("--gpu-memory", "700KiB", "--cpu-memory", "1MiB", "--cache", "0")
NEW = 6


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the tokenizer of bytes."""
    path = tmp_path_factory.mktemp("model")
    llama(vocab_size=320, bos_token_id=256, eos_token_id=EOS, pad_token_id=258).save_pretrained(
        path
    )
    ByteTokenizer().save(path)
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["generate", *map(str, arguments)])


def refused(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stderr.count("\n") == 1
    return result.stderr


def plain_texts(directory: Path, *prompts: str, **options: Any) -> list[str]:
    """What transformers makes of each prompt alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    texts = []
    for prompt in prompts:
        given = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        torch.manual_seed(5)
        (row,) = model.generate(**given, max_new_tokens=NEW, **options)
        new = row[given["input_ids"].shape[1] :]
        texts.append(tokenizer.decode(new, skip_special_tokens=True))
    return texts


def test_the_text_of_one_prompt_comes_on_stdout(directory: Path) -> None:
    result = run("--model", directory, "--prompt", "hello", "--max-new-tokens", NEW, *BUDGETS)
    assert result.exit_code == 0, result.output
    assert result.stdout == plain_texts(directory, "hello", do_sample=False)[0] + "\n"
    assert "the KV cache takes up to" in result.stderr
    assert f"{NEW} tokens in" in result.stderr


def test_prompts_of_a_file_are_continued_in_batches(directory: Path, tmp_path: Path) -> None:
    """Each as alone; figures are those of all."""
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo words\nthree more words\n")
    common = ("--model", directory, "--prompts", file, "--max-new-tokens", NEW, *BUDGETS, "--json")
    found = json.loads(run(*common, "--batch", 2).stdout)
    texts = plain_texts(directory, "one", "two words", "three more words", do_sample=False)
    assert [each["text"] for each in found["continuations"]] == texts
    assert found["new_tokens"] == sum(each["tokens"] for each in found["continuations"])
    alone = json.loads(run(*common, "--batch", 1).stdout)
    assert alone["continuations"] == found["continuations"]
    assert alone["read_bytes_per_token"] > found["read_bytes_per_token"] > 0


def test_tokens_are_drawn_by_the_seed(directory: Path) -> None:
    drawn = ("--temperature", 0.9, "--top-p", 0.8, "--seed", 5)
    common = ("--model", directory, "--prompt", "hello", "--max-new-tokens", NEW, *BUDGETS)
    expected = plain_texts(directory, "hello", do_sample=True, temperature=0.9, top_p=0.8, top_k=0)
    assert run(*common, *drawn).stdout == expected[0] + "\n"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--model", "nowhere", "--prompt", "x"), "unknown model 'nowhere'"),
        (("--model", "llama-tiny", "--prompt", "x"), "is a preset, which has no weights; give"),
        (("--prompt", "x", "--max-new-tokens", 64), "are more than the 64 positions of"),
        (("--prompt", "x" * 99), "a prompt of 99 tokens and 128 new ones"),
        ((), "give --prompt TEXT, or --prompts FILE with a prompt on each line, or --chat"),
        (("--prompt", "x", "--chat"), "has no chat template, so it is not made for conversations"),
        (("--prompt", "x", "--system", "y"), "--system is the start of a conversation; add --chat"),
        (("--prompt", "x", "--prompts", "y"), "give --prompt TEXT, or --prompts FILE"),
        (("--prompt", ""), "the prompt '' has no tokens"),
        (("--prompts", "nofile"), "nofile: No such file"),
        (
            ("--prompt", "x", "--max-new-tokens", 9, "--kv-memory", "1KiB"),
            "the KV cache of 1 sequences of 9 tokens takes 13824 bytes (13.5 KiB), and "
            "--kv-memory is 1 KiB; lower --batch",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(
    directory: Path, arguments: tuple[Any, ...], problem: str
) -> None:
    model = () if "--model" in arguments else ("--model", directory)
    assert problem in refused(*model, *arguments)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[1]", " holds no JSON object; "),
        ("3", " holds no JSON object; "),
        ("{", ": not JSON "),
        ('{"eos_token_id": "x"}', ": eos_token_id cannot be 'x'; correct it, or remove it"),
        ('{"eos_token_id": [[1]]}', ": eos_token_id cannot be a value of type list; "),
        ('{"temperature": "a"}', ": temperature cannot be 'a'; "),
        ('{"num_beams": "two"}', ": num_beams cannot be 'two'; "),
        ('{"do_sample": 3}', ": do_sample cannot be 3; "),
    ],
)
def test_an_odd_generation_config_is_named(
    directory: Path, tmp_path: Path, content: str, why: str
) -> None:
    model = shutil.copytree(directory, tmp_path / "model")
    (model / "generation_config.json").write_text(content)
    result = run("--model", model, "--prompt", "a", "--max-new-tokens", NEW, *BUDGETS)
    assert result.exit_code == 1
    said = result.stderr.splitlines()[-1]
    assert f"{model / 'generation_config.json'}{why}" in said


def test_an_odd_tokenizer_config_is_named(directory: Path, tmp_path: Path) -> None:
    model = shutil.copytree(directory, tmp_path / "model")
    for values in ({"model_max_length": "x", "eos_token": "<|eos|>"}, {"tokenizer_class": [1]}, []):
        (model / "tokenizer_config.json").write_text(json.dumps(values))
        said = refused("--model", model, "--prompt", "a", *BUDGETS)
        assert f"the tokenizer in {model} cannot be loaded: " in said


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    said = refused("--model", tmp_path, "--prompt", "x")
    assert said == f"infinity: {tmp_path} has no tokenizer; put its files there\n"


# Conversations

TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
NOTE = "has a chat template, and the prompt is continued without it; --chat asks with the template"


@pytest.fixture(scope="module")
def chatty(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a chat template."""
    path = shutil.copytree(directory, tmp_path_factory.mktemp("chatty") / "model")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def asked(path: Path, *more: object) -> tuple[object, ...]:
    return ("--model", path, "--max-new-tokens", NEW, *BUDGETS, *more)


def test_a_prompt_is_asked_with_the_template(directory: Path, chatty: Path) -> None:
    result = run(*asked(chatty, "--chat", "--system", "be", "--prompt", "hello"))
    assert result.exit_code == 0, result.output
    assert result.stdout == plain_texts(directory, "<s>be<u>hello<a>", do_sample=False)[0] + "\n"
    found = json.loads(run(*asked(chatty, "--chat", "--prompt", "hello", "--json")).stdout)
    text = plain_texts(directory, "<u>hello<a>", do_sample=False)[0]
    assert [(each["prompt"], each["text"]) for each in found["continuations"]] == [("hello", text)]


def test_a_prompt_without_the_marks_of_the_template_is_noted(directory: Path, chatty: Path) -> None:
    for path, prompt, is_noted in (
        (chatty, "hello", True),
        (chatty, "<u>hello<a>", False),
        (directory, "hello", False),
    ):
        result = run(*asked(path, "--prompt", prompt))
        assert (NOTE in result.stderr) == is_noted
        assert result.stdout == plain_texts(directory, prompt, do_sample=False)[0] + "\n"


@pytest.mark.parametrize("end", ["", "\n", "\nnever read\n"])
def test_a_conversation_keeps_its_turns(directory: Path, chatty: Path, end: str) -> None:
    arguments = map(str, ["generate", *asked(chatty, "--chat", "--system", "be")])
    result = CliRunner().invoke(app, list(arguments), input=f"hello\nand\n{end}")
    assert result.exit_code == 0, result.output
    first = plain_texts(directory, "<s>be<u>hello<a>", do_sample=False)[0]
    second = plain_texts(directory, f"<s>be<u>hello<a>{first}<u>and<a>", do_sample=False)[0]
    assert result.stdout == f"{first}\n{second}\n"


def test_a_conversation_that_is_too_long_ends_in_a_sentence(chatty: Path) -> None:
    arguments = map(str, ["generate", *asked(chatty, "--chat")])
    result = CliRunner().invoke(app, list(arguments), input=f"a\n{'b' * 60}\n")
    assert result.exit_code == 1 and len(result.stdout.splitlines()) == 1
    assert "are more than the 64 positions of" in result.stderr


# The parts


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("build", [llama, mixtral])
def test_the_bytes_of_keys_and_values_are_those_of_the_cache(build: Any, rows: int) -> None:
    model, length, new = build(), 5, 4
    ids = torch.ones(rows, length, dtype=torch.long)
    found = model.generate(ids, max_new_tokens=new, return_dict_in_generate=True)
    layers = found.past_key_values.layers
    nbytes = sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))
    assert key_value_bytes(model.config, rows, length + new - 1, 4) == nbytes


def test_a_sliding_window_bounds_them() -> None:
    from transformers import MistralConfig

    config = MistralConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3,
        sliding_window=8,
    )  # fmt: skip
    assert key_value_bytes(config, 1, 100, 2) == 3 * 2 * 8 * 2 * 16 * 2


def test_batches_are_padded_on_the_left() -> None:
    first, second = make_batches(["ab", "c", "def"], ByteTokenizer(), 2)
    assert first.ids.tolist() == [[97, 98], [EOS, 99]]
    assert first.mask.tolist() == [[1, 1], [0, 1]]
    assert (second.prompts, second.mask.tolist()) == (["def"], [[1, 1, 1]])


def test_a_stream_tells_whole_characters() -> None:
    said: list[str] = []
    stream = TextStream(ByteTokenizer(), said.append)
    stream.put(torch.tensor([1, 2, 3]))  # the prompt
    for byte in "aß€".encode():
        stream.put(torch.tensor([byte]))
    stream.put(torch.tensor([0xC3]))
    stream.end()
    assert said == ["a", "ß", "€", "\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize(
    ("content", "problem"), [(b"\n \n", "has no prompts"), (b"\xff", "is not UTF-8 text")]
)
def test_files_without_prompts_are_refused(content: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(content)
    with pytest.raises(ValueError, match=problem):
        read_prompts(tmp_path / "p")
