"""The training scripts that TRL installs, unmodified, with a DeepSpeed configuration under
`infinity run`: losses and weights are those of the same script without one.

The models and the data are local and small. Each variant is one process, forked after the imports
that all share. Variants that no chosen test needs do not run.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from support import hosted
from support.local_models import save_causal, sentence
from support.roads import road

pytestmark = pytest.mark.timeout(300)

STEPS = 3
OPTIONS = f"""
--max_steps {STEPS} --per_device_train_batch_size 2 --gradient_accumulation_steps 2
--learning_rate 1e-2 --lr_scheduler_type constant --max_grad_norm 0.5 --logging_steps 1
--eval_strategy steps --eval_steps {STEPS} --per_device_eval_batch_size 2
--save_strategy steps --save_steps {STEPS} --report_to none --use_cpu --bf16 False
""".split()
CUT = ["--max_length", "16"]
OWN = {
    "sft": CUT,
    "dpo": CUT,
    "dpo precomputed": [*CUT, "--precompute_ref_log_probs"],
    "kto": CUT,
    "reward": [*CUT, "--eos_token", "</s>"],
    "grpo": [
        *("--num_generations", "2", "--max_completion_length", "6", "--beta", "0.1"),
        *("--reward_funcs", "judging.by_letters"),
    ],
    "rloo": [
        *("--num_generations", "2", "--max_completion_length", "6", "--beta", "0.1"),
        *("--reward_funcs", "judging.by_letters", "--normalize_advantages"),
    ],
}
"""What each script is given beside `OPTIONS`."""
LORA = ["--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj"]
JUDGING = """
def by_letters(completions, **rest):
    return [float(sum(map(ord, text)) % 97) for text in completions]
"""
AUTO = dict.fromkeys(
    (
        *("train_batch_size", "train_micro_batch_size_per_gpu"),
        *("gradient_accumulation_steps", "gradient_clipping"),
    ),
    "auto",
)
CONFIGURATIONS: dict[int, dict[str, Any]] = {
    2: AUTO | {"zero_optimization": {"stage": 2}},
    3: AUTO
    | {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    },
}


class Variant(NamedTuple):
    """A key of `OWN`, which starts with the name of the script, with all weights or with adapters,
    and the stage of ZeRO; 0 is the plain script."""

    script: str
    adapters: bool
    stage: int

    def __str__(self) -> str:
        return f"{self.script}-{'lora' if self.adapters else 'full'}-zero{self.stage}"


NAMES = Variant._fields
SCRIPTS = [(script, adapters) for script in OWN for adapters in (False, True)]
SCRIPTS.remove(("dpo precomputed", True))
VARIANTS = [
    Variant(script, adapters, stage) for script, adapters in SCRIPTS for stage in CONFIGURATIONS
]


def rows(script: str) -> list[dict[str, Any]]:
    """Sixteen examples, as the trainer of the script reads them."""
    make = {
        "sft": lambda i: {"text": sentence(i, 12)},
        "dpo": lambda i: {
            "prompt": sentence(i, 4),
            "chosen": " " + sentence(i + 1, 6),
            "rejected": " " + sentence(i + 2, 5),
        },
        "kto": lambda i: {
            "prompt": sentence(i, 4),
            "completion": " " + sentence(i + 1, 6),
            "label": i % 2 == 0,
        },
        "reward": lambda i: {"chosen": sentence(i + 1, 10), "rejected": sentence(i + 2, 9)},
        "grpo": lambda i: {"prompt": sentence(i, 4)},
        "rloo": lambda i: {"prompt": sentence(i, 4)},
    }[script]
    return [make(number) for number in range(16)]


def prepare(directory: Path) -> None:
    """Write the model, the data and the configurations of all variants."""
    save_causal(directory / "model")
    for script in {key.split()[0] for key in OWN}:
        data = directory / "data" / script
        data.mkdir(parents=True)
        for split, part in {"train": rows(script)[:12], "test": rows(script)[12:]}.items():
            (data / f"{split}.jsonl").write_text("\n".join(map(json.dumps, part)))
    for stage, keys in CONFIGURATIONS.items():
        (directory / f"zero{stage}.json").write_text(json.dumps(keys))


def job(top: Path, scripts: Path, variant: Variant) -> hosted.Job:
    directory = top / str(variant)
    directory.mkdir()
    (directory / "judging.py").write_text(JUDGING)
    name = variant.script.split()[0]
    words = [scripts / f"{name}.py", "--model_name_or_path", top / "model"]
    words += ["--dataset_name", top / "data" / name, "--output_dir", directory / "out"]
    words += [*OPTIONS, *OWN[variant.script]]
    if variant.adapters:
        words += LORA
        words += ["--lora_task_type", "SEQ_CLS"] if variant.script == "reward" else []
    if variant.stage:
        words += ["--deepspeed", top / f"zero{variant.stage}.json"]
    return hosted.Job(str(directory), [*map(str, words)], [{}])


def chosen(session: pytest.Session) -> list[Variant]:
    """The variants of the tests of this file that are to run."""
    tests = [
        item
        for item in session.items
        if isinstance(item, pytest.Function) and item.path == Path(__file__)
    ]
    return [Variant(**{name: each.callspec.params[name] for name in NAMES}) for each in tests]


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the variants have run: plain Python the plain ones, `infinity run` the others."""
    package = importlib.util.find_spec("trl")
    if package is None or not package.submodule_search_locations:
        pytest.skip("needs trl")
    scripts = Path(package.submodule_search_locations[0]) / "scripts"
    top = tmp_path_factory.mktemp("trl")
    prepare(top)
    variants = chosen(request.session)
    plain = {each._replace(stage=0): None for each in variants}
    run = [sys.executable, "-m", "infinity_command", "run"]
    hosts = {
        "plain": ([sys.executable], [job(top, scripts, variant) for variant in plain]),
        "zero": (run, [job(top, scripts, variant) for variant in variants]),
    }
    trainers = [f"trl.trainer.{key}_trainer" for key in OWN if key.isalpha()]
    hosted.run(top, hosts, ["datasets", *trainers], {})
    return top


def saved(top: Path, variant: Variant) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses that the trainer logged, evaluation last, and the weights that it saved last."""
    from safetensors.torch import load_file

    directory = top / str(variant)
    hosted.said(directory)
    state = json.loads((directory / f"out/checkpoint-{STEPS}/trainer_state.json").read_text())
    losses = [
        entry[name]
        for name in ("loss", "eval_loss")
        for entry in state["log_history"]
        if name in entry
    ]
    assert len(losses) == STEPS + 1
    name = "adapter_model" if variant.adapters else "model"
    return losses, load_file(directory / "out" / f"{name}.safetensors")


@pytest.mark.pairs
@pytest.mark.parametrize(
    NAMES,
    [
        pytest.param(
            *each,
            id=str(each),
            marks=road(
                *("TRL", f"`{each.script}`", "`infinity run`", each.stage),
                adapters="LoRA" if each.adapters else "none",
            ),
        )
        for each in VARIANTS
    ],
)
def test_a_script_of_trl_runs_unmodified(
    ran: Path, script: str, adapters: bool, stage: int
) -> None:
    variant = Variant(script, adapters, stage)
    found, weights = saved(ran, variant)
    expected, plain = saved(ran, variant._replace(stage=0))
    checkpoint = ran / str(variant) / f"out/checkpoint-{STEPS}"
    assert (checkpoint / f"global_step{STEPS}").is_dir(), "this engine wrote it, not the trainer"
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert weights.keys() == plain.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, plain[name], rtol=1e-6, atol=1e-6, msg=name)
