"""A Hugging Face script made resilient by the two marked lines.

Run it, kill it at any moment (`kill -9`), and run it again: it resumes from the newest checkpoint, and the result is
bit-identical. `torchrun` and `runner start docs/examples/hf_trainer.py` run it on several ranks; the latter also
restarts it.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from checkpointing.transformers import resilient  # added

output_dir = sys.argv[1] if len(sys.argv) > 1 else "runs/hf_trainer"
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 256, (400, 32))]
arguments = TrainingArguments(
    output_dir,
    max_steps=120,
    save_steps=10,
    logging_steps=5,
    report_to="none",
    use_cpu=not torch.accelerator.is_available(),  # Without it, ranks on a CPU do not train together.
)
trainer = Trainer(model=model, args=arguments, train_dataset=rows)
trainer = resilient(trainer)  # added
trainer.train()
trainer.save_model(f"{output_dir}/final")
