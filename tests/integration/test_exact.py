"""The same bits on any number of ranks: virtual ranks, over worlds that change and ranks that are killed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from infra.torchrun import torchrun

# What scripts with a Trainer begin with.
MODEL = """
import hashlib, json, os, sys, torch
torch.set_num_threads(1)
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
from checkpointing.transformers import resilient
out, virtual_ranks, accumulation, kill = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
torch.manual_seed(0)
sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, attention_dropout=0.1))
source = torch.Generator().manual_seed(1)

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == kill:
            trainer._manager.wait_for_commit()
            os._exit(9)

def weights():
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
"""


TRAINER = (
    MODEL
    + """
from transformers import Trainer, TrainingArguments
rows = []
for number in range(203):
    ids = torch.randint(0, 32, (8,), generator=source)
    labels = ids.clone()
    # As many tokens count in each micro-batch as its samples have, which differ.
    labels[: number % 5] = -100
    rows.append({"input_ids": ids, "labels": labels})
args = TrainingArguments(
    out, per_device_train_batch_size=2, gradient_accumulation_steps=accumulation, max_steps=15, logging_steps=2,
    save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=1e-2, ddp_backend="gloo", seed=3,
    ddp_find_unused_parameters=False,
)

class Measuring(Trainer):
    # As trainers of TRL do, for figures that they log.
    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.accelerator.gather(torch.ones(1))
        return loss

trainer = Measuring(model=model, args=args, train_dataset=rows, callbacks=[Kill()])
trainer = resilient(trainer, virtual_ranks=virtual_ranks, snapshot_steps=None)
trainer.train()
if trainer.is_world_process_zero():
    logs = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    print("ENDED", weights(), logs[-1], len(logs), flush=True)
"""
)


LOOP = """
import hashlib, os, sys, torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from checkpointing import CheckpointManager
torch.set_num_threads(1)
folder, virtual_ranks, kill = sys.argv[1], int(sys.argv[2]), int(sys.argv[4])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
net = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
source = torch.Generator().manual_seed(1)
loader = DataLoader(TensorDataset(torch.randn(57, 4, generator=source)), batch_size=2, shuffle=True)
manager = CheckpointManager(
    folder, model=net, optimizer=optimizer, virtual_ranks=virtual_ranks, save_steps=2, snapshot_steps=None
)

def compute(batch):
    net(batch[0]).square().mean().backward()

start = manager.resume()
steps = manager.shares(loader)
manager.check_exact([torch.ones(2, 4)], compute)
for step, shares in zip(range(start, 20), steps):
    for share in shares:
        with share:
            compute(share.batch)
    optimizer.step()
    optimizer.zero_grad()
    manager.step(step + 1)
    if step + 1 == kill:
        manager.wait_for_commit()
        os._exit(9)
manager.close()
if dist.get_rank() == 0:
    print("ENDED", hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
dist.destroy_process_group()
"""


SFT = (
    MODEL
    + """
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from tokenizers import Tokenizer, models
from trl import SFTConfig, SFTTrainer
words = Tokenizer(models.WordLevel({str(number): number for number in range(32)}, unk_token="0"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")

def rows(count):
    # Of different lengths, so that the figures of different micro-batches weigh differently.
    ids = [torch.randint(2, 32, (4 + number % 7,), generator=source).tolist() for number in range(count)]
    masks = [[0] * (number % 3) + [1] * (len(row) - number % 3) for number, row in enumerate(ids)]
    return Dataset.from_dict({"input_ids": ids, "completion_mask": masks})

args = SFTConfig(
    out, per_device_train_batch_size=2, per_device_eval_batch_size=2, gradient_accumulation_steps=accumulation,
    max_steps=12, logging_steps=2, save_steps=3, eval_strategy="steps", eval_steps=3, eval_on_start=True,
    load_best_model_at_end=True, report_to=[],
    use_cpu=True, disable_tqdm=True, learning_rate=1e-2, ddp_backend="gloo", seed=3, bf16=False,
    include_num_input_tokens_seen="non_padding", gradient_checkpointing=False, ddp_find_unused_parameters=False,
)

# Seven batches of the evaluation, the last of them with one row.
trainer = SFTTrainer(model=model, args=args, train_dataset=rows(203), eval_dataset=rows(13), processing_class=tokenizer)
trainer.add_callback(Kill())
trainer = resilient(trainer, virtual_ranks=virtual_ranks, snapshot_steps=1)
trainer.train()
if trainer.is_world_process_zero():
    # Times differ, and operations are added up in single precision.
    clocks = ("_runtime", "_per_second", "tokens_per_s", "total_flos")
    logs = [{k: v for k, v in entry.items() if not k.endswith(clocks)} for entry in trainer.state.log_history]
    print("ENDED", weights(), trainer.state.best_metric, json.dumps(logs, sort_keys=True), flush=True)
"""
)


def train(
    folder: Path,
    world_size: int,
    *,
    virtual_ranks: int = 8,
    accumulation: int = 1,
    kill: int = 0,
    script: str = TRAINER,
) -> str:
    """Train on so many ranks from where the last one ended; return what it ended with, or why it did not end."""
    folder.mkdir(exist_ok=True)
    path = folder / "train.py"
    path.write_text(script)
    arguments = (folder / "run", virtual_ranks, accumulation, kill)
    ended = torchrun(path, *arguments, ranks=world_size)
    assert (ended.returncode != 0) == (kill > 0), ended.stderr[-6000:]
    return next((line for line in ended.stdout.splitlines() if line.startswith("ENDED")), "")


@pytest.mark.parametrize(
    ("script", "accumulation"),
    [
        (SFT, 2),
        (LOOP, 1),
        pytest.param(TRAINER, 1, marks=pytest.mark.soak),
        pytest.param(TRAINER, 2, marks=pytest.mark.soak),
    ],
    ids=["sft", "loop", "trainer", "accumulation"],
)
def test_worlds_that_change_end_in_the_bits_of_one_that_nobody_touched(
    script: str, accumulation: int, tmp_path: Path
) -> None:
    """Weights, logged figures and evaluations; blocks of 4 and 4, of 3, 3 and 2, and all on one rank."""
    calm = train(tmp_path / "calm", 2, accumulation=accumulation, script=script)
    assert calm
    for world_size, kill in ((3, 5), (1, 9)):
        train(tmp_path / "troubled", world_size, accumulation=accumulation, kill=kill, script=script)
    assert train(tmp_path / "troubled", 2, accumulation=accumulation, script=script) == calm


@pytest.mark.soak
def test_every_world_and_any_sequence_of_them(tmp_path: Path) -> None:
    ends = {train(tmp_path / f"world-{world_size}", world_size) for world_size in range(1, 9)}
    for seed in range(4):
        dice = random.Random(seed)
        for kill in sorted(dice.sample(range(2, 15), 4)):
            train(tmp_path / f"seed-{seed}", dice.randint(1, 8), kill=kill)
        ends.add(train(tmp_path / f"seed-{seed}", dice.randint(1, 8)))
    assert len(ends) == 1


def test_another_number_of_virtual_ranks_is_refused(tmp_path: Path) -> None:
    train(tmp_path, 1, virtual_ranks=3, kill=3)
    with pytest.raises(AssertionError, match="was made with 3 virtual ranks, and now there are 4"):
        train(tmp_path, 1, virtual_ranks=4)
    with pytest.raises(AssertionError, match="2 ranks cannot share 1 virtual ranks: start at most 1"):
        train(tmp_path / "other", 2, virtual_ranks=1)


SHAPES = """
import hashlib, sys, torch, torch.distributed as dist
torch.set_num_threads(1)
from torch.nn.parallel import DistributedDataParallel
from checkpointing.exact.gradients import ExactGradients
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.conv = torch.nn.Conv2d(3, 5, 3)
        self.frozen = torch.nn.Linear(5, 5).requires_grad_(False)
        self.head = torch.nn.Linear(5, 7)

    def forward(self, x):
        return self.head(self.frozen(self.conv(x).mean((2, 3))) * self.scale)

torch.manual_seed(0)
net = Net().to(memory_format=torch.channels_last)
options = dict(gradient_as_bucket_view=sys.argv[2] == "views", bucket_cap_mb=0.0005)
model = DistributedDataParallel(net, **options) if world_size > 1 else net
exact = ExactGradients(model, 4)
# Another one of the same model, as for a second loader, takes its hook.
ExactGradients(model, 4)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
for step in range(3):
    # A message of the script's own is on its way during the backward pass.
    message = dist.isend(torch.full((40,), 7.0), 1) if rank == 0 and world_size > 1 else None
    for virtual_rank in exact.block:
        source = torch.Generator().manual_seed(10 * step + virtual_rank)
        with exact.of_rank(virtual_rank, step):
            model(torch.randn(2, 3, 6, 6, generator=source)).square().sum().backward()
    if message is not None:
        message.wait()
    elif rank == 1:
        received = torch.zeros(40)
        dist.recv(received, 0)
        assert received.tolist() == [7.0] * 40, received
    optimizer.step()
    optimizer.zero_grad()
print("ENDED", hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest(), flush=True)
"""


@pytest.mark.parametrize("buckets", ["views", "copies"])
def test_gradients_of_any_shape_and_order_of_dimensions(buckets: str, tmp_path: Path) -> None:
    """A scalar, channels last, several buckets that ranks cut unevenly, and another message between the ranks."""
    script = tmp_path / "shapes.py"
    script.write_text(SHAPES)
    ends = set()
    for world_size in (1, 2, 3):
        ended = torchrun(script, tmp_path, buckets, ranks=world_size)
        assert ended.returncode == 0, ended.stderr[-6000:]
        ends |= {line for line in ended.stdout.splitlines() if line.startswith("ENDED")}
    assert len(ends) == 1
