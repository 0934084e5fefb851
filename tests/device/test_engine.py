"""The engine on a device whose memory the host may not read, and whose streams run late (`tests/second_device`).

    python -m pytest -m device

In processes of their own: once it is loaded, torch has an accelerator.
"""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small_training import SmallTraining

from checkpointing import CheckpointManager
from checkpointing.errors import NonFinite
from checkpointing.files.file_images import Extent, FileImage, blob_image, pieces
from checkpointing.files.torch_files import TorchFileLayout
from checkpointing.format.step_record import RING_BYTES, StepRecord, StepRing
from checkpointing.process import device as devices
from checkpointing.process import rng
from checkpointing.process.device import Later
from checkpointing.process.trees import tensors_in
from checkpointing.proof.recorder import StepRecorder
from checkpointing.snapshot.direct_commit import DirectCommit
from checkpointing.snapshot.request import SnapshotRequest
from checkpointing.state.tensor_fingerprint import SourceSum, fingerprint
from runner.doctor import health

pytestmark = pytest.mark.device

CHANGES = ["optimizer_step", "replayed_step", "skipped_step", "update_average", "forward_in_training", "write_directly"]


# Writes that torch does not count.
UNCOUNTED = ["clamp", "swap_in", "swap_out", "replace_memory", "set_memory", "write_view", "write_moment"]


@pytest.mark.parametrize("number", range(60))
def test_what_is_staged_is_the_state_of_one_step(number: int, on: str) -> None:
    draw = random.Random(number)
    job = SmallTraining(overlap=draw.choice([None, True, False]), foreign=draw.random() < 0.2, on=on)
    # A graph's replay writes where no host may write.
    changes = draw.sample([change for change in CHANGES if change != "replayed_step"], draw.randint(1, 5))
    changes += draw.sample(UNCOUNTED, draw.randint(0, 3))
    for _ in range(draw.randint(2, 10)):
        if draw.random() < 0.4:
            job.snapshot()
        else:
            getattr(job, draw.choice(changes))()
    job.close()
    assert job.torn() == []


@pytest.mark.parametrize("value", [0.0, float("nan"), -float("inf")])
def test_runs_of_bytes_are_looked_at_on_the_device(value: float, on: str) -> None:
    """What a rank holds of a matrix whose columns are shared among ranks."""
    whole = torch.zeros(8, 6, device=on)
    whole[3, 2] = value
    part = whole[:, 2:4].contiguous()
    sums = SourceSum({whole.untyped_storage().data_ptr(): whole.dtype})
    sums.add([Extent(0, part.view(8, 2).view(torch.uint8), (24,), whole)])
    assert bool(sums.not_finite()) == (value != 0.0)
    unwatched = SourceSum()
    unwatched.add([Extent(0, part.view(8, 2).view(torch.uint8), (24,))])
    assert not unwatched.not_finite()


@pytest.mark.parametrize("where", ["model", "moment", "buffer"])
def test_a_state_that_is_not_finite_is_marked(where: str, on: str) -> None:
    job = SmallTraining(overlap=True, on=on)
    parameter = next(job.model.parameters())
    tensors = {
        "model": parameter.detach(),
        "moment": job.optimizer.state[parameter]["exp_avg"],
        "buffer": job.model.get_buffer("1.running_var"),
    }
    tensors[where].view(-1)[1] = float("nan")
    job.snapshot()
    with pytest.raises(NonFinite):
        job.snapshotter.settle()
    job.snapshotter.close()
    assert len(job.arenas.not_finite) == 1


def network() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 4)
    )


def train(folder: Path, on: str, until: int, **options: Any) -> tuple[int, list[torch.Tensor]]:
    """A bare loop, with randomness on the device; returns the step that it began from, and its final state."""
    model = network().to(on)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    manager = CheckpointManager(folder, model=model, optimizer=optimizer, snapshot_steps=2, save_steps=4, **options)
    torch.manual_seed(11)
    start = manager.resume()
    for step in range(start + 1, until + 1):
        data = torch.randn(8, 16).to(on)
        loss = model(data + 0.1 * torch.empty(8, 16, device=on).normal_()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.step(step)
    manager.close()
    return start, [tensor.detach().cpu() for tensor in tensors_in([model.state_dict(), optimizer.state_dict()])]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_resumed_run_equals_the_uninterrupted_one(overlap: bool, on: str, tmp_path: Path) -> None:
    _, whole = train(tmp_path / "whole", on, 13, overlap=overlap)
    train(tmp_path / "cut", on, 8, overlap=overlap)
    start, resumed = train(tmp_path / "cut", on, 13, overlap=overlap)
    assert start == 8
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_a_checkpoint_of_one_device_goes_on_on_the_other(sim: Any, tmp_path: Path) -> None:
    train(tmp_path, "sim:1", 8)
    start, _ = train(tmp_path, "cpu", 9)
    assert start == 8
    train(tmp_path, "sim:0", 10)


def test_without_memory_for_snapshots_rank_0_writes_them_itself(
    on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, commit = list[int](), DirectCommit.commit

    def count(self: DirectCommit, request: SnapshotRequest, *arguments: Any) -> None:
        written.append(request.step)
        commit(self, request, *arguments)

    monkeypatch.setattr(DirectCommit, "commit", count)
    start, whole = train(tmp_path, on, 8, memory_limit=1)
    # At the end the last step was written once more; what then differed by chance failed a run that had finished.
    assert written == [4, 8]
    again, resumed = train(tmp_path, on, 8, memory_limit=1)
    assert (start, again) == (0, 8)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_generators_are_put_back(on: str) -> None:
    states = rng.state(world_size=1)
    first = torch.empty(100, device=on).uniform_().cpu()
    other = torch.empty(100, device=on).uniform_().cpu()
    rng.set_state(states)
    assert torch.equal(torch.empty(100, device=on).uniform_().cpu(), first) and not torch.equal(first, other)


def test_files_are_laid_out_alike_on_every_device(sim: Any) -> None:
    """Their names are in `torch.save`'s pickle: `cuda:7` and `cuda:10` would shift all that follows."""
    layouts = []
    for on in ("cpu", "sim:0", "sim:1"):
        state = {"moments": torch.arange(1000.0).to(on), "step": torch.tensor(3.0)}
        image = TorchFileLayout("optimizer.pt").image(state)
        layouts.append((image.nbytes, image.literals, [(offset, t.numel()) for offset, t in image.tensors]))
        data = b"".join(
            bytes(piece) for piece in pieces(image, memoryview(bytearray(512)), devices.of([state["moments"]]))
        )
        loaded = torch.load(io.BytesIO(data), weights_only=True)
        assert torch.equal(loaded["moments"], torch.arange(1000.0)) and loaded["moments"].device.type == "cpu"
    assert layouts[0] == layouts[1] == layouts[2]


def test_the_fingerprint_of_state_on_host_and_device(on: str) -> None:
    """A fused optimizer keeps everything on the device; others keep `step` on the host."""
    tensors = [torch.arange(64, dtype=torch.uint8), torch.arange(64, 131, dtype=torch.uint8)]
    expected = fingerprint(tensors)
    assert torch.equal(fingerprint([tensors[0], tensors[1].to(on)]), expected)
    assert torch.equal(fingerprint([tensors[0].to(on), tensors[1]]), expected)


def test_a_number_is_read_later(on: str) -> None:
    value = torch.tensor(2.5, device=on)
    later = Later(value)
    value.add_(1)
    assert float(later) == 2.5 and later.is_at_hand == (on == "cpu")


def test_a_copy_is_cut_where_pinned_memory_ends(on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "CHUNK_BYTES", 4096)
    source, buffer = torch.arange(10_000).view(torch.uint8), memoryview(bytearray(100_000))
    there = source.to(on)
    device = devices.of([there])
    device.copy(buffer, 123, there)
    device.mark().wait()
    assert bytes(buffer[123 : 123 + source.numel()]) == source.numpy().tobytes()


def test_runs_are_copied_to_equal_distances(on: str) -> None:
    """A part of a sharded tensor: two by three runs of four bytes, in the order of the device's own work."""
    source = torch.zeros(24, dtype=torch.uint8, device=on).view(2, 3, 4)
    device = devices.of([source])
    source.copy_(torch.arange(24, dtype=torch.uint8).view(2, 3, 4))
    buffer = bytearray(b"." * 200)
    device.copy_runs(memoryview(buffer), 5, source, (60, 20))
    device.mark().wait()
    places = [5 + 60 * outer + 20 * inner for outer in range(2) for inner in range(3)]
    assert b"".join(bytes(buffer[place : place + 4]) for place in places) == bytes(range(24))
    assert buffer.count(b".") == 200 - 24


def test_the_seam_says_what_there_is(sim: Any) -> None:
    assert devices.kind() == "sim" and devices.name_of() == "Second Device"
    assert devices.capability() is None and not devices.can_pin() and devices.utilization_percent() is None
    assert isinstance(blob_image("x", b""), FileImage)


def test_the_health_of_a_device_is_checked(sim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_MAX_BYTES", 1 << 20)
    assert list(health.faults_of(torch.device("sim:0"))) == []


def test_device_time_is_measured(sim: Any) -> None:
    sim.set_delay_us(20_000)
    source, buffer = torch.zeros(64, dtype=torch.uint8, device="sim:0"), memoryview(bytearray(64))
    device = devices.of([source])
    first = device.mark()
    device.copy(buffer, 0, source)
    last = device.mark()
    last.wait()
    sim.set_delay_us(0)
    assert 0.015 < (last.seconds_since(first) or 0.0) < 1.0


@pytest.mark.parametrize("overlap", [True, False])
def test_a_snapshot_costs_what_the_device_waits_for_it(overlap: bool, sim: Any) -> None:
    """The host goes on meanwhile: by its clock the copy would cost next to nothing."""
    job = SmallTraining(overlap=overlap, on="sim:0")
    sim.set_delay_us(5_000)
    for _ in range(3):
        job.snapshot()
        job.optimizer_step()
    job.close()
    sim.set_delay_us(0)
    # Some twenty tensors are copied, each 5 ms late.
    assert (job.snapshotter.costs.snapshot_s or 0.0) > 0.05 and job.snapshotter.stall_s > 0.15


def test_what_holds_a_moment_has_the_restored_one(on: str, tmp_path: Path) -> None:
    """As a graph that was captured before: it uses the tensors that it was captured with."""
    train(tmp_path, on, 6)
    model = network().to(on)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(4, 16, device=on)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    held = [value for own in optimizer.state.values() for value in own.values()]
    manager = CheckpointManager(tmp_path, model=model, optimizer=optimizer, snapshot_steps=None, save_steps=2)
    assert manager.resume() > 0
    now = [value for own in optimizer.state.values() for value in own.values()]
    manager.close()
    assert len(held) == len(now) and all(one is other for one, other in zip(held, now, strict=True))
    assert float(next(value for value in held if value.dim() == 0)) > 1


def test_a_step_is_recorded_without_waiting_and_alike_on_every_device(on: str) -> None:
    """What the device has yet to compute is read when it has arrived."""

    def records(where: str) -> dict[int, StepRecord]:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        # As the device has it, and with its values.
        model.to(where)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        ring = StepRing(memoryview(bytearray(RING_BYTES)), 1)
        recorder = StepRecorder(ring, lambda record: ())
        for step in range(1, 6):
            batch = torch.full((2, 8), float(step)).to(where)
            recorder.batch({"x": batch})
            recorder.loss(batch.sum())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.5)
            recorder.end(step, optimizer, figures={"gradient_norm": batch.max()})
        recorder.settle(wait=True)
        return ring.records()

    expected, found = records("cpu"), records(on)
    names = ("batch", "loss", "gradient_norm", "learning_rate", "parameters")
    for step in expected:
        assert {name: found[step].values[name] for name in names} == {
            name: expected[step].values[name] for name in names
        }


def test_generators_of_a_device_that_the_script_holds_are_found_and_put_back(on: str, tmp_path: Path) -> None:
    """Held by a submodule: a resumed run drew other noise."""

    class Noisy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)
            self.layer.noise = torch.Generator(device=on).manual_seed(7)  # type: ignore[assignment]

    def manager(model: Noisy) -> CheckpointManager:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return CheckpointManager(str(tmp_path / "run"), model=model, optimizer=optimizer, save_steps=1)

    first = Noisy().to(on)
    own = manager(first)
    own.resume()
    first.layer.noise.manual_seed(8)  # type: ignore[operator, union-attr]
    expected = first.layer.noise.get_state()  # type: ignore[operator, union-attr]
    own.step(1)
    own.close()
    again = Noisy().to(on)
    other = manager(again)
    assert other.resume() == 1
    assert torch.equal(again.layer.noise.get_state(), expected)  # type: ignore[operator, union-attr]
    other.close()
