"""`InfinityTrainer` against a Trainer with a plain model: losses, norms, metrics, weights,
checkpoints, and going on from one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.optim.optimizer import Optimizer
from infinity.quantities import format_bytes
from support.models import FAMILIES, text_batch
from support.rank_group import OnRanks
from support.roads import OWN, road

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

FIGURES = {"loss", "grad_norm", "eval_loss", "learning_rate"}


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Twelve rows of tokens."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {name: value[0] for name, value in text_batch(number, rows=1).items()}


def config(directory: Path, **options: Any) -> infinity.Config:
    """States on NVMe, where all moves."""
    directory.mkdir(exist_ok=True)
    return infinity.Config(nvme=directory, tuning=infinity.Tuning(cache=0), **options)


def arguments(output: Path, **options: Any) -> Any:
    from transformers import TrainingArguments

    usual: dict[str, Any] = {
        "output_dir": str(output),
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    return TrainingArguments(**(usual | options))


def trained(
    output: Path, wrapped: bool, run: bool = True, adapters: Any = None, **options: Any
) -> Any:
    """A trainer over a tiny Llama that has trained if it is to `run`; `options` are arguments.
    `adapters` is peft, for a model with LoRA."""
    from transformers import Trainer

    from infinity.integrations.transformers import InfinityTrainer

    data = Sentences()
    model = FAMILIES["llama"].build()
    if adapters is not None:
        lora = adapters.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        model = adapters.get_peft_model(model, lora)
    given: dict[str, Any] = {
        "model": model,
        "args": arguments(output, **options),
        "train_dataset": data,
        "eval_dataset": data,
    }
    if wrapped:
        drive = output.with_name(output.name + "-drive")
        trainer = InfinityTrainer(**given, infinity_config=config(drive))
    else:
        trainer = Trainer(**given)
    if run:
        trainer.train()
    return trainer


def copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def agree(found: Any, expected: Any, atol: float = 1e-6) -> None:
    """Both trainers logged the same figures, and have the same weights."""
    for ours, theirs in zip(found.state.log_history, expected.state.log_history, strict=True):
        for name in FIGURES & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name
    weights = expected.model.state_dict()
    for name, value in found.model.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=atol)


@pytest.fixture
def outputs(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    torch.set_grad_enabled(True)


OFTEN: dict[str, Any] = {
    "max_steps": 4,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
    "weight_decay": 0.1,
    "label_smoothing_factor": 0.1,
    "save_strategy": "steps",
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "per_device_eval_batch_size": 3,
    "load_best_model_at_end": True,
}


@road("transformers", "`InfinityTrainer`", "`python`", OWN)
def test_a_run_with_evaluation_checkpoints_and_the_best_model(outputs: Path) -> None:
    """Accumulation, clipping, label smoothing, decay; then metrics of predict, and a resume."""
    expected = trained(outputs / "plain", wrapped=False, **OFTEN)
    found = trained(outputs / "ours", wrapped=True, **OFTEN)
    agree(found, expected)
    moved = found.state.log_history[1]
    assert moved["nvme_written_bytes"] > 0 and moved["wait_nvme_seconds"] >= 0
    test = Sentences()
    ours, theirs = found.predict(test), expected.predict(test)
    assert ours.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], rel=1e-5)
    weights = copies(found.model)
    saved = outputs / "ours" / "checkpoint-4"
    assert not (saved / "optimizer.pt").exists()
    again = type(found.model).from_pretrained(saved)
    assert all(torch.equal(value, weights[name]) for name, value in copies(again).items())
    infinity.engine(found.model).close()

    resumed = trained(outputs / "ours", wrapped=True, run=False, **OFTEN)
    resumed.train(resume_from_checkpoint=str(outputs / "ours" / "checkpoint-2"))
    assert all(torch.equal(v, weights[name]) for name, v in copies(resumed.model).items())
    infinity.engine(resumed.model).close()


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("rmsprop", {}),
        ("adamw_torch_fused", {"bf16": True, "gradient_checkpointing": True}),
    ],
)
def test_names_of_optimizers(outputs: Path, name: str, given: dict[str, Any]) -> None:
    expected = trained(outputs / "plain", wrapped=False, optim=name, **given)
    found = trained(outputs / "ours", wrapped=True, optim=name, **given)
    assert isinstance(found.optimizer.optimizer, Optimizer)
    agree(found, expected, atol=1e-5)  # RMSprop magnifies what rounding does to small gradients
    infinity.engine(found.model).close()


def all_names() -> list[str]:
    training_args = pytest.importorskip("transformers.training_args")
    return [each.value for each in training_args.OptimizerNames]


@pytest.mark.parametrize("name", all_names())
def test_every_name_of_an_optimizer_trains_or_is_refused_by_name(outputs: Path, name: str) -> None:
    """Where a package is missing, the error is that of transformers."""
    from infinity.integrations.transformers import COUNTERPARTS

    once: dict[str, Any] = {"optim": name, "max_steps": 1, "weight_decay": 0.1}
    if name not in COUNTERPARTS:
        with pytest.raises(infinity.ConfigError, match=f"no optimizer for optim='{name}'; choose"):
            trained(outputs / "ours", wrapped=True, **once)
        return
    try:
        expected = trained(outputs / "plain", wrapped=False, **once)
    except (ImportError, ValueError) as error:
        if COUNTERPARTS[name].kind is None:
            with pytest.raises(type(error), match="install"):
                trained(outputs / "ours", wrapped=True, **once)
            return
        expected = None
    try:
        found = trained(outputs / "ours", wrapped=True, **once)
    except infinity.ConfigError as error:
        assert f"{type(expected.optimizer.optimizer).__name__} of " in str(error)
        return
    assert isinstance(found.optimizer.optimizer, Optimizer)
    if expected is not None and COUNTERPARTS[name].moments == "fp32":
        agree(found, expected, atol=1e-5)
    infinity.engine(found.model).close()


def test_optimizers_with_narrow_moments(outputs: Path) -> None:
    found = trained(outputs / "ours", wrapped=True, optim="paged_adamw_8bit")
    assert infinity.engine(found.model).config.moment_precision == "int8"
    infinity.engine(found.model).close()
    found = trained(outputs / "lion", wrapped=True, optim="lion_32bit")
    assert isinstance(found.optimizer.optimizer, infinity.Lion)
    infinity.engine(found.model).close()


def test_arguments_of_an_optimizer_with_three_moments(outputs: Path) -> None:
    """Those that transformers gives to the AdEMAMix of bitsandbytes."""
    given = {"optim": "ademamix_8bit", "optim_args": "beta1=0.8, beta3=0.99,alpha=2,t_alpha=5"}
    found = trained(outputs / "ours", wrapped=True, **given)
    assert isinstance(found.optimizer.optimizer, infinity.AdEMAMix)
    group = found.optimizer.param_groups[0]
    assert (group["betas"], group["alpha"]) == ((0.8, 0.999, 0.99), 2.0)
    assert (group["t_alpha"], group["t_beta3"], group["eps"]) == (5, None, 1e-8)
    config = infinity.engine(found.model).config
    assert (config.algorithm, config.moment_precision) == ("ademamix", "int8")
    infinity.engine(found.model).close()


def test_an_optimizer_and_a_scheduler_of_torch(outputs: Path) -> None:
    """They are made for the plain model, before it is wrapped."""
    from transformers import Trainer

    from infinity.integrations.transformers import InfinityTrainer

    trainers = []
    for kind in (Trainer, InfinityTrainer):
        model = FAMILIES["llama"].build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        own = {} if kind is Trainer else {"infinity_config": config(outputs / "drive")}
        trainer = kind(
            model,
            arguments(outputs / kind.__name__),
            train_dataset=Sentences(),
            optimizers=(optimizer, scheduler),
            **own,
        )
        trainer.train()
        trainers.append(trainer)
    expected, found = trainers
    agree(found, expected)
    infinity.engine(found.model).close()


def test_a_model_without_memory_from_model_init(outputs: Path) -> None:
    """`model_init` is called for each `train`; the engine before is closed."""
    from infinity.integrations.transformers import InfinityTrainer

    def fresh() -> nn.Module:
        with infinity.init():
            return FAMILIES["llama"].build()

    found = InfinityTrainer(
        args=arguments(outputs / "ours", seed=0),
        model_init=fresh,
        train_dataset=Sentences(),
        infinity_config=config(outputs / "drive"),
    )
    found.train()
    first = copies(found.model)
    found.train()
    assert all(torch.equal(value, first[name]) for name, value in copies(found.model).items())
    agree(found, trained(outputs / "plain", wrapped=False, seed=0))
    infinity.engine(found.model).close()


@road("transformers", "`InfinityTrainer`", "`python`", OWN, adapters="LoRA")
def test_adapters_go_on_from_a_checkpoint(outputs: Path) -> None:
    """It holds the adapters alone, and what a plain Trainer saved is taken, too."""
    peft = pytest.importorskip("peft")

    def run(name: str, wrapped: bool, resume: Path | None = None) -> Any:
        often = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
        trainer = trained(outputs / name, wrapped, run=False, adapters=peft, **often)
        trainer.train(resume_from_checkpoint=resume and str(resume))
        if wrapped:
            infinity.engine(trainer.model).close()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    expected = run("plain", wrapped=False)
    assert run("ours", wrapped=True) == pytest.approx(expected, rel=1e-5)
    saved = outputs / "ours" / "checkpoint-2"
    assert sum(path.stat().st_size for path in (saved / "infinity").iterdir()) < 200_000
    for source in (saved, outputs / "plain" / "checkpoint-2"):
        assert run("again", wrapped=True, resume=source) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "reference",
    [
        pytest.param(
            reference,
            marks=road("TRL", "`DPOTrainer` with the mixin", "`python`", OWN, adapters),
        )
        for reference, adapters in {"model": "none", "adapters off": "LoRA"}.items()
    ],
)
def test_preference_optimization_of_trl(
    outputs: Path, reference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a reference model, which may be wrapped, and with none beside adapters."""
    peft, trl = pytest.importorskip("peft"), pytest.importorskip("trl")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from infinity.integrations.transformers import InfinityTrainerMixin

    class Streamed(InfinityTrainerMixin, trl.DPOTrainer):  # type: ignore[misc, name-defined]
        pass

    monkeypatch.setenv("CI", "1")  # TRL sends nothing
    words = {word: number for number, word in enumerate(["<end>", *map(str, range(63))])}
    plain = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<end>", pad_token="<end>"
    )
    pairs = [
        {"prompt": f"{n} {n + 1}", "chosen": f" {n + 2} {n + 3}", "rejected": f" {3 * n} 7"}
        for n in range(12)
    ]
    logs = []
    for kind in (trl.DPOTrainer, Streamed):
        torch.manual_seed(0)
        options = arguments(outputs / kind.__name__).to_dict()
        names = ("output_dir", "max_steps", "logging_steps", "learning_rate", "use_cpu")
        given: dict[str, Any] = {name: options[name] for name in (*names, "disable_tqdm")}
        model, beside = FAMILIES["llama"].build(), FAMILIES["llama"].build().requires_grad_(False)
        ours: dict[str, Any] = {}
        if kind is Streamed:
            ours = {"infinity_config": config(outputs / "drive")}
            infinity.wrap(beside, config(outputs / "beside"))
        if reference == "model":
            ours["ref_model"] = beside
        else:
            ours["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        trainer = kind(
            model,
            args=trl.DPOConfig(**given, report_to="none", save_strategy="no", bf16=False),
            train_dataset=Dataset.from_list(pairs),
            processing_class=tokenizer,
            **ours,
        )
        trainer.train()
        logs.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert logs[1] == pytest.approx(logs[0], rel=1e-5)
    assert logs[0][-1] < logs[0][0]
    infinity.engine(trainer.model).close()
    infinity.engine(beside).close()


def test_trials_of_a_search_over_hyperparameters(outputs: Path) -> None:
    """Each trial sets arguments, makes the accelerator anew, and trains a new model. The waits that
    are logged begin again with each."""
    from transformers import Trainer

    from infinity.integrations.transformers import InfinityTrainer

    def build(trial: Any = None) -> nn.Module:
        torch.manual_seed(0)
        return FAMILIES["llama"].build()

    losses, logged = [], []
    for ours in (False, True):
        data = Sentences()
        given: dict[str, Any] = {
            "model_init": build,
            "args": arguments(outputs / "search", seed=3),
            "train_dataset": data,
            "eval_dataset": data,
        }
        trainer: Any = (
            InfinityTrainer(**given, infinity_config=config(outputs / "search-drive"))
            if ours
            else Trainer(**given)
        )
        losses.append([])
        for rate in (1e-2, 1e-3):
            trainer.args.learning_rate = rate
            trainer.create_accelerator_and_postprocess()
            trainer.train()
            losses[-1].append(trainer.evaluate()["eval_loss"])
            logged += [entry for entry in trainer.state.log_history if "wait_nvme_seconds" in entry]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][0] != losses[0][1]
    assert logged and all(entry["wait_nvme_seconds"] >= 0 for entry in logged)
    infinity.engine(trainer.model).close()


REFUSED = [
    ({"optim": "galore_adamw"}, {}, "infinity has no optimizer for optim='galore_adamw'"),
    ({"bf16_full_eval": True}, {}, "bf16_full_eval=True converts the model"),
    pytest.param(
        *({"fsdp": "full_shard"}, {}, "fsdp=.* leave out FSDP"),
        marks=road(
            *("transformers", "`InfinityTrainer(fsdp=...)`", "`python`", OWN),
            result="refused: leave out FSDP",
        ),
    ),
    ({}, {"wrapped": True}, "the model is wrapped already, so infinity_config would change"),
]


@pytest.mark.parametrize(("given", "model", "text"), REFUSED)
def test_what_cannot_be_is_refused(
    outputs: Path, given: dict[str, Any], model: dict[str, bool], text: str
) -> None:
    from infinity.integrations.transformers import InfinityTrainer

    llama = FAMILIES["llama"].build()
    if model:
        infinity.wrap(llama)
    with pytest.raises(infinity.ConfigError, match=text):
        InfinityTrainer(
            llama, arguments(outputs, **given), infinity_config=config(outputs / "drive")
        )


def other_model() -> torch.optim.Optimizer:
    return torch.optim.AdamW(nn.Linear(2, 2).parameters())


@pytest.mark.parametrize(
    ("optimizers", "text"),
    [
        (other_model, "optimizers is a value of type AdamW; give (optimizer, scheduler), either"),
        (
            lambda: (other_model(), None),
            "the AdamW in optimizers has no parameter of the model, and would train nothing",
        ),
        (lambda: (torch.optim.AdamW, None), "the optimizer in optimizers is the class AdamW; gi"),
        (lambda: ("adamw", None), "the optimizer in optimizers is 'adamw'; give one of torch"),
    ],
)
def test_optimizers_that_train_nothing(outputs: Path, optimizers: Any, text: str) -> None:
    from infinity.integrations.transformers import InfinityTrainer

    llama = FAMILIES["llama"].build()
    with pytest.raises(infinity.ConfigError, match=f"^{re.escape(text)}"):
        InfinityTrainer(model=llama, args=arguments(outputs), optimizers=optimizers())
    assert all(type(parameter) is nn.Parameter for parameter in llama.parameters())
    with pytest.raises(infinity.ConfigError, match=r"^model is 'llama'; give a torch\.nn\.Module$"):
        InfinityTrainer(model="llama", args=arguments(outputs))


def test_a_training_says_once_what_it_writes_to_nvme(
    outputs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trained(outputs / "ours", wrapped=True, max_steps=4, logging_steps=3)
    trainer.train()
    written = infinity.engine(trainer.model).plan().mean_written(1)
    (said,) = [each for each in caplog.messages if "NVMe" in each]
    sizes = map(format_bytes, (int(written), int(2 * written)))
    start = "each step writes {} to NVMe: {} in the 2 steps to come, ".format(*sizes)
    assert re.fullmatch(re.escape(start) + r"\S+ \SiB a day at this speed", said)


def test_a_training_without_writes_to_nvme_says_nothing_of_them(
    outputs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from infinity.integrations.transformers import InfinityTrainer

    InfinityTrainer(
        FAMILIES["llama"].build(),
        arguments(outputs),
        train_dataset=Sentences(),
        infinity_config=infinity.Config(parameters="cpu", optimizer="cpu"),
    ).train()
    assert not [each for each in caplog.messages if "NVMe" in each]


@pytest.mark.parametrize("first", [True, False])
def test_one_rank_of_many_says_what_each_writes(outputs: Path, first: bool) -> None:
    from infinity.integrations.wear import WearNote

    trainer, said = trained(outputs / "ours", wrapped=True), list[str]()
    note, args = WearNote(said.append), SimpleNamespace(world_size=2)
    state = SimpleNamespace(max_steps=9, global_step=4, is_world_process_zero=first)
    for _ in range(3):
        note.on_step_begin(args, state, None, model=trainer.model)
        note.on_step_end(args, state, None, model=trainer.model)
    assert len(said) == first
    assert all(" to NVMe on each rank: " in each and " in the 5 steps to" in each for each in said)


def as_ranks_of_torchrun(rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }


def work(task: Any, where: Path, rank: int) -> None:
    """Train on two ranks, and go on from a checkpoint."""
    before = dict(os.environ)
    os.environ.update(as_ranks_of_torchrun(rank))
    try:
        options = OFTEN | {"per_device_train_batch_size": 1, "ddp_backend": "gloo"}
        found = trained(where / "ours", wrapped=True, **options)
        weights = copies(found.model)
        found.save_model(str(where / "final"))
        if rank == 0:
            (where / "log.json").write_text(json.dumps(found.state.log_history))
        infinity.engine(found.model).close()
        resumed = trained(where / "ours", wrapped=True, run=False, **options)
        resumed.train(resume_from_checkpoint=str(where / "ours" / "checkpoint-2"))
        assert all(torch.equal(v, weights[name]) for name, v in copies(resumed.model).items())
        infinity.engine(resumed.model).close()
    finally:
        os.environ.clear()
        os.environ.update(before)


@road("transformers", "`InfinityTrainer`", "`torchrun`", OWN, ranks=2)
def test_two_ranks(outputs: Path, on_ranks: OnRanks) -> None:
    """They train as one rank with batches of twice the size, save, and go on with the same bits."""
    assert on_ranks(None) == ["done", "done"]
    expected = trained(outputs / "plain", wrapped=False, **OFTEN)
    log = json.loads((outputs / "log.json").read_text())
    for ours, theirs in zip(log, expected.state.log_history, strict=True):
        for name in FIGURES & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name
    weights = expected.model.state_dict()
    for name, value in copies(type(expected.model).from_pretrained(outputs / "final")).items():
        torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-5)
