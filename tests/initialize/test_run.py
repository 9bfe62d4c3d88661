"""`infinity run`: unmodified scripts find this engine where they import deepspeed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import forked
from support.children import CHILD
from support.deepspeed_configs import AUTO
from support.roads import API, LAUNCHED, road

COMMAND = [
    sys.executable,
    "-c",
    "import sys; sys.argv[0] = 'infinity'; from infinity_command import main; main()",
    "run",
]
WITHOUT_RANKS = {
    name: value
    for name, value in CHILD["env"].items()
    if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
}


def run(*words: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, words)],
        **{**CHILD, "env": WITHOUT_RANKS | (env or {})},
        capture_output=True,
        timeout=300,
        check=False,
    )


def answers(done: subprocess.CompletedProcess[str] | forked.Ended) -> Any:
    """The last line that a script printed, as JSON."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


PLAIN = """
import argparse, importlib.metadata, json, sys
assert "torch" not in sys.modules, "the command is as light as python"
import torch
import deepspeed
from deepspeed.ops.adam import DeepSpeedCPUAdam

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
deepspeed.init_distributed()

torch.manual_seed(1)
def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

data = torch.randn(4, 4, 8)

def losses(model, backward, step):
    found = []
    for batch in data:
        loss = model(batch).square().mean()
        backward(loss)
        step()
        found.append(loss.item())
    return found

model = build()
engine, optimizer, _, scheduler = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters()
)
found = losses(engine, engine.backward, engine.step)
engine.destroy()

second = build()
client = DeepSpeedCPUAdam(second.parameters(), lr=0.01)
config = {"train_batch_size": 4, "gradient_clipping": 0}
with deepspeed.zero.Init(enabled=False):
    engine, *_ = deepspeed.initialize(model=second, optimizer=client, config=config)
with_client = losses(engine, engine.backward, engine.step)
with deepspeed.zero.GatheredParameters(engine.module.parameters(), modifier_rank=None):
    shape = list(engine.module[0].weight.shape)
engine.destroy()

plain = build()
adam = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0)
def step():
    adam.step()
    adam.zero_grad()
expected = losses(plain, torch.Tensor.backward, step)
print(json.dumps({
    "found": found, "with_client": with_client, "expected": expected, "shape": shape,
    "name": __name__, "rest": sys.argv[1:], "ranks": deepspeed.comm.get_world_size(),
    "versions": [deepspeed.__version__, importlib.metadata.version("deepspeed")],
    "scheduler": type(scheduler).__name__, "rank": deepspeed.comm.get_rank(),
}))
"""


@road(API, "a loop", "`infinity run`", 3)
def test_a_script_for_deepspeed_runs_with_the_losses_of_plain_torch(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PLAIN)
    config = {
        "train_batch_size": 4,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": str(tmp_path / "nvme")},
            "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "nvme")},
        },
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    options = ["--deepspeed", "--deepspeed_config", str(tmp_path / "ds.json")]
    found = answers(run(tmp_path / "script.py", *options))
    assert found["found"] == pytest.approx(found["expected"], rel=1e-6)
    assert found["with_client"] == pytest.approx(found["expected"], rel=1e-6)
    assert found["shape"] == [16, 8]
    assert (found["name"], found["rest"]) == ("__main__", options)
    assert found["versions"][0] == found["versions"][1]
    assert (found["rank"], found["ranks"]) == (0, 1)


TRAINER = """
import json, sys
import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(sys.argv[2:])
torch.manual_seed(0)
small = LlamaConfig(
    hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, vocab_size=64, max_position_embeddings=32,
)
if not args.deepspeed:
    LlamaForCausalLM(small).save_pretrained(sys.argv[1])
model = LlamaForCausalLM.from_pretrained(sys.argv[1])
is_empty = next(model.parameters()).is_meta
ids = torch.arange(16)
data = [{"input_ids": ids * i % 64, "labels": ids * i % 64} for i in range(1, 17)]
trainer = Trainer(model=model, args=args, train_dataset=data)
trainer.train()
history = [each for each in trainer.state.log_history if "loss" in each]
log = [each[name] for each in history for name in ("loss", "grad_norm")]

from accelerate.state import AcceleratorState
kind = str(AcceleratorState().distributed_type.value)
print(json.dumps({"log": log, "is_empty": is_empty, "kind": kind}))
"""
OPTIONS = """
--per_device_train_batch_size 4 --max_steps 3 --logging_steps 1 --save_strategy no --report_to none
--learning_rate 1e-2 --disable_tqdm true
"""


@pytest.fixture
def trainer(tmp_path: Path) -> list[str]:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    (tmp_path / "script.py").write_text(TRAINER)
    options = ["--output_dir", str(tmp_path / "out"), *OPTIONS.split()]
    return [str(tmp_path / "script.py"), str(tmp_path / "model"), *options]


@road("transformers", "`Trainer(deepspeed=...)`", "`infinity run`", 3)
def test_a_trainer_with_a_deepspeed_configuration_runs_unmodified(
    tmp_path: Path, trainer: list[str]
) -> None:
    """At stage 3 the model takes no memory until it is wrapped. Both scripts start with the weights
    that the plain one saved. With `ACCELERATE_USE_CPU` accelerate would train with DDP."""
    (done,) = forked.run(tmp_path, trainer[0], trainer[1:])
    plain = answers(done)
    config = json.loads(json.dumps(AUTO["trainer, zero3"]))
    del config["scheduler"]
    (tmp_path / "ds.json").write_text(json.dumps(config))
    told = {"TRANSFORMERS_VERBOSITY": "info", "ACCELERATE_USE_CPU": "true"}
    ended = run(*trainer, "--deepspeed", tmp_path / "ds.json", env=told)
    found = answers(ended)
    assert ended.stderr.count("Detected DeepSpeed ZeRO-3: activating zero.init()") == 1
    assert (plain["is_empty"], found["is_empty"]) == (False, True)
    assert (plain["kind"], found["kind"]) == ("NO", "DEEPSPEED")
    assert found["log"] == pytest.approx(plain["log"], rel=1e-6)


ACCELERATE = """
import json
import torch
from accelerate import Accelerator, DeepSpeedPlugin

def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    loader = torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=4)
    return model, optimizer, loader, scheduler

model, optimizer, loader, scheduler = build()
plain = []
for number, batch in enumerate(loader):
    loss = model(batch).square().mean()
    (loss / 2).backward()
    if number % 2:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    plain += [loss.item(), optimizer.param_groups[0]["lr"]]

plugin = DeepSpeedPlugin(
    zero_stage=3, gradient_accumulation_steps=2, offload_optimizer_device="cpu",
    gradient_clipping=0.1, zero3_save_16bit_model=True,
)
accelerator = Accelerator(deepspeed_plugin=plugin)
model, optimizer, loader, scheduler = accelerator.prepare(*build())
found = []
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    found += [loss.item(), optimizer.param_groups[0]["lr"]]
names = list(accelerator.get_state_dict(model))
print(json.dumps({"plain": plain, "found": found, "names": names}))
"""


@road("accelerate", "`DeepSpeedPlugin`", "`infinity run`", 3)
def test_accelerate_with_a_deepspeed_plugin_runs_unmodified(tmp_path: Path) -> None:
    """Rates are those of the script's own scheduler, which drives an optimizer that accelerate has
    replaced."""
    pytest.importorskip("accelerate")
    (tmp_path / "script.py").write_text(ACCELERATE)
    found = answers(run(tmp_path / "script.py"))
    assert found["found"] == pytest.approx(found["plain"], rel=1e-6)
    assert found["names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_a_module_runs_and_its_children_find_the_package(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(
        "import importlib.util, json, subprocess, sys\n"
        "find = 'import importlib.util; print(importlib.util.find_spec(\"deepspeed\").origin)'\n"
        "child = subprocess.run([sys.executable, '-c', find], capture_output=True, text=True)\n"
        "origin = importlib.util.find_spec('deepspeed').origin\n"
        "print(json.dumps([__name__, sys.argv[1:], origin == child.stdout.strip()]))\n"
    )
    done = subprocess.run(
        [*COMMAND, "-m", "tool", "--x"],
        **{**CHILD, "env": WITHOUT_RANKS, "cwd": tmp_path},
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert answers(done) == ["__main__", ["--x"], True]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["-m"], "run takes a script, or -m and a module"),
        (["--help-me"], "run takes a script, or -m and a module"),
        (["nowhere.py"], "nowhere.py: no such script, and no command of that name"),
        (["./nowhere"], "./nowhere: no such script\n"),
        pytest.param(
            ["deepspeed", "--num_nodes", "2", "x.py"],
            "deepspeed --num_nodes 2 asks for several node",
            marks=road(
                *(API, "a script", "`infinity run deepspeed --num_nodes 2`", "0 to 3"),
                result="refused: start torchrun on each node",
            ),
        ),
        ([""], ": no such script"),
        ([str(Path(__file__).parent)], "a directory without __main__.py; name a script in it"),
        (["-m", "no_such.module"], "no_such.module: no module of the name 'no_such'; it is sea"),
    ],
)
def test_a_command_without_a_script_is_refused(words: list[str], problem: str) -> None:
    done = run(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


def test_the_status_of_the_script_is_that_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os, sys\nsys.exit(int(os.environ['RANK']) + 7)\n")
    assert run(tmp_path / "ends.py").returncode == 7
    assert run(tmp_path / "ends.py", env={"RANK": "2", "WORLD_SIZE": "3"}).returncode == 9, (
        "a launcher is heeded"
    )


def test_a_process_that_does_not_know_its_number_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('ran')")
    done = run(tmp_path / "script.py", env={"WORLD_SIZE": "2"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("infinity: WORLD_SIZE is 2, but RANK is not set")


JOINS = """
import json, torch
import infinity
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
engine, *_ = infinity.initialize(model=model, config={
    "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
})
rank = engine.global_rank
loss = engine(torch.full((2, 8), rank + 1.0)).square().mean()
engine.backward(loss)
engine.step()
print(json.dumps([rank, engine.local_rank, engine.world_size, engine.get_global_grad_norm()]))
engine.destroy()
torch.distributed.destroy_process_group()
"""


def test_ranks_that_nothing_starts_are_refused(tmp_path: Path) -> None:
    """As Lightning asks for them, which takes a process with LOCAL_RANK for one of several."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, deepspeed\n"
        "os.environ.update(RANK='0', WORLD_SIZE='2')\n"
        "deepspeed.init_distributed()\n"
    )
    done = run(script)
    assert done.returncode == 1
    assert "start them by `infinity run torchrun --nproc-per-node 2 script.py`" in done.stderr


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_ranks_of_mpi_and_slurm_join(tmp_path: Path, launcher: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        common = {"MASTER_PORT": str(probe.getsockname()[1])}
    if launcher == "mpirun":
        common |= {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
        numbers = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    else:
        common |= {"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}
        numbers = ("SLURM_PROCID", "SLURM_LOCALID")
    (tmp_path / "script.py").write_text(JOINS)
    environments = [common | dict.fromkeys(numbers, str(rank)) for rank in range(2)]
    ended = forked.run(tmp_path, tmp_path / "script.py", environments=environments)
    first, second = map(answers, ended)
    assert (first[:3], second[:3]) == ([0, 0, 2], [1, 1, 2])
    assert first[3] == second[3] > 0


@pytest.mark.parametrize("way", ["direct", "in a shell script"])
def test_a_line_of_the_launcher_of_deepspeed_starts_ranks(tmp_path: Path, way: str) -> None:
    # One write a rank: its launcher runs ranks unbuffered, and `print` writes word by word.
    (tmp_path / "script.py").write_text(
        "import importlib.util, os, sys\n"
        "found = [os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')]\n"
        "is_ours = 'infinity' in importlib.util.find_spec('deepspeed').origin\n"
        "sys.stdout.write(' '.join([*found, *sys.argv[1:], str(is_ours)]) + '\\n')\n"
    )
    line = ["deepspeed", "--num_gpus", "2", "--master_port", "0", str(tmp_path / "script.py")]
    (tmp_path / "train.sh").write_text(" ".join([*line, '"$@"']))
    done = run(*(line if way == "direct" else ["sh", tmp_path / "train.sh"]), "--x")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "0 0 2 --local_rank=0 --x True",
        "1 1 2 --local_rank=1 --x True",
    ]


@pytest.mark.parametrize("way", ["torchrun", "-m torch.distributed.run"])
def test_torchrun_starts_ranks_again_after_a_failure(tmp_path: Path, way: str) -> None:
    """The package is there in each attempt."""
    (tmp_path / "script.py").write_text(
        "import importlib.util, os, sys\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    sys.exit(3)\n"
        "found = [os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')]\n"
        "is_ours = 'infinity' in importlib.util.find_spec('deepspeed').origin\n"
        "sys.stdout.write(' '.join([*found, str(is_ours)]) + '\\n')\n"
    )
    options = ["--nproc-per-node", 2, "--max-restarts", 1, "--master-port", 0]
    done = run(*way.split(), *options, tmp_path / "script.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 0 2 True", "1 1 2 True"]


NOTEBOOK = """
import sys

def work():
    import torch, deepspeed
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(8, 8), config={
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    })
    engine.backward(engine(torch.full((2, 8), engine.global_rank + 1.0)).square().mean())
    engine.step()
    found = [engine.global_rank, engine.world_size, engine.get_global_grad_norm()]
    sys.stdout.write(f"{found}\\n")
    engine.destroy()

if __name__ == "__main__":
    from accelerate import notebook_launcher

    notebook_launcher(work, (), num_processes=2, use_port=sys.argv[1])
"""


def test_ranks_of_a_notebook_join(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "script.py").write_text(NOTEBOOK)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = run(tmp_path / "script.py", port)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("[")]
    first, second = sorted(map(json.loads, said))
    assert (first[:2], second[:2]) == ([0, 2], [1, 2])
    assert first[2] == second[2] > 0


def test_a_command_runs_with_the_package_on_its_path(tmp_path: Path) -> None:
    command = tmp_path / "tool"
    command.write_text(
        f"#!{sys.executable}\nimport importlib.metadata, os, sys\n"
        "print(importlib.metadata.version('deepspeed'), os.environ['WORLD_SIZE'], sys.argv[1:])\n"
    )
    command.chmod(0o755)
    done = run("tool", "--x", env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"})
    assert done.stdout == "0.19.8 1 ['--x']\n", done.stderr


def test_the_command_says_which_of_two_packages_runs(tmp_path: Path) -> None:
    other = tmp_path / "site" / "deepspeed"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise RuntimeError('the other one')")
    (tmp_path / "script.py").write_text(
        "import importlib.util\nprint('infinity' in importlib.util.find_spec('deepspeed').origin)"
    )
    path = os.pathsep.join([str(other.parent), WITHOUT_RANKS["PYTHONPATH"]])
    done = run(tmp_path / "script.py", env={"PYTHONPATH": path})
    assert (done.stdout, done.stderr) == (
        "True\n",
        f"infinity: `import deepspeed` gives this engine here, not the DeepSpeed in {other}\n",
    )
    again = run(tmp_path / "script.py", env={"PYTHONPATH": path, "RANK": "1", "WORLD_SIZE": "2"})
    assert (again.stdout, again.stderr) == ("True\n", ""), "the first rank says it"


SCRIPT_OF_ACCELERATE = """
import json
import torch
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.utils.data.DataLoader(
    torch.randn(16, 8, generator=torch.Generator().manual_seed(1)), batch_size=4 // COUNT
)
plain = accelerator.state.deepspeed_plugin is None
if not plain:
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
losses = []
for batch in data:
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach().clone(), "mean").item())
if accelerator.is_main_process:
    print(json.dumps([type(model).__name__, losses]))
"""
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("module", marks=road("accelerate", "`Accelerator`", LAUNCHED, 3)),
        pytest.param(
            "around",
            marks=road(
                *("accelerate", "`Accelerator`", "`accelerate launch infinity run`", 2), ranks=2
            ),
        ),
    ],
)
def test_accelerate_launch_with_a_deepspeed_configuration(tmp_path: Path, way: str) -> None:
    """Inline keys and a file, one rank and two, inside of `infinity run` and around it, with the
    losses of one plain process. Without a GPU accelerate would count one rank, and with
    `ACCELERATE_USE_CPU` it would train with DDP."""
    pytest.importorskip("accelerate")
    ranks = 1 if way == "module" else 2
    (tmp_path / "script.py").write_text(SCRIPT_OF_ACCELERATE.replace("COUNT", str(ranks)))
    (tmp_path / "plain.py").write_text(SCRIPT_OF_ACCELERATE.replace("COUNT", "1"))
    (tmp_path / "infinity").write_text(
        f"#!{sys.executable}\nfrom infinity_command import main\nmain()\n"
    )
    (tmp_path / "infinity").chmod(0o755)
    # What Python does with this line where the wheel is installed.
    start = (ROOT / "infinity_command" / "infinity_run.pth").read_text()
    (tmp_path / "sitecustomize.py").write_text(start)
    options = ["--num_processes", ranks, "--num_machines", 1, "--mixed_precision", "no"]
    options += ["--dynamo_backend", "no", "--main_process_port", 0, "--use_deepspeed"]
    if way == "module":
        keys = {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_clipping": 0,
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        }
        (tmp_path / "ds.json").write_text(json.dumps(keys))
        options += ["--deepspeed_config_file", tmp_path / "ds.json"]
    else:
        options += ["--zero_stage", 2, "--gradient_clipping", 1e9]
    launch = {
        "module": [*COMMAND, "-m", "accelerate.commands.launch", *options],
        "around": [
            *(sys.executable, "-m", "accelerate.commands.launch", *options),
            *("--no_python", tmp_path / "infinity", "run"),
        ],
    }[way]
    paths = [str(tmp_path), WITHOUT_RANKS["PYTHONPATH"]]
    own = {"PYTHONPATH": os.pathsep.join(paths), "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [*map(str, launch), str(tmp_path / "script.py")],
        **{**CHILD, "env": WITHOUT_RANKS | own | {"OMP_NUM_THREADS": "1"}},
        capture_output=True,
        timeout=300,
        check=False,
    )
    (plain,) = forked.run(tmp_path, tmp_path / "plain.py")
    assert done.returncode == 0, done.stderr
    (found,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert found[0] == "DeepSpeedEngine"
    assert found[1] == pytest.approx(answers(plain)[1], rel=1e-5)
