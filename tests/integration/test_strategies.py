"""Every way to share a model among ranks: killed, resumed in the same bits, and resumed in another."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from infra.ports import free_port
from infra.torchrun import torchrun
from integration.support import Run

LOOP = """
import hashlib, os, signal, sys, torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from checkpointing import CheckpointManager
from checkpointing.files.sharding import Fragment, gathered

folder, steps, strategy, last = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 5)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(5, 10), torch.nn.ReLU(), torch.nn.Linear(10, 5)) for _ in range(2)
        )
        self.dropout = torch.nn.Dropout(0.1)
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + self.dropout(layer(hidden))
        return self.head(hidden)

model = trained = Model()
replica = rank
if "tp" in strategy:
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    replica = mesh.get_local_rank("dp")
    plan = {f"layers.{n}.{m}": style() for n in range(2) for m, style in ((0, ColwiseParallel), (2, RowwiseParallel))}
    parallelize_module(model, mesh["tp"], plan)
if "checkpointing" in strategy:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, torch.nn.Sequential))
if "sdp" in strategy:
    shards = mesh["dp"] if "tp" in strategy else init_device_mesh("cpu", (size,))
    if strategy == "hsdp":
        shards = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=shards)
    fully_shard(model, mesh=shards)
if "compile" in strategy:
    for layer in model.layers:
        layer.compile()
if strategy == "ddp":
    trained = torch.nn.parallel.DistributedDataParallel(model)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine = None
if "zero" in strategy:
    import deepspeed
    # A shared memory transport that it would compile first.
    deepspeed.ops.__compatible_ops__.clear()
    deepspeed.init_distributed("gloo")
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
    config["zero_optimization"] = {"stage": int(strategy[5])}
    if "offload" in strategy:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        config["zero_force_ds_cpu_optimizer"] = False
    if "bf16" in strategy:
        config["bf16"] = {"enabled": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    trained = engine
manager = CheckpointManager(folder, model=engine or model, optimizer=optimizer, snapshot_steps=None)

def whole(value):
    if not isinstance(value, Fragment):
        return gathered(value).detach()
    found = torch.zeros(value.shape, dtype=value.dtype)
    found.view(-1)[value.first : value.last] = value.tensor
    dist.all_reduce(found)
    return found

def state_digest():
    # Of all elements of the parameters and of the optimizer's state, whatever rank holds them.
    kind = manager._tracked.state.kind
    own = kind.optimizer.state_dict()["state"]
    state = model.state_dict(keep_vars=True) | kind.masters
    # Tied to the embedding; with 16 bits, only one of the names has a copy in full precision.
    del state["head.weight"]
    state |= {f"{number} {name}": own[number][name] for number in own for name in own[number]}
    sha = hashlib.sha256()
    for name in sorted(state):
        flat = whole(state[name]).contiguous().reshape(-1).view(torch.uint8)
        sha.update(name.encode() + flat.numpy().tobytes())
    return sha.hexdigest()

def report(word, step):
    digest = state_digest()
    if rank == 0:
        print(word, step, digest, flush=True)

start = manager.resume()
report("START", start)
for step in range(start, steps):
    tokens = (torch.arange(7)[None] * (step + 1) + replica) % 7
    loss = torch.nn.functional.cross_entropy(trained(tokens)[0].float(), tokens[0].roll(1))
    if engine is not None:
        engine.backward(loss)
        engine.step()
    else:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    manager.end_of_step(step + 1)
    manager.save(step + 1, step + 1, wait=True)
    if step + 1 == last:
        report("KILLED", last)
        manager.wait_for_commit()
        os.kill(os.getpid(), signal.SIGKILL)
manager.wait_for_commit()
report("END", steps)
manager.close()
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Strategy:
    """A strategy of the loop, and the number of nodes and of the ranks of each."""

    name: str
    ranks: int
    nodes: int = 1

    def __str__(self) -> str:
        return f"{self.name}-{self.nodes}x{self.ranks}"


FSDP_TP = Strategy("fsdp + tp", 4)
# No node holds all of the state.
SPREAD = Strategy("fsdp", 1, nodes=2)
ZERO_3 = Strategy("zero 3", 2)
# Computed in 16 bits; the state of another strategy continues in full precision.
IN_16_BITS = [Strategy(f"zero {stage}, bf16", 2) for stage in (1, 2, 3)]
OTHERS = [
    Strategy("ddp", 2),
    Strategy("zero 1", 3),
    Strategy("fsdp", 3),
    Strategy("fsdp + tp", 2, nodes=2),
    Strategy("zero 2", 2),
    Strategy("zero 2, offload", 2),
    Strategy("fsdp, checkpointing", 2),
    Strategy("zero 3", 1, nodes=2),
    Strategy("fsdp", 2, nodes=2),
    Strategy("fsdp, compile", 2),
    Strategy("hsdp", 4),
    Strategy("tp", 1, nodes=2),
    Strategy("tp", 2),
    Strategy("hsdp", 1, nodes=4),
]


@dataclass(frozen=True)
class Training:
    """What a training printed: at which step, and with which state, it started and ended."""

    start: int
    started_with: str
    ended_with: str


def train(folder: Path, strategy: Strategy, steps: int, *, last: int = 0) -> Training:
    """Train up to a step; with `last`, all ranks are killed after that step."""
    path = folder / "loop.py"
    folder.mkdir(exist_ok=True)
    path.write_text(LOOP)
    ended = torchrun(path, folder / "run", steps, strategy.name, last, ranks=strategy.ranks, nodes=strategy.nodes)
    assert all((code != 0) == (last > 0) for code in ended.codes), ended.stderr[-8000:]
    words = [line.split() for line in ended.stdout.splitlines() if line[:3] in ("STA", "KIL", "END")]
    (_, start, started_with), (_, _, ended_with) = words
    return Training(int(start), started_with, ended_with)


@pytest.mark.parametrize(
    "strategy",
    [SPREAD, *(pytest.param(other, marks=pytest.mark.soak) for other in (FSDP_TP, ZERO_3, *OTHERS, *IN_16_BITS))],
    ids=str,
)
def test_a_killed_rank_costs_no_bit(strategy: Strategy, tmp_path: Path) -> None:
    calm = train(tmp_path / "calm", strategy, 6)
    killed = train(tmp_path / "killed", strategy, 6, last=4)
    resumed = train(tmp_path / "killed", strategy, 6)
    assert (resumed.start, resumed.started_with, resumed.ended_with) == (4, killed.ended_with, calm.ended_with)
    if strategy is SPREAD:
        # One rank reads all of the shards.
        alone = train(tmp_path / "killed", Strategy("ddp", 1), 7)
        assert (alone.start, alone.started_with) == (6, calm.ended_with)


# One rank dies; snapshots are made of every step, of which none is committed after the second.
KILLED_ONCE = LOOP.replace("snapshot_steps=None", "snapshot_steps=1").replace(
    "manager.save(step + 1, step + 1, wait=True)", "manager.save(step + 1, step + 1, wait=True, commit=step == 1)"
)
KILLED_ONCE = KILLED_ONCE.replace(
    """        report("KILLED", last)
        manager.wait_for_commit()
        os.kill(os.getpid(), signal.SIGKILL)
""",
    """        manager._node.snapshots.settle()
        dist.barrier()
        if rank == size - 1 and start == 0:
            os.kill(os.getpid(), signal.SIGKILL)
""",
).replace("print(word, step, digest, flush=True)", "print(word, step, digest, file=open(f'{folder}.{word}', 'a'))")


@pytest.mark.parametrize(
    "strategy",
    [
        SPREAD,
        *(
            pytest.param(Strategy(name, ranks, nodes=2), marks=pytest.mark.soak)
            for name, ranks in (("fsdp + tp", 2), ("tp", 1), ("zero 3", 1), ("hsdp", 2))
        ),
    ],
    ids=str,
)
def test_when_a_rank_dies_all_resume_from_the_memory_of_their_nodes(strategy: Strategy, tmp_path: Path) -> None:
    """A checkpoint of that step, which all nodes begin to write then, is not waited for."""
    calm = train(tmp_path / "calm", strategy, 6)
    path = tmp_path / "loop.py"
    path.write_text(KILLED_ONCE)
    port, peer_port, runs = free_port(), free_port(), []
    for number in range(2):
        options = ["--nnodes", "2", "--nproc-per-node", str(strategy.ranks), "--node-rank", str(number)]
        options += ["--rdzv-endpoint", f"localhost:{port}", "--set", f"launch.peer_port={peer_port}"]
        options += ["--set", f"checkpoint.location={tmp_path / 'checkpoints'}"]
        script = [str(path), str(tmp_path / "out"), "6", strategy.name, "4"]
        runs.append(Run(tmp_path / f"node-{number}", *options, script=script).start())
    assert [run.finish() for run in runs] == [0, 0], runs[0].output + runs[1].output
    first = runs[0]
    assert [(event["step"], event["source"]) for event in first.events("resumed")] == [(4, "memory")]
    assert [event["kind"] for event in first.events("attempt_ended")] == ["crashed", "finished"]
    (start, again), (end,) = ((tmp_path / f"out.{word}").read_text().split("\n")[:-1] for word in ("START", "END"))
    assert again.startswith("START 4 ") and start.startswith("START 0 ")
    assert end == f"END 6 {calm.ended_with}"


# The last node, which need not have the last ranks, dies when another one holds a copy of its shards.
NODE_LOST = KILLED_ONCE.replace(
    """        if rank == size - 1 and start == 0:
            os.kill(os.getpid(), signal.SIGKILL)""",
    """        import psutil
        (node,) = (parent for parent in psutil.Process().parents() if {"start", "--resume"} < set(parent.cmdline()))
        if start == 0 and "--node-rank LAST" in " ".join(node.cmdline()):
            for process in (node, *node.children(recursive=True)):
                if process.pid != os.getpid():
                    process.kill()
            os.kill(os.getpid(), signal.SIGKILL)""",
).replace(
    "        dist.barrier()\n",
    "        if start == 0:\n            manager._node.snapshots._maker.buddies.close()\n        dist.barrier()\n",
)


@pytest.mark.parametrize(
    ("strategy", "is_replaced"),
    [
        (Strategy("fsdp", 2, nodes=2), True),
        (SPREAD, False),
        *(
            pytest.param(Strategy(name, ranks, nodes=2), True, marks=pytest.mark.soak)
            for name, ranks in (("fsdp + tp", 2), ("tp", 1), ("zero 3", 1))
        ),
        pytest.param(Strategy("zero 3", 1, nodes=2), False, marks=pytest.mark.soak),
        pytest.param(Strategy("fsdp", 2, nodes=3), False, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_a_node_that_is_lost_costs_no_snapshot(strategy: Strategy, is_replaced: bool, tmp_path: Path) -> None:
    """Its shards are read from the node that keeps a copy of them: by a new node, or by those that are left."""
    calm = train(tmp_path / "calm", strategy, 6)
    path = tmp_path / "loop.py"
    path.write_text(NODE_LOST.replace("LAST", str(strategy.nodes - 1)))
    port, peer_port = free_port(), free_port()

    def start(number: int, name: str) -> Run:
        nodes = f"{strategy.nodes - (not is_replaced)}:{strategy.nodes}"
        options = ["--nnodes", nodes, "--nproc-per-node", str(strategy.ranks), "--node-rank", str(number)]
        options += ["--rdzv-endpoint", f"localhost:{port}", "--set", f"launch.peer_port={peer_port}"]
        options += ["--set", f"checkpoint.location={tmp_path / 'checkpoints'}"]
        script = [str(path), str(tmp_path / "out"), "6", strategy.name, "4"]
        return Run(tmp_path / name, *options, script=script).start()

    runs = [start(number, f"node-{number}") for number in range(strategy.nodes)]
    assert runs[-1].finish() == -signal.SIGKILL, runs[-1].output
    if is_replaced:
        runs[-1] = start(strategy.nodes - 1, "replacement")
    else:
        runs.pop()
    assert [run.finish() for run in runs] == [0] * len(runs), "".join(run.output for run in runs)
    first = runs[0]
    assert [(event["step"], event["source"]) for event in first.events("resumed")] == [(4, "memory")]
    again, (end,) = ((tmp_path / f"out.{word}").read_text().split("\n")[:-1] for word in ("START", "END"))
    assert again[-1].startswith("START 4 ") and len(again) == 2
    if is_replaced:
        assert end == f"END 6 {calm.ended_with}"
    else:
        # What follows is computed on other ranks; what it starts from is the same.
        before = train(tmp_path / "before", strategy, 4)
        assert again[-1] == f"START 4 {before.ended_with}"


@pytest.mark.soak
def test_a_checkpoint_is_resumed_by_every_other_strategy(tmp_path: Path) -> None:
    """Each reads what the one before has written, element for element: whole files, or shards."""
    before = train(tmp_path / "chain", SPREAD, 1)
    for number, strategy in enumerate([FSDP_TP, *OTHERS, ZERO_3, SPREAD, *IN_16_BITS, FSDP_TP], 1):
        now = train(tmp_path / "chain", strategy, number + 1)
        assert (now.start, now.started_with) == (number, before.ended_with), strategy
        before = now
