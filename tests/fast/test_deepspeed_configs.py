"""Configurations of DeepSpeed: every key is honored, mapped, ignored with a notice, or refused."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from infinity.cli.main import app
from infinity.config import Config
from infinity.deepspeed.keys import FREE, KEYS, OPTIMIZERS, SCHEDULERS, Key, Treatment, params_of
from infinity.deepspeed.rows import BATCH
from infinity.deepspeed.settings import Batches, Explained, LossScale, Named, Settings, explain
from infinity.errors import ConfigError
from support.deepspeed_configs import AUTO, NVME, PLAIN


def leaves(config: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """The paths of the rows of `config`."""
    for name, value in config.items():
        here = f"{path}.{name}" if path else name
        if here in FREE and isinstance(value, dict):
            yield from (f"{here}.{inner}" for inner in value)
        elif isinstance(value, dict):
            yield from leaves(value, here)
        else:
            yield here


def small(**more: Any) -> dict[str, Any]:
    return {"train_batch_size": 8, **more}


def refusal(source: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as found:
        Settings.read(source, **options)
    return str(found.value)


# Examples of users


@pytest.mark.parametrize("name", PLAIN)
def test_a_configuration_parses_and_every_key_has_a_row(name: str) -> None:
    config = PLAIN[name]
    settings = Settings.read(config)
    assert settings.raw == config
    if name != "old names":
        assert [row.path for row in settings.rows] == list(leaves(config))
    assert all(row.becomes or row.reason for row in settings.rows)


@pytest.mark.parametrize("name", AUTO)
def test_one_for_a_trainer_is_explained_and_not_run(name: str) -> None:
    config = AUTO[name]
    explained = explain(config)
    assert explained.problems == ()
    assert explained.settings is not None
    assert [row.path for row in explained.rows] == list(leaves(config))
    assert "optimizer.params.lr" in refusal(config)
    assert 'replaces "auto"; write a value' in refusal(config)


def test_an_example_of_each_treatment() -> None:
    settings = Settings.read(PLAIN["nvme"])
    assert settings.config == Config(
        nvme=[NVME],
        stage=3,
        parameters="nvme",
        optimizer="nvme",
        gradients="cpu",
        precision="bf16",
        tuning={"cache": 2 * 10**9},
    )
    treatments = {row.path: row.treatment.value for row in settings.rows}
    assert treatments["zero_optimization.stage"] == "exact"
    assert treatments["zero_optimization.offload_param.max_in_cpu"] == "mapped"
    assert treatments["zero_optimization.offload_param.buffer_size"] == "ignored"
    assert any("offload_param.buffer_size" in notice for notice in settings.notices)


# Batch sizes


@pytest.mark.parametrize(
    ("given", "ranks", "batches"),
    [
        ((32, 4, 2), 4, (32, 4, 2)),
        ((32, 4, None), 4, (32, 4, 2)),
        ((32, None, 2), 4, (32, 4, 2)),
        ((None, 4, 2), 4, (32, 4, 2)),
        ((32, None, None), 4, (32, 8, 1)),
        ((None, 4, None), 4, (16, 4, 1)),
        (("auto", 4, 2), 1, (8, 4, 2)),
        ((32, "auto", "auto"), 2, (32, 16, 1)),
        ((4e1, None, None), 2, (40, 20, 1)),
    ],
)
def test_batch_sizes_follow_from_each_other(
    given: tuple[Any, ...], ranks: int, batches: tuple[int, ...]
) -> None:
    assert Settings.read(batch_of(*given), ranks=ranks).batches == Batches(*batches)


def batch_of(train: Any, micro: Any, accumulation: Any) -> dict[str, Any]:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    values = zip(names, (train, micro, accumulation), strict=True)
    return {name: value for name, value in values if value is not None}


@pytest.mark.parametrize(
    ("given", "equation"),
    [
        ((33, 4, 2), "train_batch_size=33 is not train_micro_batch_size_per_gpu=4 * gradient_acc"),
        ((33, 4, None), "gradient_accumulation_steps=2 * 4 ranks = 32; change one"),
        ((2, None, None), "train_micro_batch_size_per_gpu=0"),
        ((None, None, 2), "give train_batch_size, train_micro_batch_size_per_gpu, or both"),
        (("auto", "auto", "auto"), "give train_batch_size"),
        ((0, None, None), "train_batch_size=0: it must be a whole number of at least 1"),
        ((1.5, None, None), "train_batch_size=1.5: it must be a whole number"),
    ],
)
def test_batch_sizes_that_do_not_fit_are_refused_with_the_equation(
    given: tuple[Any, ...], equation: str
) -> None:
    assert equation in refusal(batch_of(*given), ranks=4)


# Single keys


@pytest.mark.parametrize(
    ("more", "field", "value"),
    [
        ({}, "precision", "fp32"),
        ({}, "gradient_clipping", 1.0),
        ({}, "optimizer", None),
        ({}, "autocast", None),
        ({}, "loss_scale", None),
        ({"gradient_clipping": 0}, "gradient_clipping", 0.0),
        ({"managed_gradient_accumulation": False}, "managed_accumulation", False),
        ({"gradient_allreduce_op": "SUM"}, "average", "sum"),
        ({"dataloader_drop_last": True}, "drop_last", True),
        ({"checkpoint": {"tag_validation": "FAIL"}}, "tag_validation", "fail"),
        ({"zero_optimization": {"ignore_unused_parameters": False}}, "refuse_unused", True),
        ({"bf16": {"enabled": True}}, "skip_nonfinite", True),
        ({"bf16": {"enabled": 1, "check_grad_overflow": False}}, "skip_nonfinite", False),
        ({"fp16": {"enabled": True, "auto_cast": True}}, "cast_inputs", True),
        ({"torch_autocast": {"enabled": True, "dtype": "fp16"}}, "autocast", torch.float16),
        (
            {"fp16": {"enabled": True, "loss_scale": 100}},
            "loss_scale",
            LossScale(100.0, 65536.0, 1000, 2, 1.0),
        ),
        (
            {"zero_optimization": {"leaf_module": {"classes": ["A"], "names": "b"}}},
            "leaf_modules",
            {"classes": ("A",), "names": ("b",), "name_suffixes": ()},
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.5, 0.9]}}},
            "optimizer",
            Named("Adam", {"lr": 1e-3, "betas": (0.5, 0.9)}),
        ),
        (
            {"optimizer": {"type": "RMSprop", "params": {"alpha": 0.9}}},
            "optimizer",
            Named("RMSprop", {"alpha": 0.9}),
        ),
    ],
)
def test_a_key_becomes_a_setting(more: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(Settings.read(small(**more)), field) == value


NARROW = {"type": "Adam", "params": {"fp32_optimizer_states": False}}


@pytest.mark.parametrize(
    ("more", "fields"),
    [
        ({}, {"stage": 0, "parameters": "gpu", "gradients": "gpu", "optimizer": "gpu"}),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
            {"stage": 1, "parameters": "gpu", "gradients": "gpu", "optimizer": "cpu"},
        ),
        (
            {"zero_optimization": {"stage": 1}, "infinity": {"gradients": "cpu"}},
            {"stage": 1, "parameters": "gpu", "gradients": "cpu", "optimizer": "gpu"},
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            {"stage": 2, "parameters": "gpu", "gradients": "cpu", "optimizer": "cpu"},
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_param": {"device": "nvme", "nvme_path": ["/a", "/b"]},
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/b"},
                }
            },
            {"nvme": (Path("/a"), Path("/b")), "parameters": "nvme", "optimizer": "nvme"},
        ),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, {"moment_precision": "bf16"}),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, {"activations": "cpu"}),
        ({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, {"algorithm": "momentum"}),
        ({"optimizer": {"type": "SGD"}}, {"algorithm": "sgd"}),
        ({"optimizer": {"type": "lion"}}, {"algorithm": "lion"}),
        ({"optimizer": {"type": "RMSprop"}}, {"algorithm": "other"}),
        ({"optimizer": NARROW}, {"moment_precision": "fp32"}),
        ({"optimizer": NARROW, "bf16": {"enabled": True}}, {"moment_precision": "bf16"}),
        ({"optimizer": NARROW, "fp16": {"enabled": True}}, {"moment_precision": "fp32"}),
        (
            {"infinity": {"gpu_memory": "20GiB", "cpu_memory": "80%"}},
            {"gpu_memory": 20 << 30, "cpu_memory": "80%"},
        ),
    ],
)
def test_a_key_becomes_a_field_of_config(more: dict[str, Any], fields: dict[str, Any]) -> None:
    config = Settings.read(small(**more)).config
    assert {name: getattr(config, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("more", "tuning"),
    [
        ({"zero_optimization": {"enable_sanity_checks": True}}, {"poison": True}),
        ({"aio": {"use_gds": False}}, {"gpu_direct": "off"}),
        (
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
            {"gradient_precision": "fp32"},
        ),
        ({"infinity": {"tuning": {"update": "exact"}}}, {"update": "exact"}),
    ],
)
def test_a_key_becomes_a_field_of_tuning(more: dict[str, Any], tuning: dict[str, Any]) -> None:
    found = Settings.read(small(**more)).config.tuning
    assert {name: getattr(found, name) for name in tuning} == tuning


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"zero_optimisation": {}}, "unknown key; did you mean zero_optimization?"),
        ({"zero_optimization": {"stge": 3}}, "did you mean zero_optimization.stage?"),
        ({"aio": {"queue_dept": 3}}, "did you mean aio.queue_depth?"),
        ({"queue_depth": 3}, "did you mean aio.queue_depth?"),
        ({"optimizer": {"type": "AdamW", "params": {"beta": 1}}}, "optimizer.params.betas?"),
        ({"qqq": 3}, "qqq=3: unknown key"),
        (
            {"optimizer": {"type": "NAdam", "params": {"max_grad_norm": 1.0}}},
            "optimizer.params.max_grad_norm=1.0: gradient_clipping is the key for it",
        ),
        (
            {"optimizer": {"type": "NAdam", "params": {"freeze_step": 9}}},
            "optimizer.params.freeze_step=9: unknown key; known are lr, betas, eps",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"cuda_aware": True}}},
            "optimizer.params.cuda_aware=True: unknown key; known are lr, weight_decay",
        ),
        (
            {"optimizer": {"type": "Lion", "params": {"torch_adam": True}}},
            "optimizer.params.torch_adam=True: unknown key; known are lr, weight_decay",
        ),
        (
            {
                "optimizer": {"type": "Adam"},
                "scheduler": {"type": "StepLR", "params": {"step": 3}},
            },
            "did you mean scheduler.params.step_size?",
        ),
        ({"zero_optimization": {"stage": 4}}, "it must be a whole number from 0 to 3"),
        ({"zero_optimization": 3}, "zero_optimization=3: it must be an object with keys, not 3"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            'zero_optimization.offload_param.device is "nvme", but',
        ),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "changes the numbers"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zenflow.topk_ratio=0.1: upd"),
        ({"zero_optimization": {"zenflow": {}}}, "zero_optimization.zenflow={}: updates that lea"),
        *(
            (
                {"fp16": {"enabled": True, "loss_scale": value}},
                f"fp16.loss_scale={value}: it must be 0, which is a dynamic scale, or a number "
                "from 1.17549e-38 to 1.70141e+38",
            )
            for value in (math.inf, math.nan, -1, True, 1e39, 1e-50)
        ),
        ({"fp16": {"enabled": True, "min_loss_scale": math.inf}}, "min_loss_scale=inf: it must be"),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "min_loss_scale=0 must be a power of"),
        (
            {"fp16": {"enabled": True, "min_loss_scale": 16, "initial_scale_power": 3}},
            "at most 2**fp16.initial_scale_power, 8",
        ),
        ({"pipeline": {"stages": 2}}, "pipeline.stages=2: there is no pipeline parallelism"),
        ({"tensor_parallel": {"autotp_size": 2}}, "apply parallelize_module of torch before"),
        ({"compile": {"deepcompile": True}}, "call torch.compile on blocks of the model"),
        ({"elasticity": {"enabled": True}}, "elasticity.enabled=True: the number of ranks"),
        ({"optimizer": {"type": "OneBitAdam"}}, "approximations of its own; use AdamW"),
        ({"optimizer": {"type": "Adm"}}, "there is none of that name; known are adam, adamw"),
        ({"optimizer": {"params": {"lr": 1}}}, "optimizer has no type"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-3"}}}, "lr='1e-3': it must be a num"),
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}, "gradient_clipping"),
        ({"scheduler": {"type": "Warmup"}}, "scheduler.type='Warmup': there is none of that name"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "are both true; choose one"),
        (
            {"fp16": {"enabled": True}, "torch_autocast": {"enabled": True}},
            "is not that of fp16.enab",
        ),
        (
            {"bf16": {"enabled": True}, "communication_data_type": "fp16"},
            "communication_data_type='fp16': gradients are accumulated and reduced",
        ),
        ({"gradient_clipping": "auto"}, "gradient_clipping: a Trainer or accelerate replaces"),
        ({"infinity": {"gpu_memry": 1}}, "did you mean infinity.gpu_memory?"),
        ({"infinity": {"gpu_memory": "much"}}, "gpu_memory: 'much' is not a number of bytes"),
        ({"infinity": {"tuning": 3}}, "infinity.tuning must be an object with keys"),
        ({"gradient_clipping": 10**400}, "it must be a number of at least 0"),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}},
            "betas=[0.9]: it must be a list of 2, each a number from 0 to 1",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}},
            "learning_rate=1: unknown key; known are lr, ",
        ),
        ({"optimizer": {"type": "Optimizer"}}, "there is none of that name"),
        ({"optimizer": {"type": "SparseAdam"}}, "gradients are dense here; use AdamW"),
        ({"scheduler": {"type": "LRScheduler"}}, "there is none of that name"),
        ({"scheduler": {"type": "Counter"}}, "there is none of that name"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(more: dict[str, Any], problem: str) -> None:
    found = refusal(small(**more))
    assert problem in found
    assert "\n" not in found


def test_all_refused_keys_are_in_one_message() -> None:
    found = refusal(small(pipeline={"stages": 2}, zero_optimisation={}, amp={"enabled": True}))
    assert found.count(": ") == 3
    assert "amp.enabled=True" in found


def test_unknown_keys_may_be_let_through() -> None:
    settings = Settings.read(small(mine=3, infinity={"strict_config": False}))
    assert "mine: ignored, unknown key" in settings.notices


# Old names


def test_old_and_misplaced_keys_are_moved_with_a_notice() -> None:
    settings = Settings.read(PLAIN["old names"])
    assert settings.config.optimizer == "cpu"
    assert settings.precision == "bf16"
    assert settings.gather_16bit_weights_on_save
    moved = " ".join(settings.notices)
    for old in ("bfloat16", "zero_optimization.cpu_offload", "zero_optimization.aio"):
        assert f"{old} is read as" in moved
    assert "aio.thread_count is read as aio.intra_op_parallelism" in moved
    assert PLAIN["old names"]["zero_optimization"]["cpu_offload"] is True, "the source is not ours"


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_narrow_masters_are_wide_with_a_notice(kind: str) -> None:
    key = f"{kind}_master_weights_and_grads"
    settings = Settings.read(small(**{kind: {"enabled": True, key: True}}))
    (notice,) = settings.notices
    assert notice == f"{kind}.{key}=True: masters stay in fp32, where small updates are not lost"


def test_a_key_under_both_names_is_refused() -> None:
    found = refusal(small(aio={"thread_count": 1, "intra_op_parallelism": 1}))
    assert "aio.intra_op_parallelism is there twice, once under an old name" in found


# "auto" by the hidden size


def test_the_hidden_size_gives_auto_its_meaning() -> None:
    config = AUTO["trainer, zero3"]
    values = {row.path: row.value for row in explain(config, hidden_size=64).rows}
    assert values["zero_optimization.reduce_bucket_size"] == 4096
    assert values["zero_optimization.stage3_prefetch_bucket_size"] == 3686
    assert values["zero_optimization.stage3_param_persistence_threshold"] == 640


# Sources


def test_a_dict_a_path_and_base64_say_the_same(tmp_path: Path) -> None:
    config = PLAIN["zero3"]
    text = json.dumps(config)
    path = tmp_path / "ds.json"
    path.write_text(text)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    found = [Settings.read(source) for source in (config, path, str(path), encoded)]
    assert all(settings == found[0] for settings in found)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"train_batch_size": 1, "train_batch_size": 2}', "has a key twice: 'train_batch_size'"),
        ('{"fp16": {"enabled": true, "enabled": false}}', "has a key twice: 'enabled'"),
        ("[1]", "not an object with keys"),
        ("[" * 100_000, "is no configuration: it is nested too deeply"),
        ('{"train_batch_size": %s}' % ("9" * 5000), "is no configuration: Exceeds the limit"),
        (b"\x80\xff\x00", "is no text in UTF-8, so it is no JSON; save it as UTF-8"),
        ("{}".encode("utf-16"), "is no text in UTF-8"),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path: Path, text: str | bytes, problem: str) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    assert problem in refusal(path)


def test_a_file_may_begin_with_the_mark_of_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 4}', encoding="utf-8-sig")
    assert Settings.read(path).batches.train == 4


def test_hjson_is_read_where_its_package_is_installed(tmp_path: Path) -> None:
    path = tmp_path / "ds.hjson"
    path.write_text("{\n  # of one step\n  train_batch_size: 4\n}\n")
    try:
        import hjson  # noqa: F401
    except ImportError:
        assert "is not JSON" in refusal(path)
        assert "if it is HJSON, pip install hjson" in refusal(path)
    else:
        assert Settings.read(path).batches.train == 4


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (None, "the configuration is None; give a dict, or the path of a JSON file"),
        (3, "the configuration is 3; give a dict"),
        ("nowhere.json", "'nowhere.json' is neither a file nor base64 text"),
        ({1: 2}, "the key 1 is not text"),
    ],
)
def test_what_is_no_configuration_is_refused(source: Any, problem: str) -> None:
    assert problem in refusal(source)


# No key is silently ignored

POOL = [
    *(True, False, 0, 1, 2, 3, 0.5, 7, 12.5, 1e9, 1e-6, "/somewhere", ["A", "b"], [0.5, 0.75]),
    *("none", "cpu", "nvme", "fp32", "fp16", "bf16", "mean", "sum", "warn", "fail", "ignore"),
    *("log", "linear", "gram", "standard"),
]
SPECIAL = (*BATCH, "optimizer.type", "scheduler.type", "infinity.", "data_types.keep", "log_level")
ALL = [key for key in KEYS.values() if not key.path.startswith(SPECIAL)]
FOR_TYPES = [("optimizer", kind) for kind in OPTIMIZERS] + [("scheduler", k) for k in SCHEDULERS]


def put(config: dict[str, Any], path: str, value: Any) -> None:
    *blocks, name = path.split(".")
    for block in blocks:
        config = config.setdefault(block, {})
    config[name] = value


def candidates(key: Key) -> list[Any]:
    """Values that ask for something."""
    found = []
    for value in POOL:
        try:
            if key.asks(key.kind.parse(value)):
                found.append(value)
        except ValueError:
            continue
    return found


def says(explained: Explained) -> dict[str, Any]:
    assert explained.settings is not None
    return {
        name: value
        for name, value in vars(explained.settings).items()
        if name not in ("raw", "rows", "notices")
    }


def check_answered(path: str, config: dict[str, Any], without: dict[str, Any]) -> None:
    """`config` has the key at `path`, `without` has not; the key is answered for."""
    (row,) = [row for row in explain(config).rows if row.path == path]
    before, after = explain(without), explain(config)
    assume(before.settings is not None)
    if after.settings is None:
        assert after.problems
    elif row.treatment is Treatment.IGNORED:
        assert any(path in notice for notice in after.settings.notices)
    elif row.is_off:
        assert row.becomes.startswith("off: ")
    else:
        assert says(before) != says(after) or path in " ".join(after.settings.notices), row


CONTEXTS = (
    {},
    {"bf16": {"enabled": True}},
    {"fp16": {"enabled": True}},
    {"torch_autocast": {"enabled": True}},
    {
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": "/a"},
            "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
        }
    },
)
SAME = {
    "communication_data_type": ("fp32", "fp16", "bf16"),
    "data_types.grad_accum_dtype": ("fp32", "fp16", "bf16"),
    "data_types.param_dtype": ("fp32", "fp16", "bf16"),
    "aio.use_gds": (True,),
}
"""Values that may be what the engine does anyway, by the rest of the configuration."""


@given(st.data())
def test_no_key_is_silently_ignored(data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(ALL))
    value = data.draw(st.sampled_from(candidates(key)))
    assume(value not in SAME.get(key.path, ()))
    config = json.loads(json.dumps(small(**data.draw(st.sampled_from(CONTEXTS)))))
    others = data.draw(st.lists(st.sampled_from(ALL), max_size=3))
    for other in others:
        put(config, other.path, data.draw(st.sampled_from(candidates(other))))
    without = json.loads(json.dumps(config))
    *blocks, name = key.path.split(".")
    place = without
    for block in blocks:
        place = place.setdefault(block, {})
    place.pop(name, None)
    put(config, key.path, value)
    check_answered(key.path, config, without)


@pytest.mark.parametrize("key", ALL, ids=lambda key: key.path)
def test_every_key_has_a_value_that_asks_for_something(key: Key) -> None:
    assert candidates(key), "add one to POOL"


@given(st.data())
def test_no_parameter_of_a_type_is_silently_ignored(data: st.DataObject) -> None:
    block, kind = data.draw(st.sampled_from(FOR_TYPES))
    key = data.draw(st.sampled_from(params_of(block, kind)))
    value = data.draw(st.sampled_from(candidates(key)))
    base = {"type": kind, "params": {}}
    config = small(**{block: {"type": kind, "params": {key.path.rpartition(".")[2]: value}}})
    check_answered(key.path, config, small(**{block: base}))


@pytest.mark.parametrize("block", FREE.values(), ids=lambda block: block.path)
def test_a_block_that_is_on_is_refused_or_noticed(block: Any) -> None:
    value = {block.switches[0] if block.switches else "x": True}
    config = small()
    put(config, block.path, value)
    explained = explain(config)
    if block.treatment is Treatment.REFUSED:
        assert block.path in explained.problems[0]
    else:
        assert explained.settings is not None
        assert any(block.path in notice for notice in explained.settings.notices)


@given(st.text(min_size=1), st.sampled_from(["", "zero_optimization", "aio", "fp16", "optimizer"]))
def test_a_key_that_is_not_in_the_table_is_refused(name: str, block: str) -> None:
    path = f"{block}.{name}" if block else name
    assume(path not in KEYS and not any(known.startswith(path) for known in [*KEYS, *FREE]))
    assume("." not in name and name not in ("params", "bfloat16"))
    config = small(**({block: {name: 1}} if block else {name: 1}))
    explained = explain(config)
    notices = explained.settings.notices if explained.settings else ()
    assert explained.problems or any(path in notice for notice in notices)


# The command


def command(path: Path, *options: str) -> Any:
    environment = {"COLUMNS": "200", "TERM": "dumb"}
    return CliRunner().invoke(app, ["config", "explain", str(path), *options], env=environment)


def test_the_command_accounts_for_every_key(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    for config in [*PLAIN.values(), *AUTO.values()]:
        if config is PLAIN["old names"]:
            continue
        path.write_text(json.dumps(config))
        result = command(path)
        assert result.exit_code == 0, result.output
        lines = [line.split()[0] for line in result.stdout.splitlines() if line.strip()]
        assert set(leaves(config)) <= set(lines)
    assert "infinity.Config(nvme=['/local_nvme'], gradients=" not in result.stdout  # the default
    assert "infinity.Config(nvme=['/local_nvme']" in result.stdout
    assert 'keys with "auto": a Trainer or accelerate replaces them' in result.stdout


def test_the_command_fails_where_a_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(small(pipeline={"stages": 2})))
    result = command(path)
    assert result.exit_code == 1
    assert "infinity: refused: pipeline.stages=2: there is no pipeline parallelism" in result.stderr
    facts = json.loads(command(path, "--json").stdout)
    assert facts["keys"][1]["treatment"] == "refused"
    assert facts["config"] is None


def test_the_command_says_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    result = command(tmp_path / "none.json")
    assert result.exit_code == 1
    assert "is neither a file nor base64 text" in result.stderr
