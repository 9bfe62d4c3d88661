"""`infinity bench step`: what it counts, where its bytes come from, what it refuses, and what it
writes for others to read."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import infinity
from infinity.bench import machine
from infinity.bench.step import bare_compute, train
from infinity.bench.step.bare_compute import extrapolated
from infinity.bench.step.flops import Shape, count
from infinity.bench.step.measure import bounds, clipped, drift_problems, parts_updated
from infinity.cli.main import app
from infinity.config import Config, Tuning
from infinity.free_memory import Memory
from infinity.measure.rates import formats_of, updates
from infinity.plan.prediction import prediction
from infinity.report import Report
from support.configs import config_of
from support.discrete import DiscreteDevice
from support.probe import Probe

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 48,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
# Queries and output, keys and values, the MLP, two norms.
BLOCK = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
PARAMETERS = 3 * BLOCK + 2 * 48 * 32 + 32


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


def run(*arguments: object) -> Any:
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, ["bench", "step", *map(str, arguments)])


SMALL = (
    "--sequence-length",
    16,
    "--batch-size",
    2,
    "--probe-bytes",
    "1MiB",
    "--steps",
    3,
    "--device",
    "cpu",
)
IN_MEMORY = ("--parameters", "cpu", "--optimizer", "cpu")


def test_operations_are_those_counted_by_hand() -> None:
    """2 blocks of width 8, 1000 parameters of which 600 in blocks, 2 windows of 16 tokens."""
    shape = Shape(multiplied=1000, in_blocks=600, layers=2, width=8)
    # Layers x tokens x (scores and sums), half of it masked.
    forward = 2 * 1000 * 32 + 2 * 32 * (2 * 16 * 8 + 2 * 16 * 8) / 2
    assert count(shape, 32, 16, recomputes=False) == (3 * forward, 3 * forward)
    again = 2 * 600 * 32 + 2 * 32 * (2 * 16 * 8 + 2 * 16 * 8) / 2
    assert count(shape, 32, 16, recomputes=True) == (3 * forward, 3 * forward + again)


@pytest.mark.parametrize("tied", [False, True])
def test_the_shape_leaves_out_what_is_only_looked_up(tied: bool, model: Path) -> None:
    model.write_text(json.dumps(TINY | {"tie_word_embeddings": tied}))
    source = train.find_source(str(model), "bf16")
    with infinity.init():
        built = source.build()
    assert train.shape_of(built, source.config) == Shape(3 * BLOCK + 48 * 32 + 32, 3 * BLOCK, 3, 32)


def test_what_a_step_needs_follows_from_bytes_and_rates() -> None:
    nbytes = {"nvme_read": 60, "nvme_write": 40, "host_to_device": 30, "device_to_host": 8}
    rates = {
        "nvme_read": 10.0,
        "nvme_write": 20.0,
        "nvme_both": 25.0,
        "host_to_device": 5.0,
        "device_to_host": 4.0,
        "adam": 50.0,
    }
    takes = {"compute": 7.0, "nvme": 6.0, "host_to_device": 6.0, "device_to_host": 2.0, "adam": 4.0}
    assert bounds(7.0, nbytes, {"adam": 200}, rates) == takes
    assert bounds(7.0, nbytes, {"adam": 200}, rates | {"nvme_both": 10.0})["nvme"] == 10.0
    links = {name: rates[name] for name in ("host_to_device", "device_to_host", "adam")}
    assert "nvme" not in bounds(7.0, nbytes, {"adam": 200}, links)


def report_of(updated: int = 0, on_gpu: int = 0, **given: Any) -> Report:
    nothing: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(Report)}
    states = {"parameters": 100, "updated": updated, "updated_on_gpu": on_gpu}
    return Report(**nothing | states | given)


def test_a_clipped_update_hides_behind_the_next_forward_alone() -> None:
    rates = {"nvme_read": 10.0, "nvme_write": 20.0, "nvme_both": 25.0}
    moved = report_of(read_by_updates=20, written_by_updates=60)  # 2.0, 3.0 and 3.2 s

    def seconds(hiding: float, takes: dict[str, float]) -> float:
        return clipped(7.0, hiding, moved, takes, rates)

    assert seconds(2.0, {"nvme": 9.0}) == 5.0 + 3.2
    assert seconds(4.0, {"nvme": 9.0}) == 7.0
    assert seconds(2.0, {"nvme": 9.0, "adam": 3.5, "adam_on_gpu": 0.1}) == 5.0 + 3.5
    assert clipped(7.0, 2.0, moved, {"adam": 1.0}, {}) == 7.0


@pytest.mark.parametrize(
    ("options", "has"), [(("exact", "global"), True), (("speculative", "unit"), False)]
)
def test_the_bound_of_clipped_steps_is_named(
    options: tuple[str, str], has: bool, tmp_path: Path, model: Path
) -> None:
    update, clip = options
    asked = ("--model", model, *SMALL, "--nvme", tmp_path, "--cache", 0, "--update", update)
    result = run(*asked, "--clip", clip, "--json", tmp_path / "r.json")
    facts = json.loads((tmp_path / "r.json").read_text())
    roofline, compute = facts["roofline"], facts["compute"]
    assert ("clipped" in roofline["seconds"]) is has
    assert ("No update began in backward" in result.stdout) is has
    assert "…" not in result.stdout  # it fits on a terminal
    passes = compute["forward_seconds"], compute["backward_seconds"]
    assert sum(passes) == pytest.approx(compute["seconds"])
    if has:
        update_alone = roofline["seconds"]["clipped"] - compute["backward_seconds"]
        assert update_alone >= max(compute["forward_seconds"], roofline["seconds"]["adam"])


def test_the_engine_rests_while_compute_is_measured_amid_the_steps(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the steps, after a half of them, and after all; the step that follows is not timed."""
    drains: list[infinity.Engine] = []
    at: list[int] = []
    original, measure = infinity.Engine.drain, bare_compute.BareCompute.measure

    def drain(engine: infinity.Engine) -> None:
        drains.append(engine)
        original(engine)

    def note(alone: bare_compute.BareCompute, dtype: torch.dtype, rounds: int) -> None:
        at.append(len(drains))
        measure(alone, dtype, rounds)

    monkeypatch.setattr(infinity.Engine, "drain", drain)
    monkeypatch.setattr(bare_compute.BareCompute, "measure", note)
    asked = ("--model", model, *SMALL, *IN_MEMORY, "--discard", 1, "--json", "-")
    facts = json.loads(run(*asked, "--steps", 5).stdout)
    assert (facts["steps_count"], facts["discarded_steps_count"]) == (5, 2)
    assert at == [1, 2, 2]
    at.clear(), drains.clear()
    monkeypatch.setattr(bare_compute.BareCompute, "fits", lambda *_: False)
    facts = json.loads(run(*asked, "--steps", 5).stdout)
    assert at == [2]
    at.clear(), drains.clear()
    facts = json.loads(run(*asked, "--steps", 5, "--most-seconds", 0).stdout)
    assert (facts["steps_count"], at) == (1, [1])


def test_compute_fits_beside_the_engine_where_so_much_is_free(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = train.find_source(str(model), "bf16")
    device = DiscreteDevice("cpu")
    alone = bare_compute.BareCompute(source, {}, device, recomputes=False)
    parameters = 3 * BLOCK + 2 * (2 * 48 * 32 + 32)  # of the models of one and of two blocks
    for free, fits in ((6 * parameters, True), (6 * parameters - 1, False)):
        found = Memory(1 << 40, free, "the GPU")
        monkeypatch.setattr(DiscreteDevice, "memory", lambda *_, found=found: found)
        assert alone.fits(torch.bfloat16) is fits
    device.close()


def test_a_busy_machine_is_warned_of(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpus = os.cpu_count() or 1
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (machine.BUSY * cpus, 9.0, 9.0))
    assert machine.load_problem() is None
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (3.0 * cpus, 0.0, 0.0))
    said = machine.load_problem()
    assert said is not None and f"The load average was {3.0 * cpus:.1f} on {cpus} CPUs" in said
    result = run("--model", model, *SMALL, *IN_MEMORY, "--json", tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["warnings"][0] == said
    assert " ".join(f"Warning: {said}".split()) in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("highest", "ratio", "words"),
    [
        (1.2, 1.0, []),
        (1.3, 1.0, ["took from 1 to 1.3 s"]),
        (1.3, 0.84, ["took from 1 to 1.3 s", "0.84 of its bound"]),
    ],
)
def test_a_machine_that_changes_its_speed_is_warned_of(
    highest: float, ratio: float, words: list[str]
) -> None:
    found = {
        "compute": {"each_time_seconds": {"lowest": 1.0, "highest": highest}},
        "roofline": {"step_over_bound_ratio": {"median": ratio}},
    }
    problems = drift_problems(found)
    assert len(problems) == len(words)
    assert all(word in problem for word, problem in zip(words, problems, strict=True))


def test_an_update_is_bound_by_the_kernels_that_do_it() -> None:
    """The CPU's, those of the device, or both at once, each with its part."""
    nbytes = dict.fromkeys(("host_to_device", "device_to_host"), 0)
    rates = {"host_to_device": 1.0, "device_to_host": 1.0, "adam": 10.0, "adam_on_gpu": 100.0}

    def times(updated: int, on_gpu: int) -> dict[str, float]:
        return {
            k: v
            for k, v in bounds(
                0.0, nbytes, parts_updated(report_of(updated, on_gpu)), rates
            ).items()
            if "adam" in k
        }

    assert times(800, 0) == {"adam": 10.0}
    assert times(800, 800) == {"adam_on_gpu": 1.0}
    assert times(800, 200) == {"adam": 7.5, "adam_on_gpu": 0.25}


@pytest.mark.parametrize(
    ("tier", "kept", "on_gpu"),
    [("gpu", "0", 1), ("cpu", "auto", 1), ("cpu", "0", 0), ("cpu", "200KiB", 0.5)],
)
def test_the_report_says_where_states_are_updated(
    tier: str,
    kept: str,
    on_gpu: float,
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device with kernels and memory of its own, which `discrete` plays."""
    for name in ("infinity.build", "infinity.bench.step.measure"):
        monkeypatch.setitem(vars(sys.modules[name]), "ComputeDevice", DiscreteDevice)
    kinds = ("--gradients", tier, "--optimizer", tier, "--parameters", "gpu", "--gpu-cache", kept)
    result = run(
        "--model",
        model,
        *SMALL,
        "--gpu-memory",
        "32MiB",
        *kinds,
        "--nvme",
        tmp_path,
        "--json",
        tmp_path / "r.json",
    )
    assert result.exit_code == 0, result.output
    facts = json.loads((tmp_path / "r.json").read_text())
    states = facts["bytes_per_step"]
    share = states["optimizer_states_updated_on_gpu"] / states["optimizer_states_updated"]
    assert share == on_gpu or 0 < share < 1 == 2 * on_gpu
    by_cpu, by_device = on_gpu < 1, on_gpu > 0
    assert (facts["adam"] is not None, facts["adam_on_gpu"] is not None) == (by_cpu, by_device)
    assert (
        "adam" in facts["roofline"]["seconds"],
        "adam_on_gpu" in facts["roofline"]["seconds"],
    ) == (by_cpu, by_device)
    assert ("Adam on the GPU" in result.stdout) is bool(on_gpu)


def found_by(**changes: Any) -> dict[str, Any]:
    """A summary by which a block takes 2 s, the rest of the model 3 s, and all else hardly any."""

    def median(value: float) -> dict[str, float]:
        return {"median": value, "lowest": value, "highest": 2 * value}

    ways = ("host_to_device", "device_to_host", "nvme_read", "nvme_write", "nvme_both")
    return {
        "link_gb_per_second": {way: median(1e3) for way in ways},
        "adam": {"gb_per_second": median(1e3)},
        "adam_on_gpu": None,
        "matmul_tflop_per_second": median(1.0),
        "compute": {"one_block_seconds": median(5.0), "two_blocks_seconds": median(7.0)},
        "step_seconds": median(27.0),
    } | changes


def work_of(model: Path, config: Config, vertical: bool = False) -> train.Workload:
    source = train.find_source(str(model), "bf16")
    return train.Workload(source, config, 16, 2, 2, vertical, True, 3, 1, 1e9, 1e-4, 0)


def test_the_plan_of_a_measured_step_has_the_rates_of_that_run(model: Path, tmp_path: Path) -> None:
    """Two forward passes of three blocks and the rest: 2 x (3 x 2 + 3) s."""
    config = config_of(nvme=tmp_path, precision="bf16")
    found = prediction(work_of(model, config), found_by())
    assert found is not None
    assert found["seconds"] == pytest.approx(18.0, rel=0.01)
    assert found["busy_seconds"]["compute"] == pytest.approx(18.0, rel=1e-6)
    assert found["tokens_per_second"] == pytest.approx(64 / found["seconds"])
    ratio = found["step_over_plan_ratio"]
    assert ratio["median"] == pytest.approx(27 / found["seconds"])
    assert ratio["highest"] == 2 * ratio["median"]


def test_a_slow_drive_is_in_the_plan(model: Path, tmp_path: Path) -> None:
    config = config_of(nvme=tmp_path, precision="bf16", cache=0)
    links = found_by()["link_gb_per_second"]
    slow = {name: links["host_to_device"] | {"median": 1e-6} for name in links if "nvme" in name}
    found = prediction(work_of(model, config), found_by(link_gb_per_second=links | slow))
    assert found is not None
    moved = found["busy_seconds"]["nvme read"]
    assert found["seconds"] >= moved > PARAMETERS * (2 + 8) / 1e3  # masters and moments at least


def test_what_the_plan_does_not_simulate_has_none(model: Path, tmp_path: Path) -> None:
    config = config_of(nvme=tmp_path, precision="bf16")
    assert prediction(work_of(model, config, vertical=True), found_by()) is None


def test_depth_is_extrapolated_from_rounds_of_one_and_two_blocks() -> None:
    assert extrapolated([5.0, 6.0, 50.0], [7.0, 8.0, 51.0], 11) == 6.0 + 10 * 2.0
    assert extrapolated([5.0], [4.0], 11) == 5.0  # a second block cannot give time back
    assert extrapolated([5.0], [7.0], 1) == 5.0


@pytest.mark.parametrize(
    ("options", "dtype", "expected"),
    [
        ({}, torch.bfloat16, ("bf16", "bf16", "split", "fp32")),
        (
            {"split_master": False, "moment_precision": "int8"},
            torch.bfloat16,
            ("bf16", "bf16", "fp32", "int8"),
        ),
        ({"gradient_precision": "fp32"}, torch.float16, ("fp32", "fp16", "fp32", "fp32")),
        ({}, torch.float32, ("fp32", "fp32", "none", "fp32")),
    ],
)
def test_the_kernels_are_measured_in_the_formats_of_the_states(
    options: Any, dtype: torch.dtype, expected: Any
) -> None:
    config = config_of(nvme="/", gpu_memory=1, cpu_memory=1, **options)
    found = formats_of(config, dtype)
    assert (found.grad, found.param, found.master, found.moments) == expected
    assert all(rate > 0 for rate in updates(found, 1 << 16, 1, rounds=2))


def test_the_command_prints_tables_and_writes_json_and_a_page(tmp_path: Path, model: Path) -> None:
    result = run(
        "--model",
        model,
        *SMALL,
        "--nvme",
        tmp_path,
        "--cache",
        0,
        "--accumulate",
        2,
        "--json",
        tmp_path / "r.json",
        "--report",
        tmp_path / "r.html",
        "--timeline",
        tmp_path / "r.trace",
    )
    assert result.exit_code == 0, result.output
    events = json.loads((tmp_path / "r.trace").read_text())["traceEvents"]
    assert {"compute", "adam", "wait nvme"} <= {event.get("cat") for event in events}
    assert "…" not in result.stdout  # it fits on a terminal
    facts = json.loads((tmp_path / "r.json").read_text())
    assert (facts["parameters_count"], facts["tokens_per_step_count"], facts["steps_count"]) == (
        PARAMETERS,
        64,
        3,
    )
    assert len(facts["losses"]) == 3 + facts["discarded_steps_count"]
    assert facts["loss_falls"] and facts["gpu_direct"] is False
    operations = count(Shape(3 * BLOCK + 48 * 32 + 32, 3 * BLOCK, 3, 32), 64, 16, recomputes=True)
    assert facts["flops"]["model_per_step_count"] == operations.model
    assert facts["flops"]["hardware_per_step_count"] == operations.hardware
    per_second = facts["model_tflop_per_second"]["median"] * 1e12
    assert per_second * facts["step_seconds"]["median"] == pytest.approx(operations.model)
    roofline = facts["roofline"]
    assert set(roofline["seconds"]) - {"clipped"} == {
        "compute",
        "nvme",
        "host_to_device",
        "device_to_host",
        "adam",
    }
    assert (
        roofline["bound_seconds"]
        == max(roofline["seconds"].values())
        == roofline["seconds"][roofline["bound"]]
    )
    ratio = facts["step_seconds"]["median"] / roofline["bound_seconds"]
    assert roofline["step_over_bound_ratio"]["median"] == pytest.approx(ratio)
    assert roofline["seconds"]["compute"] == facts["compute"]["seconds"]
    plan, ratio = facts["plan"], facts["plan"]["step_over_plan_ratio"]["median"]
    assert plan["seconds"] * ratio == pytest.approx(facts["step_seconds"]["median"])
    assert f"a step takes {plan['seconds']:.3g} s" in " ".join(result.stdout.split())
    assert set(facts["stall_seconds"]) == {"wait nvme", "wait adam", "wait collective"}
    for tier in ("gpu", "cpu"):
        assert 0 < facts["tiers"][tier]["peak_bytes"] <= facts["tiers"][tier]["budget_bytes"]
    page = (tmp_path / "r.html").read_text()
    HTMLParser().feed(page)
    assert page.count("<svg") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "r.html",
        "r.json",
        "r.trace",
    ]


def test_bytes_are_those_that_the_engine_counted(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[Report] = []
    original = infinity.Engine.report

    def kept(engine: infinity.Engine) -> Report:
        reports.append(original(engine))
        return reports[-1]

    monkeypatch.setattr(infinity.Engine, "report", kept)
    result = run(
        "--model",
        model,
        *SMALL,
        "--nvme",
        tmp_path,
        "--cache",
        0,
        "--update",
        "exact",
        "--json",
        "-",
    )
    facts, (report,) = json.loads(result.stdout), reports
    moved = facts["bytes_per_step"]
    assert moved["nvme_read"] == round(report.read_per_parameter * PARAMETERS) > 10 * PARAMETERS
    assert moved["nvme_write"] == round(report.written_per_parameter * PARAMETERS) > 10 * PARAMETERS
    assert moved["nvme_write"] == facts["planned_bytes_per_step"]["nvme_write"]
    assert moved["host_to_device"] == report.copied_to_device
    assert moved["device_to_host"] == report.copied_from_device
    assert moved["optimizer_states_updated"] == report.updated


def test_the_report_says_what_was_copied_in_the_last_step_and_what_is_updated(
    tmp_path: Path, model: Path
) -> None:
    source = train.find_source(str(model), "bf16")
    with infinity.init():
        built = source.build()
    config = Config(
        gpu_memory="1MiB",
        cpu_memory="8MiB",
        parameters="cpu",
        optimizer="cpu",
        precision="bf16",
        tuning=Tuning(device="cpu"),
    )
    wrapped = infinity.wrap(built, config)
    ids = torch.zeros(1, 8, dtype=torch.long)
    with infinity.engine(wrapped) as engine:
        optimizer = infinity.AdamW(wrapped.parameters())
        meter, copied = Probe(engine).device.copied, []
        for _ in range(3):
            wrapped(input_ids=ids, labels=ids).loss.backward()
            copied.append((meter.written, meter.read))
            optimizer.step()
            optimizer.zero_grad()
        report = engine.report()
        last = tuple(now - before for now, before in zip(copied[-1], copied[-2], strict=True))
        updated = sum(
            b.nbytes
            for unit in engine.units
            for kind, b in unit.blocks.items()
            if kind.value not in ("param", "grad")
        )
    assert (report.copied_to_device, report.copied_from_device) == last
    assert report.copied_to_device > 0
    assert report.updated == updated >= 10 * PARAMETERS


def test_random_weights_fill_every_parameter_and_differ_by_seed(model: Path) -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        with infinity.init(exact=False):
            built = train.find_source(str(model), "bf16").build()
            train.fill_randomly(built, seed, 0.02)
        config = Config(
            gpu_memory="8MiB",
            cpu_memory="8MiB",
            parameters="cpu",
            optimizer="cpu",
            precision="bf16",
            tuning=Tuning(device="cpu"),
        )
        wrapped = infinity.wrap(built, config)
        with infinity.engine(wrapped) as engine:
            return engine.state_dict()

    first, again, other = weights(0), weights(0), weights(1)
    for name, value in first.items():
        assert torch.equal(value, again[name])
        if value.ndim > 1:
            assert 0.01 < value.float().std() < 0.04
            assert not torch.equal(value, other[name])
        else:
            assert bool((value == 1).all())


def test_a_directory_with_weights_and_a_preset_are_what_finetune_takes(tmp_path: Path) -> None:
    assert train.find_source("llama-tiny", "bf16").directory is None
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert train.find_source(str(tmp_path), "bf16").directory is None
    (tmp_path / "model.safetensors").touch()
    assert train.find_source(str(tmp_path), "bf16").directory == tmp_path


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "parameters and optimizer on nvme, but no directory is given: add --nvme DIR"),
        (
            (*IN_MEMORY, "--model", "lama-tiny"),
            "unknown model 'lama-tiny'; did you mean 'llama-tiny'?",
        ),
        (
            (*IN_MEMORY, "--sequence-length", 4096),
            "a sequence length of 4096 is more than the 2048 positions of llama-tiny",
        ),
        ((*IN_MEMORY, "--json", "/nowhere/r.json"), "--json /nowhere/r.json cannot be written"),
        (
            (*IN_MEMORY, "--probe-bytes", "1MiB", "--device", "cpu", "--cpu-memory", "1MiB"),
            "the smallest --cpu-memory that works is",
        ),
        ((*IN_MEMORY, "--device", "cuda"), "torch sees no CUDA device"),
        (("--nvme", "/no/where"), "nvme directory /no/where does not exist; create it on the dri"),
        (("--nvme", "/dev/null"), "nvme directory /dev/null is not a directory; create it on the"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_sentence(arguments: Any, sentence: str) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    result = run(*arguments)
    assert result.exit_code == 1
    assert sentence in result.stderr
    assert result.stderr.splitlines()[-1].startswith("infinity: ")


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    for content, text in (
        ('{"model_type": "nothing"}', "x.json does not describe a model that can be built: "),
        (
            '{"hidden_size": 8}',
            "x.json is not the configuration of a transformers model: it has no model_type",
        ),
        ("{", "x.json: not JSON (character 2: "),
    ):
        (tmp_path / "x.json").write_text(content)
        result = run(*IN_MEMORY, "--model", tmp_path / "x.json")
        assert result.exit_code == 1
        assert text in result.stderr
