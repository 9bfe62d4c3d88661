"""LoRA with PEFT, in a loop of one's own. Two lines make it train on infinity.

python examples/lora.py /mnt/nvme0
"""

import sys
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import infinity

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
model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
model = infinity.wrap(model, infinity.Config(nvme=directory))
# plain: optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
rows = torch.randint(128, (8, 16), device=model.device)
losses = []
for _ in range(6):
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    print(f"loss {losses[-1]:.4f}")
model.save_pretrained(f"{directory}/adapter")
