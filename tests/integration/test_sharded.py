"""A model sharded over ranks (FSDP2): the same checkpoints as unsharded, resumable with any number of ranks."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from helpers.command_line import run_command
from infra.ports import free_port
from infra.torchrun import torchrun
from integration.support import Run, loss_curve, state_hash
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

from checkpointing.commit.export import export_checkpoint
from checkpointing.storage import LocalStorage
from runner.training.model import trained_tokenizer

# Tensors that are cut unequally, that one rank has nothing of, and that are shared; a bare loop.
LOOP = """
import sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from checkpointing import CheckpointManager
from checkpointing.resume.verified_read import read_checkpoint
from checkpointing.files.sharding import is_sharded
from checkpointing.storage import open_storage
from checkpointing.state.train_state import TrainState

folder, steps, strategy = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 5)
        self.one = torch.nn.Linear(5, 1)
        self.layers = torch.nn.Sequential(torch.nn.Linear(5, 10), torch.nn.ReLU(), torch.nn.Linear(10, 5))
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
    def forward(self, tokens):
        hidden = self.layers(self.embedding(tokens))
        return self.head(hidden) * self.one(hidden)
model = Model()
if strategy == "as on a GPU":
    # There the host does not wait at the optimizer, and small state of its own is copied at once.
    TrainState.on_gpu = property(lambda self: True)
if strategy in ("tp", "fsdp + tp"):
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"layers.0": ColwiseParallel(), "layers.2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    if strategy == "fsdp + tp":
        fully_shard(model.layers, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        assert all(map(is_sharded, model.parameters()))
    trained = model
elif strategy != "ddp":
    fully_shard(model.layers)
    fully_shard(model, reshard_after_forward=False)
    assert all(map(is_sharded, model.parameters()))
    trained = model
else:
    trained = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
manager = CheckpointManager(folder, model=model, optimizer=optimizer, snapshot_steps=None)
start = manager.resume()
def whole(value):
    return value.full_tensor() if is_sharded(value) else value
def digest():
    tensors = [*model.state_dict().values()]
    tensors += [v for s in optimizer.state.values() for v in s.values()]
    return [float(whole(value).double().sum()) for value in tensors]
seen = open(f"{folder}.{dist.get_rank()}.{start}", "w")
print("LOADED", dist.get_rank(), start, digest(), file=seen)
for step in range(start, steps):
    tokens = torch.arange(7)[None] + 0 * dist.get_rank()
    torch.nn.functional.cross_entropy(trained(tokens)[0], tokens[0].roll(1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    print("STEP", dist.get_rank(), step + 1, digest(), file=seen)
    manager.end_of_step(step + 1)
    manager.save(step + 1, step + 1, wait=True)
manager.wait_for_commit()
if strategy == "fsdp":
    # What trains changes nothing but through the optimizer; what does is seen, by whichever way.
    state = manager._tracked.state.capture()
    torch.nn.functional.cross_entropy(trained(tokens)[0], tokens[0].roll(1)).backward()
    assert state.changed() == 0
    before = digest()
    with torch.no_grad():
        for change in (lambda p: p.mul_(2), lambda p: p._local_tensor.mul_(2), lambda p: p.to_local().mul_(2)):
            state = manager._tracked.state.capture()
            change(next(model.parameters()))
            assert state.changed() > 0
        trained(tokens)
    # After an evaluation some parameters are whole.
    point = read_checkpoint(open_storage(folder), steps, dist.get_rank(), dist.get_world_size())
    manager.restoring.restore_model(point)
    assert digest() == before
manager.close()
dist.destroy_process_group()
"""


def loop(tmp_path: Path, steps: int, strategy: str, ranks: int) -> dict[tuple[str, int, int], list[float]]:
    """Return what each rank saw: after loading, and after each step."""
    path = tmp_path / "loop.py"
    path.write_text(LOOP)
    result = torchrun(path, tmp_path / "checkpoints", steps, strategy, ranks=ranks)
    assert result.returncode == 0, result.stderr[-3000:]
    seen = {}
    for path in tmp_path.glob(f"checkpoints.*.{steps - 3}"):
        for line in path.read_text().splitlines():
            kind, rank, step, values = line.split(" ", 3)
            seen[kind, int(rank), int(step)] = json.loads(values)
    return seen


@pytest.mark.parametrize(
    "stages",
    [
        [("fsdp", 2), ("ddp", 1), ("fsdp + tp", 4), ("as on a GPU", 2)],
        pytest.param([("tp", 2), ("fsdp + tp", 4), ("fsdp", 2), ("tp", 2)], marks=pytest.mark.soak),
        pytest.param([("fsdp", 1), ("fsdp", 3), ("ddp", 2), ("as on a GPU", 3), ("fsdp", 2)], marks=pytest.mark.soak),
    ],
    ids=["default", "tensor parallel", "more"],
)
def test_sharded_state_is_saved_whole_and_cut_again(stages: list[tuple[str, int]], tmp_path: Path) -> None:
    last: list[float] = []
    for number, (strategy, ranks) in enumerate(stages, 1):
        steps = 3 * number
        seen = loop(tmp_path, steps, strategy, ranks)
        for rank in range(ranks):
            if last:
                assert seen["LOADED", rank, steps - 3] == pytest.approx(last, abs=1e-12), (strategy, ranks)
            assert seen["STEP", rank, steps] == seen["STEP", 0, steps]
        last = seen["STEP", 0, steps]
        files = load_file(tmp_path / "checkpoints" / f"checkpoint-{steps}" / "model.safetensors")
        assert sorted(tuple(tensor.shape) for tensor in files.values()) == [
            (1,),
            (1, 5),
            (5,),
            (5, 10),
            (7, 5),
            (10,),
            (10, 5),
        ]


def job(folder: Path, *settings: str) -> Run:
    short = ["trainer.max_steps=24", "trainer.save_steps=6", "trainer.logging_steps=4", "trainer.save_total_limit=9"]
    return Run(folder, *(part for setting in (*short, *settings) for part in ("--set", setting)))


def small_model(folder: Path) -> Path:
    """Save a model with its tokenizer, as a user's own that is loaded by name."""
    rows = [{"text": row} for row in ("a few words", "and a few more")]
    tokenizer = trained_tokenizer(rows, 300, folder.parent)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = SmolLM3Config(
        **shape, num_key_value_heads=2, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id
    )
    torch.manual_seed(0)
    SmolLM3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_moving_average_of_a_sharded_model_is_refused(tmp_path: Path) -> None:
    text = LOOP.replace("snapshot_steps=None)", "states={'average': model}, snapshot_steps=None)")
    path = tmp_path / "loop.py"
    path.write_text(text)
    result = torchrun(path, tmp_path / "c", 1, "fsdp", ranks=2)
    assert result.returncode != 0 and "'average' holds sharded tensors" in result.stderr, result.stderr


@pytest.mark.soak
def test_the_job_goes_from_sharded_to_whole_and_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for steps, strategy, ranks in ((6, "fsdp", 2), (12, "fsdp", 1), (18, "ddp", 2), (24, "fsdp", 2)):
        part = job(run, f"strategy={strategy}", f"trainer.max_steps={steps}", "trainer.lr_scheduler_type=constant")
        part.command[len(part.command) :] = ["--nproc-per-node", str(ranks), "--set", "scale_learning_rate=false"]
        assert part.start().finish() == 0, part.output
    assert [event["step"] for event in part.events("training_started")] == [0, 6, 12, 18]
    ends = [
        AutoModelForCausalLM.from_pretrained(place).state_dict() for place in (run / "best_model", part.checkpoint(24))
    ]
    assert ends[0].keys() == ends[1].keys() and all((ends[0][name] == ends[1][name]).all() for name in ends[0])
    assert len(loss_curve(part.checkpoint(24))) == 6


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["method.type=qlora"], "method.type=qlora needs a model to quantise: set model.name_or_path"),
        (["trainer.fsdp_config={}", "trainer.fsdp=true"], "set the top-level strategy: fsdp"),
        (["trainer.fsdp_config={cpu_offload: true}"], "needs strategy: fsdp"),
        (["strategy=fsdp", "trainer.fsdp_config={version: 1}"], "without version or with version: 2"),
        (["strategy=tensor"], "strategy='tensor' is not allowed"),
        (["strategy.tp=0"], "strategy.tp=0 is not allowed: use a whole number from 1"),
        (["strategy.pp=2"], "unknown key strategy.pp (value 2); use one of tp, dp_shard"),
        (["strategy={tp: 2, dp_shard: 4}"], "needs a multiple of 8 ranks, and this run has 2"),
    ],
)
def test_what_is_not_supported_is_refused(settings: list[str], text: str, tmp_path: Path) -> None:
    run = job(tmp_path / "run", *settings).start()
    assert run.finish() == 2 and text in run.output and "Traceback" not in run.output, run.output


@pytest.mark.parametrize(
    ("mesh", "ranks"), [("{tp: 2}", 2), pytest.param("{tp: 2, dp_shard: 2}", 4, marks=pytest.mark.soak)]
)
def test_the_job_on_a_mesh_is_killed_and_then_trained_whole(mesh: str, ranks: int, tmp_path: Path) -> None:
    """The ranks of a tensor parallel group compute the same samples."""
    settings = [f"strategy={mesh}", "trainer.lr_scheduler_type=constant", "data.validation_share=0.1"]
    wide = ["--nproc-per-node", str(ranks)]
    calm = job(tmp_path / "calm", *settings)
    calm.command += wide
    assert calm.start().finish() == 0, calm.output
    killed = job(tmp_path / "killed", *settings)
    killed.command += wide
    killed.start_held(10).wait_until_held()
    os.kill(killed.events("rank_started")[-1]["pid"], signal.SIGKILL)
    assert killed.finish() == 0, killed.output
    first, second = (event["step"] for event in killed.events("training_started"))
    assert first == 0 < second <= 10
    assert killed.events("batch_shape")[-1]["model_ranks"] == 2
    assert state_hash(killed.checkpoint(24)) == state_hash(calm.checkpoint(24))
    assert loss_curve(killed.checkpoint(24)) == loss_curve(calm.checkpoint(24))
    for place in ("best_model", "checkpoints/checkpoint-24"):
        weights, reference = (
            AutoModelForCausalLM.from_pretrained(run.folder / place).state_dict() for run in (killed, calm)
        )
        assert all((weights[name] == reference[name]).all() for name in reference)
    # On one rank: as many data parallel ranks, and so the same learning rate and samples, as two ranks of one group.
    alone = job(killed.folder, *settings, "strategy=ddp", "trainer.max_steps=27")
    alone.command += ["--nproc-per-node", str(ranks // 2)]
    assert alone.start().finish() == 0, alone.output
    assert alone.events("training_started")[-1]["step"] == 24


# Of one shape, since which kernels are made depends on the shapes that came before.
COMPILED = [
    *("trainer.torch_compile=true", "trainer.full_determinism=true"),
    *("trainer.max_length=128", "trainer.pad_to_multiple_of=128"),
]


@pytest.mark.parametrize(
    ("method", "further"),
    [
        ("lora", []),
        pytest.param("qlora", [], marks=pytest.mark.soak),
        pytest.param("lora", ["trainer.gradient_checkpointing=true"], marks=pytest.mark.soak),
        pytest.param("lora", COMPILED, marks=pytest.mark.soak),
    ],
    ids=["lora", "qlora", "lora-recomputed", "lora-compiled"],
)
def test_an_adapter_under_fsdp_is_killed_and_then_trained_whole(
    method: str, further: list[str], tmp_path: Path
) -> None:
    lora = [f"method.type={method}", "trainer.lr_scheduler_type=constant", "scale_learning_rate=false", *further]
    if method == "qlora":
        lora.append(f"model.name_or_path={small_model(tmp_path / 'base')}")
    calm = job(tmp_path / "calm", "strategy=fsdp", *lora)
    assert calm.start().finish() == 0, calm.output
    killed = job(tmp_path / "killed", "strategy=fsdp", *lora).start_held(10)
    killed.wait_until_held()
    os.kill(killed.events("rank_started")[-1]["pid"], signal.SIGKILL)
    assert killed.finish() == 0, killed.output
    first, second = (event["step"] for event in killed.events("training_started"))
    assert first == 0 < second <= 10
    assert state_hash(killed.checkpoint(24)) == state_hash(calm.checkpoint(24))
    assert loss_curve(killed.checkpoint(24)) == loss_curve(calm.checkpoint(24))
    if method == "lora":
        # The base was built for this run: the adapter is merged into it.
        model = load_file(killed.folder / "best_model" / "model.safetensors")
        assert not [name for name in model if "lora" in name] and "lm_head.weight" not in model
    AutoModelForCausalLM.from_pretrained(killed.folder / "best_model")
    # The same base, although no rank has held all of it; and the adapter, on one rank.
    alone = job(killed.folder, *lora, "trainer.max_steps=27")
    alone.command += ["--nproc-per-node", "1"]
    assert alone.start().finish() == 0, alone.output
    assert alone.events("training_started")[-1]["step"] == 24


# The global batch of two ranks.
HALVES = "trainer.per_device_train_batch_size=2"


def two_machines(
    folder: Path, hold: int | None = None, strategy: str = "fsdp", ranks: int = 2, further: tuple[str, ...] = ()
) -> tuple[Run, Run]:
    """Start two runners on one host, as if on two; with `fsdp` the ranks of each hold the whole model between them.

    With `hold`, a rank of the first runner blocks after that step, and so all ranks do.
    """
    port, settings = free_port(), [f"strategy={strategy}", f"checkpoint.location={folder / 'checkpoints'}", HALVES]
    settings += further
    settings += ["restart.hang_timeout_s=600"] if hold is not None else []
    runs = [job(folder / name, *settings) for name in ("first", "second")]
    for number, run in enumerate(runs):
        run.command += ["--nnodes", "2", "--nproc-per-node", str(ranks), "--node-rank", str(number)]
        run.command += ["--rdzv-endpoint", f"localhost:{port}", "--set", f"launch.peer_port={free_port()}"]
    runs[1].command[-1] = runs[0].command[-1]
    first, second = runs
    return first.start() if hold is None else first.start_held(hold), second.start()


@pytest.mark.soak
def test_sharded_within_machines_and_replicated_between_them(tmp_path: Path) -> None:
    calm = two_machines(tmp_path / "calm")
    assert [run.finish() for run in calm] == [0, 0], calm[0].output + calm[1].output
    first, second = two_machines(tmp_path / "killed", hold=10)
    first.wait_until_held()
    # torchrun chooses which ranks the node has.
    os.kill(Run(second.folder / "node-1").events("rank_started")[-1]["pid"], signal.SIGKILL)
    assert [first.finish(), second.finish()] == [0, 0], first.output + second.output
    assert len(first.events("attempt_started")) == 2
    ends = [folder / "checkpoints" / "checkpoint-24" for folder in (tmp_path / "calm", tmp_path / "killed")]
    assert state_hash(ends[0]) == state_hash(ends[1])
    # Two ranks on one machine resume from the checkpoint of four ranks on two.
    alone = job(tmp_path / "alone", "strategy=ddp", "trainer.max_steps=27", f"checkpoint.location={ends[1].parent}")
    assert alone.start().finish() == 0, alone.output
    assert alone.events("training_started")[0]["step"] == 24


def check_shorter_export(location: Path, step: int, exported: Path) -> None:
    """What `--dtype` makes of shards is what transformers makes of the whole model."""
    target = exported.with_name("bf16")
    options = ["--dtype", "bf16", "--max-shard-size", "100kB"]
    done = run_command("checkpoints", "export", str(location), str(step), str(target), *options)
    assert done.returncode == 0 and len(list(target.glob("model-*.safetensors"))) > 1, done.stderr
    stock = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.bfloat16).state_dict()
    found = AutoModelForCausalLM.from_pretrained(target).state_dict()
    assert found.keys() == stock.keys() and all(torch.equal(value, stock[name]) for name, value in found.items())


@pytest.mark.soak
def test_sharded_over_all_machines(tmp_path: Path) -> None:
    """No machine holds the whole model: both write each checkpoint, and read it."""
    calm = two_machines(tmp_path / "calm", strategy="fsdp_all_nodes", ranks=1)
    assert [run.finish() for run in calm] == [0, 0], calm[0].output + calm[1].output
    first, second = two_machines(tmp_path / "killed", hold=10, strategy="fsdp_all_nodes", ranks=1)
    first.wait_until_held()
    os.kill(Run(second.folder / "node-1").events("rank_started")[-1]["pid"], signal.SIGKILL)
    assert [first.finish(), second.finish()] == [0, 0], first.output + second.output
    assert len(first.events("attempt_started")) == 2 and first.events("commit_failed") == []
    # Each rank found what it held in the memory of its node.
    assert [event["source"] for event in first.events("resumed")] == ["memory"]
    ends = [folder / "checkpoints" / "checkpoint-24" for folder in (tmp_path / "calm", tmp_path / "killed")]
    assert not (ends[1] / "model.safetensors").exists()
    exported = []
    for number, end in enumerate(ends):
        exported.append(tmp_path / f"exported-{number}" / "checkpoint-24")
        export_checkpoint(LocalStorage(end.parent), 24, exported[-1])
    assert state_hash(exported[0]) == state_hash(exported[1])
    assert AutoModelForCausalLM.from_pretrained(exported[1]).num_parameters() > 0
    check_shorter_export(ends[1].parent, 24, exported[1])
    # One rank resumes from the shards of two.
    alone = job(tmp_path / "alone", "strategy=ddp", "trainer.max_steps=27", f"checkpoint.location={ends[1].parent}")
    alone.command += ["--nproc-per-node", "1"]
    assert alone.start().finish() == 0, alone.output
    assert alone.events("training_started")[0]["step"] == 24


@pytest.mark.soak
@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp", 2), ("fsdp_all_nodes", 1)])
def test_an_adapter_over_several_machines(strategy: str, ranks: int, tmp_path: Path) -> None:
    """Replicated between the machines, or sharded over them."""
    lora = ("method.type=lora", "trainer.lr_scheduler_type=constant", "scale_learning_rate=false")
    calm = two_machines(tmp_path / "calm", None, strategy, ranks, lora)
    assert [run.finish() for run in calm] == [0, 0], calm[0].output + calm[1].output
    first, second = two_machines(tmp_path / "killed", 10, strategy, ranks, lora)
    first.wait_until_held()
    os.kill(Run(second.folder / "node-1").events("rank_started")[-1]["pid"], signal.SIGKILL)
    assert [first.finish(), second.finish()] == [0, 0], first.output + second.output
    assert 0 < first.events("resumed")[-1]["step"] <= 10
    bases = [tmp_path / name for name in ("calm", "killed")]
    ends = [base / "checkpoints" / "checkpoint-24" for base in bases]
    if strategy == "fsdp_all_nodes":
        for number, end in enumerate(ends):
            ends[number] = tmp_path / f"exported-{number}" / "checkpoint-24"
            export_checkpoint(LocalStorage(end.parent), 24, ends[number])
    assert state_hash(ends[0]) == state_hash(ends[1])
    AutoModelForCausalLM.from_pretrained(first.folder / "best_model")
    location = f"checkpoint.location={bases[1] / 'checkpoints'}"
    alone = job(tmp_path / "alone", "strategy=ddp", *lora, "trainer.max_steps=27", location)
    alone.command += ["--nproc-per-node", "1"]
    assert alone.start().finish() == 0, alone.output
    assert alone.events("training_started")[0]["step"] == 24
