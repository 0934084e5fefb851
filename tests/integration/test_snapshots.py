"""Snapshots during training: never torn, never blocking, and resumed from after the attempt that made them died."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from infra.parts import lacks, needs
from integration.support import Run, loss_curve, script, state_hash, wait_for_commit, wait_until

from checkpointing.storage import LocalStorage

TORN = """
import hashlib, json, sys, torch
from checkpointing import CheckpointManager
from torch.optim.swa_utils import AveragedModel

folder, count, overlap = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "overlap"
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(100, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 100))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=FUSED)
average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)
manager = CheckpointManager(
    folder, model=model, optimizer=optimizer, states={"average": average}, snapshot_steps=None, overlap=overlap,
    keep_last=None)
manager.resume()

def digest():
    value = hashlib.sha256()
    states = {**model.state_dict(), **{"average." + k: v for k, v in average.state_dict().items()}}
    for index, state in enumerate(optimizer.state.values()):
        states.update({f"{index}.{name}": tensor for name, tensor in state.items()})
    for name, tensor in sorted(states.items()):
        value.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return value.hexdigest()

for parameter in model.parameters():
    parameter.grad = torch.randn_like(parameter)
expected = {}
for step in range(1, count + 1):
    optimizer.step()
    expected[step] = digest()
    manager.end_of_step(step)
    manager.save(step, step, wait=True)
    # Everything that may legally change before the next optimizer step does, at once.
    average.update_parameters(model)
    with torch.no_grad():
        model(torch.randn(4, 100))
manager.close()
json.dump(expected, open(folder + "/expected.json", "w"))
"""

READ_BACK = """
import hashlib, json, sys, torch
from safetensors.torch import load_file

folder = sys.argv[1]
expected = json.load(open(folder + "/expected.json"))
wrong = []
for step, digest in expected.items():
    place = f"{folder}/checkpoint-{step}"
    value = hashlib.sha256()
    states = load_file(place + "/model.safetensors")
    average = torch.load(place + "/average.pt", weights_only=True)
    states.update({"average." + name: tensor for name, tensor in average.items()})
    for index, state in torch.load(place + "/optimizer.pt", weights_only=True)["state"].items():
        states.update({f"{index}.{name}": tensor for name, tensor in state.items()})
    for name, tensor in sorted(states.items()):
        value.update(name.encode() + tensor.contiguous().numpy().tobytes())
    if value.hexdigest() != digest:
        wrong.append(step)
print(len(expected), "checked")
assert not wrong, f"{len(wrong)} of {len(expected)} checkpoints are not the state of one step: {wrong[:10]}"
"""


@pytest.mark.parametrize(
    ("fused", "count"),
    [(True, 250), *(pytest.param(fused, 1000, marks=pytest.mark.soak) for fused in (True, False))],
)
def test_no_snapshot_is_ever_torn(fused: bool, count: int, tmp_path: Path) -> None:
    """The state changes as fast as it can; every checkpoint equals a synchronous copy of exactly its step."""
    for name, text in (("write.py", TORN.replace("FUSED", str(fused))), ("read.py", READ_BACK)):
        (tmp_path / name).write_text(text)
    folder = str(tmp_path / "checkpoints")
    arguments = [folder, str(count), "overlap"]
    subprocess.run([sys.executable, str(tmp_path / "write.py"), *arguments], check=True, timeout=300)
    result = subprocess.run(
        [sys.executable, str(tmp_path / "read.py"), folder], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == f"{count} checked"


def snapshotting_script(folder: Path, prelude: str = "", options: str = "snapshot_steps=1") -> list[str]:
    """The plain script, with snapshots in memory and a commit at every 10th step."""
    lines = script(folder, crawl=30)
    path = Path(lines[0])
    text = path.read_text().replace("train_dataset=rows))", f"train_dataset=rows), {options})")
    path.write_text(prelude + text)
    return lines


def kill_all_ranks(run: Run) -> None:
    pids = [run.rank_pid(rank) for rank in (0, 1)]
    os.kill(pids[0], signal.SIGKILL)
    # The supervisor may have been quicker.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pids[1], signal.SIGKILL)


def wait_for_snapshot(run: Run, step: int) -> None:
    """Until one of at least this step is in memory: an agent that is busy passes one over."""
    wait_until(run, lambda: any(event["step"] >= step for event in run.events("snapshot")))


def newest_snapshot(run: Run) -> int:
    """Of attempt 1."""
    step: int = max(event["step"] for event in run.events("snapshot") if event["attempt"] == 1)
    return step


def assert_same_result(run: Run, untouched: Run) -> None:
    assert state_hash(run.checkpoint(60)) == state_hash(untouched.checkpoint(60))
    assert loss_curve(run.checkpoint(60)) == loss_curve(untouched.checkpoint(60))


def test_killed_between_copy_and_write_goes_on_from_memory(tmp_path: Path, untouched_script: Run) -> None:
    """Every step is held in memory, every tenth is written: a death at any other loses nothing."""
    run = Run(tmp_path / "run", script=snapshotting_script(tmp_path)).start()
    wait_for_snapshot(run, 25)
    kill_all_ranks(run)
    assert run.finish() == 0, run.output
    resumed = run.events("resumed")
    assert len(resumed) == 1 and resumed[0]["source"] == "memory" and resumed[0]["step"] >= 25
    assert newest_snapshot(run) == resumed[0]["step"]
    # The agent has made a checkpoint of it too.
    assert resumed[0]["step"] in [event["step"] for event in run.events("committed")]
    assert "(in-memory snapshot)" in run.output
    assert_same_result(run, untouched_script)
    assert not run.leftovers()


STUCK_COPY = """
import os, time
import checkpointing.snapshot.snapshot_copy as snapshot_maker
from checkpointing.host.environment import rank_settings
make, copy_tensors, copied = snapshot_maker.SnapshotCopy.make, snapshot_maker.file_images.copy_tensors, []
def noted(self, pending, *arguments):
    copied.append(pending.request.step)
    make(self, pending, *arguments)
def stuck(parts, *arguments):
    # In attempt 1, the copy of step 25, or the next that is made, never ends: half of the bytes are there.
    if rank_settings().attempt == 1 and parts and copied[-1] >= 25:
        copy_tensors(parts[: len(parts) // 2], *arguments)
        open({marker!r} + os.environ["RANK"], "w").close()
        time.sleep(600)
    copy_tensors(parts, *arguments)
snapshot_maker.SnapshotCopy.make, snapshot_maker.file_images.copy_tensors = noted, stuck
"""


@pytest.mark.soak
def test_killed_during_the_copy_goes_on_from_the_snapshot_before(tmp_path: Path, untouched_script: Run) -> None:
    marker = str(tmp_path / "stuck-")
    lines = snapshotting_script(tmp_path, STUCK_COPY.format(marker=marker))
    run = Run(tmp_path / "run", "--set", "restart.hang_timeout_s=600", script=lines).start()
    wait_until(run, lambda: all(Path(marker + str(rank)).exists() for rank in (0, 1)))
    kill_all_ranks(run)
    assert run.finish() == 0, run.output
    before = newest_snapshot(run)
    assert [(event["source"], event["step"]) for event in run.events("resumed")] == [("memory", before)]
    assert before < 25 <= run.events("snapshot_dropped")[0]["step"]
    assert_same_result(run, untouched_script)


@pytest.mark.soak
def test_a_dead_agent_takes_its_memory_along_and_storage_is_read(tmp_path: Path, untouched_script: Run) -> None:
    run = Run(tmp_path / "run", script=snapshotting_script(tmp_path)).start()
    wait_for_snapshot(run, 25)
    wait_for_commit(run, 10)
    os.kill(run.agent_pid(), signal.SIGKILL)
    assert run.finish() == 0, run.output
    assert [event["source"] for event in run.events("resumed")] == ["local"]
    assert_same_result(run, untouched_script)


FLIPPED_BIT = """
import os
import checkpointing.agent.client as client
offer = client.AgentClient.offer
def flipped(self, *arguments, **options):
    offered = offer(self, *arguments, **options)
    for snapshot in offered.snapshots:
        snapshot.files["optimizer.pt"][4096] ^= 1
    return offered
if os.environ["RANK"] == "1":
    client.AgentClient.offer = flipped
"""


def test_a_bit_that_flips_in_memory_is_seen_and_storage_is_read(tmp_path: Path, untouched_script: Run) -> None:
    run = Run(tmp_path / "run", script=snapshotting_script(tmp_path, FLIPPED_BIT)).start()
    wait_for_snapshot(run, 25)
    kill_all_ranks(run)
    assert run.finish() == 0, run.output
    assert run.events("snapshot_damaged")
    assert run.events("resumed")[-1]["source"] == "local"
    assert_same_result(run, untouched_script)


@pytest.mark.soak
def test_too_little_memory_for_a_snapshot_writes_while_training_waits(tmp_path: Path, untouched_script: Run) -> None:
    run = Run(tmp_path / "run", "--set", "checkpoint.memory_limit=100kB", script=snapshotting_script(tmp_path)).start()
    wait_until(run, lambda: run.events("committed"))
    kill_all_ranks(run)
    assert run.finish() == 0, run.output
    assert "memory for snapshots is short" in run.output
    assert not run.events("snapshot")
    assert [event["source"] for event in run.events("resumed")] == ["local"]
    assert_same_result(run, untouched_script)


DRIFT = """
import os
from checkpointing.host.environment import rank_settings
from transformers import TrainerCallback
import torch
class Drift(TrainerCallback):
    def on_step_end(self, args, state, control, model, **_):
        if state.global_step == 25 and os.environ["RANK"] == "1" and rank_settings().attempt == 1:
            with torch.no_grad():
                next(iter(model.parameters())).view(-1)[3] += 1e-3
"""


@pytest.mark.soak
def test_replicas_that_drift_apart_make_no_checkpoint(tmp_path: Path, untouched_script: Run) -> None:
    lines = snapshotting_script(tmp_path, DRIFT, "snapshot_steps=None")
    path = Path(lines[0])
    path.write_text(
        path.read_text().replace("trainer.add_callback(", "trainer.add_callback(Drift()); trainer.add_callback(")
    )
    run = Run(tmp_path / "run", script=lines).start()
    assert run.finish() == 0, run.output
    ends = run.events("attempt_ended")
    assert len(ends) == 2 and "ReplicasDrifted" in ends[0]["cause"] and "embed_tokens" in ends[0]["cause"]
    assert [(e["source"], e["step"]) for e in run.events("resumed")] == [("memory", 20)]
    assert_same_result(run, untouched_script)


CHANGES_STATE = """
import torch
from checkpointing import CheckpointManager
model = torch.nn.Linear(1000, 1000)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
manager = CheckpointManager(FOLDER, model=model, optimizer=optimizer, snapshot_steps=None)
for step in range(manager.resume(), 6):
    model(torch.randn(2, 1000)).sum().backward()
    optimizer.step()
    manager.save(step + 1, step + 1, wait=True)
    with torch.no_grad():
        model.weight.mul_(0.5)  # behind the optimizer's back
manager.close()
"""


CHANGES_STATE_AT_TIMES = """
import os, sys, time, torch, torch.distributed as dist
from checkpointing import CheckpointManager
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(100, 100)
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
manager = CheckpointManager(sys.argv[1], model=ddp, optimizer=optimizer, snapshot_steps=None)
for step in range(manager.resume(), 6):
    ddp(torch.ones(2, 100)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    manager.save(step + 1, step + 1, wait=True)
    time.sleep(0.5 * rank)
    with torch.no_grad():
        model.weight.mul_(0.5)  # as a schedule-free optimizer does for an evaluation
manager.close()
"""


@pytest.mark.soak
def test_ranks_that_change_their_state_at_different_times_have_not_drifted(tmp_path: Path) -> None:
    """What one rank had changed already, and the other had not, was taken for replicas that differ."""
    (tmp_path / "train.py").write_text(CHANGES_STATE_AT_TIMES)
    command = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"]
    command += [str(tmp_path / "train.py"), str(tmp_path / "checkpoints")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0 and "ReplicasDrifted" not in result.stderr, result.stderr
    assert "changed in place" in result.stderr, "the race was not even met"
    assert LocalStorage(tmp_path / "checkpoints").steps()[-1] == 6


def test_state_that_changes_behind_the_optimizers_back_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CHANGES_STATE.replace("FOLDER", repr(str(tmp_path / "checkpoints"))))
    result = subprocess.run(
        [sys.executable, str(tmp_path / "train.py")], capture_output=True, text=True, timeout=100, check=True
    )
    committed = sorted(int(path.name.split("-")[1]) for path in (tmp_path / "checkpoints").glob("checkpoint-*"))
    assert "changed in place" in result.stderr, "the race was not even met"
    # The snapshots in question are dropped; from then on the copy blocks, and those are whole.
    assert committed[-1] == 6 and len(committed) in range(3, 6)


@contextlib.contextmanager
def throttled(pid: int, bytes_per_s: int) -> Iterator[None]:
    """Limit a process's writes to the disk under /tmp, by the kernel's own means."""
    group = Path(f"/sys/fs/cgroup/blkio/checkpoint-test-{os.getpid()}")
    try:
        group.mkdir()
        device = Path("/tmp").stat().st_dev
        rule = f"{os.major(device)}:{os.minor(device)} {bytes_per_s}"
        (group / "blkio.throttle.write_bps_device").write_text(rule)
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        lacks("blkio cgroup", error)
    try:
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with contextlib.suppress(OSError):
            (group.parent / "cgroup.procs").write_text(str(pid))
        group.rmdir()


SLOW_DISK = """
import os, sys, time, torch
from checkpointing import CheckpointManager
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)])
optimizer = torch.optim.AdamW(model.parameters())
manager = CheckpointManager(model=model, optimizer=optimizer, snapshot_steps=None, save_steps=2)
start = manager.resume()
print("ready", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
for step in range(start, 60):
    model(torch.randn(64, 1024)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    manager.step(step + 1)
with open(sys.argv[1] + ".writing", "w") as file:
    file.write(str(time.time()))
os.rename(sys.argv[1] + ".writing", sys.argv[1] + ".end")  # who sees the name finds the time in it
manager.close()
"""


@needs("blkio cgroup")
@pytest.mark.soak
def test_a_slow_disk_skips_snapshots_and_holds_no_step_up(tmp_path: Path) -> None:
    """100 MB of state at 20 MB/s, a save every 2 steps: the disk would need 150 s for all of them."""
    (tmp_path / "train.py").write_text(SLOW_DISK)
    command = [str(tmp_path / "train.py"), str(tmp_path / "go")]
    run = Run(tmp_path / "run", "--nproc-per-node", "1", script=command)
    run.start()
    wait_until(run, lambda: run.events("rank_started"))
    with throttled(run.agent_pid(), 20_000_000):
        began = time.time()
        (tmp_path / "go").touch()
        wait_until(run, (tmp_path / "go.end").exists)
        trained_s = float((tmp_path / "go.end").read_text()) - began
    assert run.finish() == 0, run.output
    skipped = [event["step"] for event in run.events("snapshot_skipped")]
    committed = [event["step"] for event in run.events("committed")]
    assert sorted({*skipped, *committed}) == list(range(2, 61, 2))
    assert (
        set(skipped) & set(committed) <= {60} and committed[-1] == 60
    )  # close() makes up for the last, and for no other
    assert len(skipped) > 15
    assert trained_s < 75


LARGE = """
import os, sys, time
import torch, torch.distributed as dist
import checkpointing.agent.client as client, checkpointing.format.digest as digest
import checkpointing.resume.verified_read as verified_read
from checkpointing import CheckpointManager
from checkpointing.host.environment import rank_settings

folder, flips = sys.argv[1], sys.argv[2] == "flipped"
rank, offer, digested = os.environ["RANK"], client.AgentClient.offer, []
def flipped(self, *arguments, **options):
    offered = offer(self, *arguments, **options)
    for snapshot in offered.snapshots:
        # In the third part, which rank 0 looks at, as ranks take turns.
        snapshot.files["model.safetensors"][2 * digest.PART_BYTES + 77] ^= 1
    return offered
def noted(buffer, numbers, num_threads):
    if len(buffer) > digest.PART_BYTES:
        digested.extend(numbers)
    return digest.part_digests(buffer, numbers, num_threads)
verified_read.part_digests = noted
if flips and rank == "1":
    client.AgentClient.offer = flipped
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(5000, 5000)
manager = CheckpointManager("unused", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                            snapshot_steps=5, save_steps=5)
start = manager.resume(total_steps=12)
open(f"{folder}/digested-{rank}-{rank_settings().attempt}", "w").write(str(digested))
for step in range(start + 1, 13):
    with torch.no_grad():
        model.weight.add_(1)
        model.bias.add_(step)
    manager.step(step)
    while step == 10 and rank_settings().attempt == 1:
        open(f"{folder}/held-{rank}", "w").close()
        time.sleep(0.1)
manager.close()
if rank == "0":
    torch.save(model.state_dict(), f"{folder}/final.pt")
"""


@pytest.mark.soak
@pytest.mark.parametrize("flips", ["whole", "flipped"])
def test_ranks_of_a_node_verify_a_share_of_what_they_see_together(flips: str, tmp_path: Path) -> None:
    path = tmp_path / "large.py"
    path.write_text(LARGE)
    run = Run(tmp_path / "run", "--set", "restart.hang_timeout_s=600", script=[str(path), str(tmp_path), flips]).start()
    wait_until(run, lambda: all((tmp_path / f"held-{rank}").exists() for rank in (0, 1)))
    wait_for_commit(run, 10)
    kill_all_ranks(run)
    assert run.finish() == 0, run.output
    torch.manual_seed(0)
    expected = torch.nn.Linear(5000, 5000)
    with torch.no_grad():
        for step in range(1, 13):
            expected.weight.add_(1)
            expected.bias.add_(step)
    found = torch.load(tmp_path / "final.pt", weights_only=True)
    assert all(torch.equal(found[name], value) for name, value in expected.state_dict().items())
    sources = [event["source"] for event in run.events("resumed")]
    if flips == "flipped":
        # Rank 1 has met the flipped bit; rank 0 has found it, in its own share.
        assert sources == ["local"] and run.events("snapshot_damaged")
    else:
        assert sources == ["memory"]
        assert [(tmp_path / f"digested-{rank}-2").read_text() for rank in (0, 1)] == ["[0, 2]", "[1]"]
