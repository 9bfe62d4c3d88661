"""The scripts that accelerate installs to test itself, unmodified, launched by `accelerate launch`
with DeepSpeed's keys: they pass, and end with the weights of runs without the keys.

The models and the data are local and small. The scripts of one launch are forked after the imports
that all share, and each is told of a meeting point of its own.

Left out: `test_peak_memory_usage` and `test_zero3_integration` need CUDA, and the others in
`external_deps` divide one model by other means than ZeRO.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from support import hosted
from support.children import CHILD
from support.local_models import save_classifier, save_metric, sentence
from support.roads import LAUNCHED, PASSES, road

pytestmark = pytest.mark.timeout(300)

TASK = """---
configs:
- config_name: mrpc
  data_files:
  - {split: train, path: train.jsonl}
  - {split: validation, path: validation.jsonl}
---
"""
LAUNCH = [
    *(sys.executable, "-m", "infinity_command", "run", "accelerate", "launch"),
    *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
    *("--main_process_port", "0", "--use_deepspeed", "--zero_stage", "3"),
    *("--zero3_init_flag", "true", "--zero3_save_16bit_model", "true"),
    *("--gradient_accumulation_steps", "1", "--gradient_clipping", "1e9"),
]


def meeting(**environment: str) -> dict[str, str]:
    """The ranks of a script meet at a port of their own, not at the launcher's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {**own, "TORCHELASTIC_USE_AGENT_STORE": "False", **environment}


def stage(number: int) -> dict[str, str]:
    """As `--zero_stage` sets it."""
    return meeting(ACCELERATE_DEEPSPEED_ZERO_STAGE=str(number))


def write_task(directory: Path) -> None:
    """Write pairs of sentences where `load_dataset("nyu-mll/glue", "mrpc")` finds them."""
    folder = directory / "nyu-mll" / "glue"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(TASK)
    for split, numbers in {"train": range(64), "validation": range(64, 96)}.items():
        rows = [
            {
                "idx": number,
                "sentence1": sentence(number, 3 + number % 3),
                "sentence2": sentence(number + 1 + number**2 % 3, 4),
                "label": number**2 % 3,
            }
            for number in numbers
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def clone(top: Path, script: Path) -> Path:
    """A copy of the script where it finds its two configurations, as in accelerate's repository."""
    configurations = top / "clone/tests/deepspeed"
    configurations.mkdir(parents=True)
    for number in (2, 3):
        keys = {
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": number, "offload_optimizer": {"device": "cpu"}},
            "train_micro_batch_size_per_gpu": 1,
        }
        file = configurations / f"ds_config_zero{number}_model_only.json"
        file.write_text(json.dumps(keys))
    folder = top / "clone/src/accelerate/test_utils/scripts/external_deps"
    folder.mkdir(parents=True)
    return Path(shutil.copy(script, folder))


def two_ranks() -> list[dict[str, str]]:
    """What a launcher tells two processes, for DDP on the CPU."""
    common = meeting(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]


class Places(NamedTuple):
    """Where the installed scripts are, and where they run."""

    scripts: Path
    top: Path

    def job(
        self, name: str, script: str | Path, environments: list[dict[str, str]], *words: str
    ) -> hosted.Job:
        """The script, with the model and `words` as its arguments, in the folder `name`."""
        directory = self.top / name
        if not directory.exists():
            write_task(directory)
        command = [str(self.scripts / script)]
        if "external_deps" in command[0] and "metrics" not in command[0]:
            command += ["--model_name_or_path", str(self.top / "model")]
        return hosted.Job(str(directory), [*command, *words], environments)

    def plain(self) -> list[hosted.Job]:
        return [
            self.job("performance-plain", PERFORMANCE, [{}], *EPOCHS),
            self.job("checkpointing-plain", CHECKPOINTING, [{}], *EPOCHS),
            self.job("ranks-plain", PERFORMANCE, two_ranks(), *EPOCHS),
        ]

    def one_rank(self) -> list[hosted.Job]:
        found = [
            self.job(f"performance-zero{number}", PERFORMANCE, [stage(number)], *EPOCHS)
            for number in (1, 2, 3)
        ]
        for number in (2, 3):
            name = f"checkpointing-zero{number}"
            again = [*EPOCHS, "--resume_from_checkpoint", "epoch_0"]
            found.append(self.job(name, CHECKPOINTING, [stage(number)], *EPOCHS))
            found.append(self.job(name, CHECKPOINTING, [stage(number)], *again))
        several = clone(self.top, self.scripts / "external_deps/test_ds_multiple_model.py")
        own = meeting(ACCELERATE_USE_DEEPSPEED="false")
        found.append(self.job("several models", several, [own], "--num_epochs", "3"))
        found.append(self.job("metrics", "external_deps/test_metrics.py", [stage(3)]))
        return found

    def two_ranks(self) -> list[hosted.Job]:
        return [
            self.job("ranks-zero3", PERFORMANCE, [stage(3)], *EPOCHS),
            self.job("script", "test_script.py", [stage(2)]),
            self.job("operations", "test_ops.py", [stage(3)]),
        ]


PERFORMANCE = "external_deps/test_performance.py"
CHECKPOINTING = "external_deps/test_checkpointing.py"
EPOCHS = ["--num_epochs", "2"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all scripts have run, each in a folder."""
    package = importlib.util.find_spec("accelerate")
    if package is None or not package.submodule_search_locations:
        pytest.skip("needs accelerate")
    top = tmp_path_factory.mktemp("accelerate")
    places = Places(Path(package.submodule_search_locations[0]) / "test_utils/scripts", top)
    save_metric(top / "metric")
    save_classifier(top / "model")
    hosts = {
        "plain": ([sys.executable], places.plain()),
        "one rank": ([*LAUNCH, "--num_processes", "1"], places.one_rank()),
        "two ranks": ([*LAUNCH, "--num_processes", "2"], places.two_ranks()),
    }
    paths = os.pathsep.join([str(top / "metric"), CHILD["env"]["PYTHONPATH"]])
    imports = ["accelerate", "datasets", "transformers.models.bert.modeling_bert"]
    hosted.run(top, hosts, imports, {"PYTHONPATH": paths, "ACCELERATE_USE_CPU": "true"})
    return top


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        *(
            pytest.param(
                *(f"performance-zero{number}", "performance-plain"),
                marks=road("accelerate", "`test_performance`", LAUNCHED, number),
            )
            for number in (1, 2, 3)
        ),
        pytest.param(
            *("ranks-zero3", "ranks-plain"),
            marks=road("accelerate", "`test_performance`", LAUNCHED, 3, ranks=2),
        ),
    ],
)
def test_weights_and_accuracy_are_those_of_a_run_without_keys(
    ran: Path, name: str, plain: str
) -> None:
    hosted.said(ran / name)
    hosted.said(ran / plain)
    found, expected = (
        json.loads((ran / each / "all_results.json").read_text()) for each in (name, plain)
    )
    assert found == expected
    start = load_file(ran / "model/model.safetensors")
    weights, others = (load_file(ran / each / "model.safetensors") for each in (name, plain))
    assert weights.keys() == others.keys()
    assert any(not torch.equal(tensor, start[key]) for key, tensor in weights.items())
    for key, tensor in weights.items():
        torch.testing.assert_close(tensor, others[key], rtol=1e-6, atol=1e-7, msg=key)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(each, marks=road("accelerate", "`test_checkpointing`", LAUNCHED, each))
        for each in (2, 3)
    ],
)
def test_a_checkpoint_resumes_with_the_accuracy_and_rates_of_its_epoch(
    ran: Path, number: int
) -> None:
    """The script itself compares them."""
    text = hosted.said(ran / f"checkpointing-zero{number}")
    assert "resumed checkpoint performance:" in text
    for epoch in range(2):
        found, expected = (
            json.loads((ran / f"checkpointing-{kind}/state_{epoch}.json").read_text())
            for kind in (f"zero{number}", "plain")
        )
        assert found == expected
    written = ran / f"checkpointing-zero{number}/epoch_1/pytorch_model/infinity.json"
    assert written.exists(), "this engine wrote it"


@road(
    *("accelerate", "`test_ds_multiple_model`", LAUNCHED, "2 beside 3"),
    precision="bf16",
    result=PASSES,
)
def test_models_with_a_stage_each_learn_beside_each_other(ran: Path) -> None:
    """The script itself compares accuracies of epochs."""
    text = hosted.said(ran / "several models")
    assert text.count("epoch 2:") == 2


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        pytest.param(
            *("metrics", ["**Test that `drop_last` is taken into account**"]),
            marks=road("accelerate", "`test_metrics`", LAUNCHED, 3, result=PASSES),
        ),
        pytest.param(
            *("script", ["DistributedType.DEEPSPEED", "Shuffled central dataloader passing."]),
            marks=road("accelerate", "`test_script`", LAUNCHED, 2, ranks=2, result=PASSES),
        ),
        pytest.param(
            *(
                "operations",
                ["DistributedType.DEEPSPEED", "testing sending tensors across devices"],
            ),
            marks=road("accelerate", "`test_ops`", LAUNCHED, 3, ranks=2, result=PASSES),
        ),
    ],
)
def test_a_script_that_checks_itself_passes(ran: Path, name: str, texts: list[str]) -> None:
    found = hosted.said(ran / name)
    assert [text for text in texts if text not in found] == []
