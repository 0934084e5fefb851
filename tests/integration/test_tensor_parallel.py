"""A Trainer on a model that transformers shards while it loads it: killed, resumed in the same bits, and elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from infra.torchrun import torchrun

SCRIPT = """
import hashlib, json, os, signal, sys
import accelerate, torch
import torch.distributed as dist
from transformers import (AutoModelForCausalLM, DistributedConfig, SmolLM3Config, SmolLM3ForCausalLM, Trainer,
    TrainerCallback, TrainingArguments)
from checkpointing.transformers import resilient

folder, last, tensor, shard = sys.argv[1], *map(int, sys.argv[2:5])
# On a CPU, accelerate accepts no mesh.
accelerate.ParallelismConfig._validate_accelerator = lambda *_: None
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
source = os.path.dirname(folder) + "/source"
if rank == 0 and not os.path.exists(source):
    torch.manual_seed(0)
    SmolLM3ForCausalLM(SmolLM3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )).save_pretrained(source)
dist.barrier()
sharded = {"distributed_config": DistributedConfig(tp_size=tensor, fsdp_size=shard)} if tensor * shard > 1 else {}
model = AutoModelForCausalLM.from_pretrained(source, **sharded)
generator = torch.Generator().manual_seed(3)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 64, (96, 16), generator=generator)]

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == last and rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

# The Trainer itself saves nothing but such a model's weights.
args = TrainingArguments(
    folder, num_train_epochs=2, save_steps=4, per_device_train_batch_size=8 // shard, logging_steps=2,
    report_to="none", use_cpu=True, disable_tqdm=True, save_only_model=True, dataloader_pin_memory=False)
trainer = Trainer(model=model, args=args, train_dataset=rows, callbacks=[Kill()])
if folder.endswith("stock"):
    args.save_strategy = "no"
else:
    trainer = resilient(trainer)
trainer.train()
digest = hashlib.sha256()
for parameter in trainer.model.parameters():
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    digest.update(whole.detach().numpy().tobytes())
if rank == 0:
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(json.dumps({"weights": digest.hexdigest(), "losses": losses}))
"""


def run(folder: Path, tensor: int, shard: int, *, last: int = 0) -> dict[str, Any]:
    script = folder.parent / "train.py"
    script.write_text(SCRIPT)
    done = torchrun(script, folder, last, tensor, shard, ranks=tensor * shard)
    assert (done.returncode != 0) == bool(last), done.stderr[-5000:]
    return {} if last else dict(done.printed())


@pytest.mark.soak
@pytest.mark.parametrize(("tensor", "shard"), [(2, 1), (2, 2)])
def test_a_killed_trainer_ends_as_the_stock_one(tensor: int, shard: int, tmp_path: Path) -> None:
    expected = run(tmp_path / "stock", tensor, shard)
    # The second epoch has begun.
    run(tmp_path / "killed", tensor, shard, last=17)
    assert run(tmp_path / "killed", tensor, shard) == expected


@pytest.mark.soak
@pytest.mark.parametrize(("tensor", "shard"), [(1, 1), (1, 2), (2, 1)])
def test_another_mesh_continues_with_the_same_samples(tensor: int, shard: int, tmp_path: Path) -> None:
    expected = run(tmp_path / "stock", 2, 2)
    run(tmp_path / "killed", 2, 2, last=17)
    assert run(tmp_path / "killed", tensor, shard)["losses"] == pytest.approx(expected["losses"], rel=1e-3)
