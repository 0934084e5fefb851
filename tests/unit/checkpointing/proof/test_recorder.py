"""Steps are recorded without waiting for a device, and in order, however late it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from checkpointing.format.step_record import FIELDS, RING_BYTES, StepRecord, StepRing, float_bits, parse_records
from checkpointing.process import device
from checkpointing.proof import digests, recorder
from checkpointing.proof.recorder import StepRecorder


class Late:
    """In place of a tensor that a device has yet to compute; reading it too early is waiting for the device."""

    arrived, waits = 0, 0
    made: ClassVar[list[Late]] = []

    def __init__(self, value: Any) -> None:
        self.value = value.clone() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        self.made.append(self)
        self.number = len(self.made)

    @property
    def has_arrived(self) -> bool:
        return self.number <= Late.arrived

    def on_host(self) -> torch.Tensor:
        Late.waits += not self.has_arrived
        return self.value

    def __float__(self) -> float:
        return float(self.on_host())


@pytest.fixture(autouse=True)
def late_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Late.made, Late.arrived, Late.waits = [], 0, 0
    monkeypatch.setattr(digests, "LateTensor", Late)
    monkeypatch.setattr(recorder, "Later", Late)
    yield


class Training:
    def __init__(self, differs: dict[int, tuple[str, ...]] | None = None) -> None:
        self.ring = StepRing(memoryview(bytearray(RING_BYTES)), 1)
        self.seen: list[int] = []
        self.model = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.differs = differs or {}
        self.recorder = StepRecorder(self.ring, self.look)

    def look(self, record: StepRecord) -> tuple[str, ...]:
        self.seen.append(record.step)
        return self.differs.get(record.step, ())

    def step(self, number: int) -> None:
        self.recorder.batch({"x": torch.full((2, 4), float(number))})
        self.recorder.loss(torch.tensor(0.25))
        self.recorder.loss(torch.tensor(0.5))
        self.recorder.end(number, self.optimizer, figures={"gradient_norm": 2.0, "loss_scale": None})


def test_nothing_waits_for_a_device_and_what_arrives_is_recorded_in_order() -> None:
    training = Training()
    for number in range(1, 9):
        training.step(number)
    assert training.seen == [] and Late.waits == 0
    per_step = len(Late.made) // 8
    Late.arrived = 3 * per_step
    training.recorder.settle()
    assert training.seen == [1, 2, 3] and Late.waits == 0


def test_a_device_that_is_far_behind_is_waited_for_in_the_end() -> None:
    training = Training()
    for number in range(1, 21):
        training.step(number)
    assert training.seen == [1, 2, 3, 4] and Late.waits > 0


def test_a_file_has_all_steps_up_to_its_own() -> None:
    training = Training()
    for number in range(1, 6):
        training.step(number)
    assert list(parse_records(training.recorder.file(4), 1)) == [1, 2, 3, 4]


def test_a_record_has_what_is_known_of_its_step() -> None:
    training = Training()
    Late.arrived = 100
    training.step(1)
    found = training.ring.get(1)
    assert found is not None
    assert set(FIELDS) - found.values.keys() == {"loss_scale", "device"}
    assert found.values["loss"] == float_bits(0.75) and found.values["gradient_norm"] == float_bits(2.0)
    assert found.values["learning_rate"] == float_bits(0.1) and found.tokens == 8


def test_what_differs_is_kept_with_the_step() -> None:
    training = Training({2: ("loss",)})
    Late.arrived = 100
    training.step(1)
    training.step(2)
    records = training.ring.records()
    assert (records[1].differed, records[2].differed) == ((), ("loss",))


def test_what_a_graph_captures_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that is asked for meanwhile would become a part of the graph."""
    monkeypatch.setattr(device, "is_capturing", lambda: True)
    training = Training()
    training.step(1)
    assert Late.made == [] and training.ring.records() == {}


def test_a_restored_record_hides_nothing_newer() -> None:
    training = Training()
    Late.arrived = 100
    training.step(2)
    own = training.ring.get(2)
    training.recorder.restore([StepRecord(1, {"loss": 1}), StepRecord(2, {"loss": 2})])
    assert list(training.ring.records()) == [1, 2] and training.ring.get(2) == own


def test_a_restored_record_leaves_another_stages_in_memory() -> None:
    """A stage that has finished is entered again by a resumed process, before the one that was interrupted."""
    training = Training()
    Late.arrived = 100
    training.step(2)
    another = StepRecorder(StepRing(training.ring._memory, 2), training.look)
    another.restore([StepRecord(1, {"loss": 1}), StepRecord(2, {"loss": 2})])
    assert list(training.ring.records()) == [2] and list(StepRing(training.ring._memory, 2).records()) == [1]
