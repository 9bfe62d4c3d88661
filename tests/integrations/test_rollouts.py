"""GRPO of TRL with rollouts by another model, which has the memory meanwhile: the engine that
trains sleeps, and the bits are those of a run in which it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from support.models import FAMILIES

pytest.importorskip("accelerate")

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

LENGTH = 6
"""Tokens of a completion."""


def tokenizer_of_numbers() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<end>", *map(str, range(63))])}
    plain = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", pad_token="<end>")


@torch.no_grad()
def drawn(
    model: Any, prompt: list[int], generator: torch.Generator
) -> tuple[list[int], list[float]]:
    """A completion, and the logarithms of its probabilities."""
    tokens, logs = list(prompt), []
    for _ in range(LENGTH):
        log = model(input_ids=torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        tokens.append(int(torch.multinomial(log.exp(), 1, generator=generator)))
        logs.append(float(log[tokens[-1]]))
    return tokens[len(prompt) :], logs


@pytest.mark.parametrize("place", ["nvme", "cpu"])
def test_it_sleeps_while_another_model_makes_rollouts(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    from infinity.integrations.transformers import InfinityTrainerMixin

    class Streamed(InfinityTrainerMixin, trl.GRPOTrainer):  # type: ignore[misc, name-defined]
        pass

    monkeypatch.setenv("CI", "1")  # TRL sends nothing
    tokenizer, other = tokenizer_of_numbers(), FAMILIES["llama"].build().eval()
    slept: list[int] = []

    def train(sleeps: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)

        def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
            engine = infinity.engine(trainer.accelerator.unwrap_model(trainer.model))
            other.load_state_dict(engine.state_dict())
            if sleeps:
                slept.append(engine.sleep())
                assert engine.memory()["gpu"] == engine.memory()["cpu"] == 0
            ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
            found = [drawn(other, each, generator) for each in ids]
            engine.wake()
            completions, logs = zip(*found, strict=True)
            return {
                "prompt_ids": ids,
                "completion_ids": list(completions),
                "logprobs": [[[log] for log in each] for each in logs],
            }

        def reward(completions: list[str], **_: Any) -> list[float]:
            return [float(len(set(text.split()))) for text in completions]

        torch.manual_seed(0)
        directory = tmp_path / str(sleeps)
        directory.mkdir()
        trainer = Streamed(
            FAMILIES["llama"].build(),
            reward_funcs=reward,
            args=trl.GRPOConfig(
                output_dir=directory / "out",
                max_steps=3,
                logging_steps=1,
                learning_rate=1e-2,
                use_cpu=True,
                bf16=False,
                disable_tqdm=True,
                report_to="none",
                save_strategy="no",
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                num_generations=2,
                max_completion_length=LENGTH,
                beta=0.0,
            ),
            train_dataset=Dataset.from_list([{"prompt": f"{n} {n + 1}"} for n in range(12)]),
            processing_class=tokenizer,
            rollout_func=roll_out,
            infinity_config=infinity.Config(
                nvme=directory,
                parameters=place,
                optimizer=place,
                gpu_memory="16MiB",
                cpu_memory="64MiB",
            ),
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        engine = infinity.engine(trainer.model)
        weights = {name: value.clone() for name, value in engine.state_dict().items()}
        engine.close()
        return losses, weights

    losses, weights = train(True)
    assert len(slept) == 3 and all(slept)
    expected, others = train(False)
    assert losses == expected and len(losses) == 3
    assert all(torch.equal(weights[name], value) for name, value in others.items())
    start = FAMILIES["llama"].build().state_dict()
    assert not all(torch.equal(weights[name], value) for name, value in start.items())
