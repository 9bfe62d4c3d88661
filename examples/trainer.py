"""A script for the Trainer of transformers. Two lines make it train on infinity.

python examples/trainer.py /mnt/nvme0
"""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import infinity

# plain: from transformers import Trainer
from infinity.integrations.transformers import InfinityTrainer as Trainer

directory = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
)
rows = torch.randint(128, (1, 16)).expand(64, 16)
arguments = TrainingArguments(
    output_dir=f"{directory}/output",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    max_steps=6,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    infinity_config=infinity.Config(nvme=directory),
)
trainer.train()
trainer.save_model(f"{directory}/model")
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
