"""DeepSpeedExamples as scripts, unmodified, on small models and data."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from support import hosted
from support.local_models import VOCABULARY, save_tokenizer, sentence

_CHAT = "applications/DeepSpeed-Chat/training"
_TUNE, _REWARD, _PREFER, _REINFORCE = (
    f"{_CHAT}/{step}_finetuning/main.py"
    for step in ("step1_supervised", "step2_reward_model", "step2_dpo", "step3_rlhf")
)
_FILES = "deepnvme/file_access"
_OPTIONS = {
    _TUNE: """
        --model_name_or_path TOP/opt --data_path TOP/Dahoas/rm-static --data_output_path data
        --max_seq_len 24 --per_device_train_batch_size 2 --per_device_eval_batch_size 2
        --gradient_accumulation_steps 2 --deepspeed --local_rank 0
    """,
    _REINFORCE: """
        --actor_model_name_or_path TOP/opt --critic_model_name_or_path TOP/critic
        --data_path TOP/Dahoas/rm-static --data_output_path data --num_padding_at_beginning 1
        --per_device_generation_batch_size 2 --per_device_training_batch_size 2 --dtype bf16
        --max_prompt_seq_len 8 --max_answer_seq_len 8 --gradient_accumulation_steps 2 --seed 1
        --actor_gradient_checkpointing --actor_dropout 0.0 --deepspeed --local_rank 0
        --output_dir trained
    """,
    "training/HelloDeepSpeed/train_bert_ds.py": """
        --checkpoint_dir bert --tokenizer TOP/words --num_layers 1 --num_heads 2 --ff_dim 16
        --h_dim 16 --batch_size 2 --num_iterations 5 --checkpoint_every 3 --log_every 1
    """,
    "training/bf16_master_weight/train.py": """
        --deepspeed_config SOURCES/training/bf16_master_weight/configs/bf16_full.json
        --num_layers 1 --hidden_dim 16 --num_heads 2 --vocab_size 64 --seq_length 8 --num_steps 3
    """,
    "training/DeepSpeed-SuperOffload/finetune_zero3.py": """
        --deepspeed_config TOP/superoffload.json --model_name TOP/opt --lr 1e-3 --batch_size 2
        --max_length 24 --dataset_name TOP/alpaca --bench_steps 3 --attn_implementation eager
        --activation_checkpointing --save_checkpoint --output_dir trained
    """,
    f"{_FILES}/aio_load_cpu_tensor.py": "--input_file TOP/bytes --validate",
    f"{_FILES}/aio_store_cpu_tensor.py": "--nvme_folder . --mb_size 2 --validate",
    "deepnvme/model_checkpoint/deepspeed_save_model.py": "--folder saved --model tiny-t5",
}
_OPTIONS |= dict.fromkeys((_REWARD, _PREFER), _OPTIONS[_TUNE])
"""What each script is given in every run. `TOP` is where models and data are."""
_ITS_LORA = "--lora_dim 4 --only_optimize_lora --gradient_checkpointing"
RUNS: Mapping[str, tuple[str, str]] = {
    "step 1, stage 2": (_TUNE, "--zero_stage 2 --output_dir out"),
    "step 1, stage 3, offload": (
        _TUNE,
        "--zero_stage 3 --offload --dtype bf16 --print_loss --output_dir out",
    ),
    "step 1, stage 3, its LoRA": (
        _TUNE,
        f"--zero_stage 3 --dtype bf16 {_ITS_LORA} --output_dir out",
    ),
    "step 2, reward, stage 0": (_REWARD, "--zero_stage 0 --output_dir TOP/critic"),
    "step 2, reward, stage 3": (_REWARD, "--zero_stage 3 --dtype bf16 --output_dir out"),
    "step 2, DPO, stage 3": (_PREFER, "--zero_stage 3 --dtype bf16 --output_dir out"),
    "step 3, stage 2": (_REINFORCE, "--actor_zero_stage 2 --critic_zero_stage 2"),
    "step 3, stage 3, EMA": (
        _REINFORCE,
        "--actor_zero_stage 3 --critic_zero_stage 3 --enable_ema",
    ),
    "step 3, hybrid engine": (
        _REINFORCE,
        "--actor_zero_stage 2 --critic_zero_stage 2 --enable_hybrid_engine --actor_lora_dim 4",
    ),
    **{Path(script).stem: (script, "") for script in _OPTIONS if not script.startswith(_CHAT)},
}
"""A script and more options. The third step needs what the second one wrote."""
NEWER = """
from transformers import PreTrainedTokenizerFast, modeling_utils
from transformers.initialization import no_init_weights

modeling_utils.no_init_weights = no_init_weights
PreTrainedTokenizerFast.save_vocabulary = PreTrainedTokenizerFast.save_pretrained
"""
"""Names that DeepSpeed-Chat uses, and transformers 5 has elsewhere or not."""


def outcomes(sources: Path, top: Path, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Run all under `infinity run`, with models and data in `top`, which is made. The name of each,
    and the last line of its error, which is empty where it ended well."""
    make(top)
    jobs = []
    for name, (script, more) in RUNS.items():
        directory = top / name
        directory.mkdir()
        (directory / "wikitext").symlink_to(top / "wikitext")  # the name is fixed in a script
        words = f"{_OPTIONS[script]} {more}".replace("TOP", str(top))
        words = words.replace("SOURCES", str(sources))
        jobs.append(hosted.Job(str(directory), [str(sources / script), *words.split()], [{}]))
    run = [sys.executable, "-m", "infinity_command", "run"]
    imports = ["deepspeed", "datasets", "transformers.models.opt.modeling_opt", "newer"]
    hosted.run(top, {"examples": (run, jobs)}, imports, environment)
    for name in RUNS:
        try:
            hosted.said(top / name)
            yield name, ""
        except AssertionError as error:
            yield name, str(error).strip().splitlines()[-1]


def make(top: Path) -> None:
    """Write models, data and configurations into `top`."""
    import datasets
    import transformers

    top.mkdir()
    (top / "newer.py").write_text(NEWER)
    (top / "wandb.py").touch()  # imported, and not used
    sizes = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.OPTConfig(
        **sizes, vocab_size=VOCABULARY, word_embed_proj_dim=16, max_position_embeddings=64
    )
    torch.manual_seed(0)
    transformers.OPTForCausalLM(config).save_pretrained(top / "opt")
    save_tokenizer(top / "opt")
    save_tokenizer(top / "words", mask_token="<unk>")
    pairs = [
        {
            "prompt": sentence(number, 4),
            "response": sentence(number, 5),
            "chosen": sentence(number, 5),
            "rejected": sentence(number + 1, 5),
        }
        for number in range(40)
    ]
    data = datasets.Dataset.from_list(pairs)
    both = datasets.DatasetDict(train=data, test=data.select(range(20)))
    both.save_to_disk(top / "Dahoas/rm-static")
    _write_lines(top / "wikitext/wikitext-2-v1", [{"text": sentence(n, 9)} for n in range(20)])
    tasks = [{"instruction": sentence(n, 3), "input": "", "output": "w1"} for n in range(12)]
    _write_lines(top / "alpaca/default", tasks)
    (top / "bytes").write_bytes(bytes(range(256)) * 16)
    (top / "superoffload.json").write_text(json.dumps(_superoffload()))


def _superoffload() -> dict[str, Any]:
    """What the shell scripts of SuperOffload write."""
    offload = {"device": "cpu", "pin_memory": True, "ratio": 0.8, "super_offload": True}
    zero: dict[str, Any] = {"stage": 3, "overlap_comm": False, "reduce_bucket_size": 4e8}
    zero["sub_group_size"] = 4e8
    zero["offload_optimizer"] = offload | {"cpuadam_cores_perc": 0.9}
    return {
        "train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "wall_clock_breakdown": True,
    }


def _write_lines(directory: Path, rows: list[dict[str, Any]]) -> None:
    """Write a data set of one split, with the configuration that the directory is named after."""
    directory.mkdir(parents=True)
    (directory / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = f"{{split: train, path: {directory.name}/train.jsonl}}"
    text = f"---\nconfigs:\n- config_name: {directory.name}\n  data_files: [{files}]\n---\n"
    (directory.parent / "README.md").write_text(text)
