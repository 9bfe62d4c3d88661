"""Trainer of transformers with a configuration of DeepSpeed, for a text that becomes another one,
images and audio: the losses, norms and answers of runs without it.

Each kind is one process, forked after the imports that all share.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support import hosted
from support.roads import road

pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import json, sys
import torch, transformers
from accelerate.state import AcceleratorState
from transformers import (
    Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration, Trainer,
    TrainingArguments, ViTConfig, ViTForImageClassification, Wav2Vec2Config, Wav2Vec2ForCTC,
)

top, kind = sys.argv[1:]
some = torch.Generator().manual_seed(0)

def texts():
    model = T5ForConditionalGeneration(T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    ))
    ids = torch.randint(2, 32, (8, 6), generator=some)
    return model, [{"input_ids": each, "labels": each[:4]} for each in ids]

def images():
    model = ViTForImageClassification(ViTConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        image_size=8, patch_size=4, num_labels=3, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ))
    pixels = torch.randn(8, 3, 8, 8, generator=some)
    return model, [{"pixel_values": each, "labels": n % 3} for n, each in enumerate(pixels)]

def audio():
    model = Wav2Vec2ForCTC(Wav2Vec2Config(
        vocab_size=8, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, conv_dim=(8, 8), conv_kernel=(10, 3), conv_stride=(5, 2),
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_prob=0.0,
        layerdrop=0.0, hidden_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0,
        activation_dropout=0.0, final_dropout=0.0, ctc_loss_reduction="mean", pad_token_id=0,
    ))
    sounds = torch.randn(8, 400, generator=some)
    labels = torch.randint(1, 8, (8, 5), generator=some)
    return model, [{"input_values": a, "labels": b} for a, b in zip(sounds, labels)]

torch.manual_seed(0)
model, data = {"texts": texts, "images": images, "audio": audio}[kind]()
model.save_pretrained(top + "/model")
makes_texts = kind == "texts"
trainers = Seq2SeqTrainer if makes_texts else Trainer
arguments = Seq2SeqTrainingArguments if makes_texts else TrainingArguments
own = {"predict_with_generate": True, "generation_max_length": 8} if makes_texts else {}

def run(deepspeed):
    AcceleratorState._reset_state(reset_partial_state=True)
    args = arguments(
        top + "/out", per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4,
        logging_steps=1, save_strategy="no", report_to="none", learning_rate=1e-3,
        max_grad_norm=1e6, disable_tqdm=True, lr_scheduler_type="constant",
        deepspeed=deepspeed, **own,
    )
    model = type(globals()["model"]).from_pretrained(top + "/model")
    is_empty = next(model.parameters()).is_meta
    trainer = trainers(model=model, args=args, train_dataset=data, eval_dataset=data)
    trainer.train()
    steps = [each for each in trainer.state.log_history if "loss" in each]
    log = [each[name] for each in steps for name in ("loss", "grad_norm")]
    log.append(trainer.evaluate()["eval_loss"])
    return log, trainer.predict(data).predictions.tolist() if makes_texts else [], is_empty

found = [run(None)]
for stage in (2, 3):
    found.append(run({
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
    }))
with open("found.json", "w") as file:
    json.dump(found, file)
"""
KINDS = {
    "texts": "`Seq2SeqTrainer` (T5), `predict_with_generate`",
    "images": "`Trainer` (ViT)",
    "audio": "`Trainer` (Wav2Vec2, CTC)",
}
IMPORTS = (
    "accelerate",
    "transformers.trainer_seq2seq",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("t5", "vit", "wav2vec2")),
)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all kinds have run, each in a folder."""
    for name in ("accelerate", "transformers"):
        pytest.importorskip(name)
    top = tmp_path_factory.mktemp("kinds")
    script, jobs = top / "script.py", []
    script.write_text(SCRIPT)
    for kind in KINDS:
        directory = top / kind
        directory.mkdir()
        jobs.append(hosted.Job(str(directory), [str(script), str(directory), kind], [{}]))
    run = [sys.executable, "-m", "infinity_command", "run"]
    hosted.run(top, {"zero": (run, jobs)}, IMPORTS, {})
    return top


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[road("transformers", what, "`infinity run`", n) for n in (2, 3)])
        for kind, what in KINDS.items()
    ],
)
def test_a_kind_of_model_trains_as_without_keys(ran: Path, kind: str) -> None:
    hosted.said(ran / kind)
    (plain, answers, empty), *others = json.loads((ran / kind / "found.json").read_text())
    assert plain[-1] < plain[0] and not empty
    for (log, texts, is_empty), is_sharded in zip(others, (False, True), strict=True):
        assert log == pytest.approx(plain, rel=1e-6)
        assert texts == answers
        assert is_empty == is_sharded
