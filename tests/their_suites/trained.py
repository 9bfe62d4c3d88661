"""Examples of transformers, unmodified, with a configuration of DeepSpeed under `infinity run`.
They log the losses of the same script without one, on one rank and on two.

The models and the data are small and local. No package that decodes audio is needed: a stand-in
reads WAV files.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import socket
import sys
import wave
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from support import hosted
from support.local_models import save_metric, sentence
from their_suites.zoo import PIECES

FOLDER = "examples/pytorch"
_STEPS = 4
_OPTIONS = f"""
    --output_dir out --do_train --do_eval --max_steps {_STEPS} --logging_steps 1 --use_cpu
    --per_device_train_batch_size 2 --per_device_eval_batch_size 2 --learning_rate 1e-3
    --gradient_accumulation_steps 2 --max_grad_norm 1.0 --lr_scheduler_type constant
    --save_strategy no --report_to none --disable_tqdm True --seed 1
""".split()
SCRIPTS: Mapping[str, str] = {
    "translation/run_translation.py": """
        --model_name_or_path tiny/t5 --source_lang en --target_lang ro --predict_with_generate
        --train_file TOP/train.json --validation_file TOP/validation.json
        --max_source_length 32 --max_target_length 16 --num_beams 2
    """,
    "speech-recognition/run_speech_recognition_ctc.py": """
        --model_name_or_path tiny/wav2vec2 --dataset_name TOP/speech --text_column_name text
        --train_split_name train --eval_split_name validation --mask_time_prob 0.0
    """,
    "audio-classification/run_audio_classification.py": """
        --model_name_or_path tiny/wav2vec2 --dataset_name TOP/speech --eval_split_name validation
        --label_column_name label --max_length_seconds 1 --remove_unused_columns False
    """,
}
"""What each script is given beside `_OPTIONS`. `TOP` is where models and data are."""
_NO_DROPOUT = ("hidden", "attention", "feat_proj", "activation", "final")
_WAV2VEC2: Mapping[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "conv_dim": (8, 8),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    **{f"{part}_dropout": 0.0 for part in _NO_DROPOUT},
}
STAGES, RANKS = (0, 2, 3), (1, 2)
"""Stage 0 is the plain script."""
RATE = 16_000
_READER = """
import io, wave
from types import SimpleNamespace
import torch

class VideoDecoder:
    pass

class AudioDecoder:
    def __init__(self, source, **options):
        with wave.open(io.BytesIO(source) if isinstance(source, bytes) else str(source)) as file:
            self.rate = file.getframerate()
            frames = bytearray(file.readframes(file.getnframes()))
        self.metadata = SimpleNamespace(path=None)  # the caller sets it
        self.data = torch.frombuffer(frames, dtype=torch.int16)[None] / 2.0**15
    def get_all_samples(self):
        return SimpleNamespace(data=self.data, sample_rate=self.rate)
    def get_samples_played_in_range(self, *range):
        return self.get_all_samples()
"""


class Variant(NamedTuple):
    script: str
    stage: int
    ranks: int

    def __str__(self) -> str:
        return f"{Path(self.script).stem}, stage {self.stage}, ranks {self.ranks}"


def outcomes(sources: Path, top: Path, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Run all, with models and data in `top`, which is made. Yields the name of each variant with a
    stage, and its error. The error is empty if the losses are those of the plain script."""
    make(top)
    variants = [Variant(*each) for each in itertools.product(SCRIPTS, STAGES, RANKS)]
    jobs = {each: _job(sources, top, each) for each in variants}
    run = [sys.executable, "-m", "infinity_command", "run"]
    hosts = {
        "plain": ([sys.executable], [jobs[each] for each in variants if not each.stage]),
        "zero": (run, [jobs[each] for each in variants if each.stage]),
    }
    own = {"HF_HUB_CACHE": str(top / "hub")}
    hosted.run(top, hosts, ["datasets", "transformers.trainer_seq2seq"], environment | own)
    for each in variants:
        if each.stage:
            yield str(each), _difference(top, each)


def _job(sources: Path, top: Path, variant: Variant) -> hosted.Job:
    directory = top / str(variant)
    directory.mkdir()
    script = sources / FOLDER / variant.script
    words = [str(script), *_OPTIONS, *SCRIPTS[variant.script].replace("TOP", str(top)).split()]
    if variant.stage:
        words += ["--deepspeed", str(top / f"zero{variant.stage}.json")]
    if variant.ranks == 1:
        return hosted.Job(str(directory), words, [{}])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    meeting |= {"WORLD_SIZE": str(variant.ranks), "LOCAL_WORLD_SIZE": str(variant.ranks)}
    numbers = map(str, range(variant.ranks))
    return hosted.Job(
        str(directory), words, [meeting | {"RANK": rank, "LOCAL_RANK": rank} for rank in numbers]
    )


def _losses(top: Path, variant: Variant) -> list[float]:
    """What the trainer logged: the loss of each step, and that of the evaluation."""
    directory = top / str(variant)
    hosted.said(directory)
    log = json.loads((directory / "out/trainer_state.json").read_text())["log_history"]
    last = json.loads((directory / "out/eval_results.json").read_text())["eval_loss"]
    steps = [entry["loss"] for entry in log if "loss" in entry]
    assert len(steps) == _STEPS, log
    return [*steps, last]


def _difference(top: Path, variant: Variant) -> str:
    try:
        found, expected = (_losses(top, each) for each in (variant, variant._replace(stage=0)))
    except AssertionError as error:
        lines = str(error).splitlines()
        return next((line for line in reversed(lines) if "Error" in line), lines[-1])
    same = all(map(lambda one, other: math.isclose(one, other, rel_tol=1e-6), found, expected))
    return "" if same else f"{found} are not {expected}"


def make(top: Path) -> None:
    """Write the models, the data, configurations of DeepSpeed, and stand-ins for packages."""
    top.mkdir(parents=True)
    _write_models(top / "hub")
    for split, numbers in {"train": range(16), "validation": range(16, 20)}.items():
        pairs = [{"en": sentence(n, 4), "ro": sentence(n + 1, 3)} for n in numbers]
        lines = [json.dumps({"translation": each}) for each in pairs]
        (top / f"{split}.json").write_text("\n".join(lines))
    _write_speech(top / "speech")
    for stage in filter(None, STAGES):
        (top / f"zero{stage}.json").write_text(json.dumps(_keys(stage)))
    save_metric(top / "packages")
    (top / "packages/torchcodec").mkdir()
    for name, text in {
        "__init__": "",
        "decoders": _READER,
        "encoders": "class AudioEncoder: pass",
    }.items():
        (top / f"packages/torchcodec/{name}.py").write_text(text)


def _keys(stage: int) -> dict[str, object]:
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    adam = {
        "type": "AdamW",
        "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
    }
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    return dict.fromkeys(names, "auto") | {"optimizer": adam, "zero_optimization": zero}


def _write_models(cache: Path) -> None:
    """Write a T5 and a Wav2Vec2, as the cache of a hub has them: the script of speech recognition
    takes a folder of a model for a checkpoint to resume from."""
    import transformers

    from their_suites.hub import save_pieces
    from their_suites.zoo import T5

    torch.manual_seed(0)
    folder = _snapshot(cache, "t5")
    config = transformers.T5Config(**T5, dropout_rate=0.0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    save_pieces(folder)
    folder = _snapshot(cache, "wav2vec2")
    config = transformers.Wav2Vec2Config(**_WAV2VEC2)
    transformers.Wav2Vec2Model(config).save_pretrained(folder)
    transformers.Wav2Vec2FeatureExtractor().save_pretrained(folder)


def _snapshot(cache: Path, name: str) -> Path:
    """The folder of a model in the cache of a hub."""
    folder = cache / f"models--tiny--{name}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("0" * 40)
    return folder / "snapshots" / ("0" * 40)


def _write_speech(directory: Path) -> None:
    """Write short sounds of noise with a text and a label each."""
    import datasets

    noise = torch.Generator().manual_seed(0)
    letters = [piece for piece in PIECES if piece.islower()]
    directory.mkdir()
    features = datasets.Features(
        {
            "audio": datasets.Audio(sampling_rate=RATE),
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["no", "yes"]),
        }
    )
    for split, count in {"train": 16, "validation": 4}.items():
        sounds = [
            torch.randint(-(2**14), 2**14, (2000,), generator=noise, dtype=torch.int16)
            for _ in range(count)
        ]
        texts = [" ".join(letters[n % 5 : n % 5 + 4]) for n in range(count)]
        files = [{"bytes": _wav(each), "path": None} for each in sounds]
        rows = {"audio": files, "text": texts, "label": [n % 2 for n in range(count)]}
        data = datasets.Dataset.from_dict(rows).cast(features)
        data.to_parquet(directory / f"{split}.parquet")


def _wav(samples: torch.Tensor) -> bytes:
    """The WAV file of samples of 16 bits."""
    with io.BytesIO() as written:
        with wave.open(written, "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes(samples.numpy().tobytes())
        return written.getvalue()
