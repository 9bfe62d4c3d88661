"""Supervised fine-tuning with TRL. A mixin before its trainer makes it train on infinity.

python examples/sft.py /mnt/nvme0
"""

import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import infinity
from infinity.integrations.transformers import InfinityTrainerMixin


# plain: class Trainer(SFTTrainer):
class Trainer(InfinityTrainerMixin, SFTTrainer):
    """TRL's."""


directory = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
torch.manual_seed(0)
words = {word: number for number, word in enumerate(["<end>", "<pad>", *map(str, range(62))])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
)
counting = [" ".join(str((start + step) % 62) for step in range(12)) for start in range(64)]
arguments = SFTConfig(
    output_dir=f"{directory}/output",
    per_device_train_batch_size=8,
    learning_rate=1e-2,
    max_steps=6,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    bf16=False,
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=Dataset.from_dict({"text": counting}),
    processing_class=PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>"
    ),
    infinity_config=infinity.Config(nvme=directory),
)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
