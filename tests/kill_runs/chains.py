"""SIGKILL at random moments: whatever a run is doing, the next process goes on with the same bits.

    PYTHONPATH=tests python -m kill_runs --kills 200 --kind finetune

A chain is one run. Its process is killed after a random time of its life, be it in start-up, a
resume, a step, a commit, a save or the end, and made again, until one ends by itself. Then the
weights and the loss of every step are compared with those of a run that nobody killed. A step is
made at most twice for each kill. A failure names the chain's seed. The moments are of a clock, so
the same seed does not kill at the same instruction: `tests/simulation` does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from typer.testing import CliRunner

import infinity
from support.durable import train
from support.durable_trainers import SetUp, model_of, tokenizer
from support.rank_group import SERVER, become_rank

STEPS = 20
FINETUNE = (
    "--model gpt2-tiny --sequence-length 32 --batch-size 2 --accumulate 2 --eval-every 5 "
    "--eval-batches 2 --gpu-memory 64MiB --cpu-memory 64MiB --lr 1e-3 --seed 3 --warmup 4 "
    f"--steps {STEPS} --json --debug --resume --overwrite --durability step"
)
SAMPLES = FINETUNE.replace("gpt2-tiny", "model")
"""Of a model with weights, on samples: see `prepare`."""
SET_UPS = {
    "finetune": f"{FINETUNE} --data text.txt --cache 0",
    "finetune, cached": f"{FINETUNE} --data text.txt",
    "finetune, vertical": f"{FINETUNE} --data text.txt --accumulation-order vertical",
    "finetune, bf16, on NVMe": f"{FINETUNE} --data text.txt --precision bf16 --parameters nvme "
    "--gradients nvme --optimizer nvme --activations nvme --cache 0",
    "finetune, checkpoints": f"{FINETUNE} --data text.txt --checkpoint-every 4 "
    "--keep-checkpoints 2",
    "finetune, samples": f"{SAMPLES} --data samples.jsonl --sample 3",
    "finetune, packed": f"{SAMPLES} --data samples.jsonl --packing --weight-decay 0.1",
    "finetune, LoRA, packed": f"{SAMPLES} --data samples.jsonl --packing --lora 4",
    "finetune, LoRA, merged": f"{SAMPLES} --data samples.jsonl --lora 4 --merge --cache 0",
    "finetune, LoRA, vertical": f"{SAMPLES} --data samples.jsonl --lora 4 --max-grad-norm 0 "
    "--accumulation-order vertical",
}
"""The options of `infinity finetune`."""
Tensors = dict[str, torch.Tensor]


def finetune(options: str, place: Path) -> Tensors:
    """`infinity finetune` in this process, in the folder `place`; returns what it saves."""
    from infinity.cli.history import History
    from infinity.cli.main import app
    from infinity.cli.progress import Progress

    real = Progress.stepped

    def stepped(progress: Progress, history: History) -> None:
        step = history.steps[-1]
        log(place, step.number, step.loss, step.learning_rate, step.grad_norm)
        real(progress, history)

    Progress.stepped = stepped  # type: ignore[method-assign]
    os.chdir(place)
    arguments = ["finetune", "--nvme", "nvme", "--output", "output", *options.split()]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (file,) = (place / "output").glob("*model.safetensors")
    return load_file(file)


def lora(place: Path) -> Tensors:
    """Adapters of PEFT on a frozen model."""
    import peft

    from support.models import FAMILIES, text_batch

    torch.manual_seed(0)
    base = FAMILIES["llama"].build()
    targets = ["q_proj", "v_proj", "up_proj"]
    model = peft.get_peft_model(
        base, peft.LoraConfig(target_modules=targets, r=4, lora_dropout=0.2)
    )
    config = infinity.Config(
        nvme=place / "nvme",
        gpu_memory="8MiB",
        cpu_memory="8MiB",
        durability="step",
        tuning={"cache": 0},
    )
    infinity.wrap(model, config, resume=True)
    engine = infinity.engine(model)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    for number in range(engine.committed_step or 0, STEPS):
        loss = model(**text_batch(number)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log(place, number, loss.item())
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine.close()
    return found


def cached_in_part(place: Path) -> Tensors:
    """A run of the library, a part of whose states is cached; it updates from backward on."""
    options = {"steps": STEPS, "cache": "256KiB", "update": "speculative"}
    return train([place / "nvme"], place / "log", **options)


def one_rank(place: Path) -> Tensors:
    """A rank of two, each with a part of all states."""
    options = {"steps": STEPS, "cache": 0, "update": "speculative"}
    return train([place / "nvme"], place / f"log{dist.get_rank()}", **options)


RANKS = {"two ranks": 2}
"""Kinds of several ranks. One is killed, and the others as soon as that is seen."""
KINDS: dict[str, Callable[[Path], Tensors]] = {
    **{name: partial(finetune, options) for name, options in SET_UPS.items()},
    "cached in part": cached_in_part,
    "lora": lora,
    "two ranks": one_rank,
}


def log(place: Path, *values: Any) -> None:
    """A step was made."""
    with (place / "log").open("a") as lines:
        lines.write(json.dumps(values) + "\n")


def logged(place: Path) -> list[list[Any]]:
    """The steps of all processes so far, in their order, or those of the first rank; a last line
    may be cut off."""
    path = next((place / name for name in ("log", "log0") if (place / name).exists()), place)
    lines = path.read_text().split("\n")[:-1] if path != place else []
    return [json.loads(line) for line in lines]


def work(errors: Path, kind: str, place: Path, rank: int, meeting: Path) -> None:
    """One process of a chain."""
    become_rank(errors)
    if kind in RANKS:
        store = f"file://{meeting}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS[kind])
    draft = place / f"result{rank}.draft"
    torch.save(KINDS[kind](place), draft)
    draft.rename(draft.with_suffix(""))


def prepare(place: Path) -> None:
    """The folder of a chain."""
    (place / "nvme").mkdir(parents=True)
    (place / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    model_of(SetUp(), plain=True).save_pretrained(place / "model")
    tokenizer().save_pretrained(place / "model")
    with (place / "samples.jsonl").open("w") as lines:
        for number in range(60):
            words = [str(number * step % 60) for step in range(1, 4 + number % 9)]
            lines.write(json.dumps({"prompt": words[0], "completion": " ".join(words)}) + "\n")


def one_life(kind: str, place: Path, seconds: float | None, victim: int = 0) -> bool:
    """Run a process, or all ranks of one, and kill it after so many seconds, the `victim` first;
    whether all ended by themselves before."""
    ranks = RANKS.get(kind, 1)
    lives = place / "lives"
    with lives.open("a") as file:
        file.write("one more\n")
    meeting = place / f"meeting{lives.stat().st_size}"
    errors = [place / f"errors{rank}.txt" for rank in range(ranks)]
    processes = [
        SERVER.Process(target=work, args=(errors[rank], kind, place, rank, meeting))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    processes[victim % ranks].join(seconds)
    was_killed = False
    for process in (processes[victim % ranks], *processes):
        if seconds is not None and process.exitcode is None and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
            was_killed = True
        process.join()
    for process, said in zip(processes, errors, strict=True):
        # A rank whose partner is gone may say so before it is killed, too.
        if process.exitcode not in (0, -signal.SIGKILL) and not (was_killed and ranks > 1):
            raise AssertionError(f"a process failed:\n{said.read_text()[-4000:]}")
    return all(process.exitcode == 0 for process in processes)


def chain(kind: str, place: Path, seed: int, most: int, span: float, expected: Path) -> int:
    """One run, killed up to `most` times; returns how often it was. Raises `AssertionError`."""
    chance, kills = random.Random(seed), 0
    prepare(place)
    steps = {each[0]: each for each in logged(expected)}
    while True:
        before = logged(place)
        seconds = chance.uniform(0, span) if kills < most else None
        if one_life(kind, place, seconds, victim=chance.randrange(2)):
            break
        kills += 1
        after = logged(place)[len(before) :]
        if before and after:
            again = max(number for number, *_ in before) + 1 - after[0][0]
            assert again <= 1, f"{again} steps were made again"
    for rank in range(RANKS.get(kind, 1)):
        found, wanted = (torch.load(each / f"result{rank}") for each in (place, expected))
        assert found.keys() == wanted.keys()
        wrong = [name for name in wanted if not torch.equal(found[name], wanted[name])]
        assert not wrong, f"other weights: {wrong}"
    assert all(steps[each[0]] == each for each in logged(place)), "other losses"
    return kills


def main() -> int:
    """Run chains until so many processes were killed; returns how many chains failed."""
    parser = argparse.ArgumentParser(
        prog="kill_runs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--kind", default="", help=f"a word of kinds: {'; '.join(KINDS)}")
    parser.add_argument("--first", type=int, default=0, help="seed of the first chain")
    parser.add_argument("--most", type=int, default=10, help="kills of one chain")
    options = parser.parse_args()
    kinds = [kind for kind in KINDS if options.kind in kind] or parser.error("no such kind")
    failed, killed, seed = 0, Counter[str](), options.first
    with tempfile.TemporaryDirectory(prefix="kill-runs-", dir=".") as folder:
        top = Path(folder).resolve()
        for kind in kinds:
            span = uninterrupted(kind, top)
            while killed[kind] < options.kills / len(kinds):
                place = top / f"chain {seed}"
                try:
                    killed[kind] += chain(kind, place, seed, options.most, span, top / kind)
                    shutil.rmtree(place)
                except Exception as error:
                    failed += 1
                    print(f"--first {seed} --kind {kind!r}: {error}", flush=True)
                    shutil.move(place, Path(f"failed-chain-{seed}"))
                seed += 1
            print(f"{kind}: {killed[kind]} kills, {failed} failures so far", flush=True)
    print(f"{killed.total()} kills: {failed} of {seed - options.first} chains failed")
    return failed


def uninterrupted(kind: str, top: Path) -> float:
    """What nobody kills; returns the seconds that a process of it takes."""
    for name in (f"{kind}, first", kind):  # the first one may start the server
        prepare(top / name)
        begin = time.monotonic()
        assert one_life(kind, top / name, None)
    return time.monotonic() - begin
