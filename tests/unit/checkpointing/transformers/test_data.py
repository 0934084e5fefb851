"""The training data without a Trainer: what is followed, resumed and refused."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
import transformers.trainer
from helpers.small_checkpoint import point
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from checkpointing.data.cursor import LoaderCursor
from checkpointing.data.dealing import StepLayout
from checkpointing.data.stream import StreamPosition
from checkpointing.errors import CheckpointError, InvalidCheckpoint
from checkpointing.host.environment import SETTINGS_ENV, RankSettings
from checkpointing.transformers import data as data_module
from checkpointing.transformers.data import TrainingData, _without_labels, skipping_by_position
from checkpointing.transformers.job_shape import DataRanks
from checkpointing.transformers.loop_state import JobRecord

ONE = StepLayout(1, 2, 2)
ROWS: Any = list(range(16))


class Manager:
    """Keeps positions as a checkpoint would."""

    def __init__(self, saved: list[Any] | None = None) -> None:
        self.saved, self.cursors = saved or [], list[LoaderCursor]()
        self.paused = threading.Event()

    def follow(self, cursor: LoaderCursor, group_size: int = 1) -> None:
        self.cursors.append(cursor)

    def forget_positions(self) -> None:
        self.cursors.clear()

    def positions_in(self, point: Any) -> list[Any]:
        return self.saved

    def pause(self) -> None:
        self.paused.set()


class Stream(IterableDataset[int]):
    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while self.next < 100:
            self.next += 1
            yield self.next - 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def arguments(**changes: Any) -> Any:
    defaults = {
        "world_size": 1,
        "process_index": 0,
        "gradient_accumulation_steps": 2,
        "auto_find_batch_size": False,
        "seed": 3,
        "data_seed": None,
        "ignore_data_skip": False,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "dataloader_prefetch_factor": None,
    }
    return SimpleNamespace(**{**defaults, **changes})


def training_data(manager: Any = None, layout: StepLayout = ONE, **options: Any) -> TrainingData:
    own = {name: options.pop(name) for name in ("beginning", "uneven") if name in options}
    args = arguments(**options)
    ranks = DataRanks(args.process_index, args.world_size)
    positions: Any = manager or Manager()
    return TrainingData(positions, args, layout=layout, ranks=ranks, **own)


def loader(batch_size: int = 2) -> Any:
    return DataLoader(ROWS, batch_size=batch_size, collate_fn=list)


def test_the_trainers_own_loader_is_followed() -> None:
    manager = Manager()
    data = training_data(manager)
    own = loader()
    assert data.follow(own, 2, None) is own and data.is_followed and not data.is_stream
    assert manager.cursors == [data.cursor]
    data.consume(3)
    assert data.cursor is not None and data.cursor.consumed == 3
    data.forget_loader()
    assert not data.is_followed and manager.cursors == []


def test_a_loader_that_cannot_be_followed_is_read_as_the_trainer_does(caplog: pytest.LogCaptureFixture) -> None:
    data = training_data()
    assert data.follow(ROWS, 2, None) is ROWS and not data.is_followed
    assert "list is not a torch DataLoader: a resumed run reads it again from the beginning" in caplog.text


def test_a_loader_that_would_have_to_be_recut_must_be_followed() -> None:
    class Pairs(BatchSampler):
        pass

    odd: Any = DataLoader(ROWS, batch_sampler=Pairs(RandomSampler(ROWS), 2, False))
    with pytest.raises(CheckpointError, match="order of Pairs depends on the number of ranks"):
        training_data(layout=StepLayout(2, 2, 1)).follow(odd, 2, None)


def test_another_number_of_samples_per_step_is_refused() -> None:
    with pytest.raises(CheckpointError, match="4 samples per step, now there are 6"):
        training_data().follow(loader(3), 3, point("file", b""))
    with pytest.raises(CheckpointError, match="4 samples per step, now there are 6"):
        training_data(beginning={"next": 0}).read_stream(Stream(), list, 3, point("file", b""))


def test_a_trainer_that_looks_for_its_batch_size_may_change_it_at_the_beginning_only() -> None:
    data = training_data(auto_find_batch_size=True)
    data.follow(loader(1), 1, None)
    assert data.layout == StepLayout(1, 1, 2)
    with pytest.raises(CheckpointError, match="samples per step"):
        data.follow(loader(1), 1, point("file", b""))


def test_a_resumed_loader_continues_behind_the_batches_used() -> None:
    first = training_data()
    whole = first.follow(loader(), 2, None)
    assert first.cursor is not None
    first.cursor.begin_epoch(0)
    used = list(itertools.islice(whole, 4))
    first.consume(4)
    second = training_data(Manager([first.cursor.state()]))
    own = second.follow(loader(), 2, point("file", b""))
    assert second.resume_position(point("file", b""), (0, 4), 4) == (0, 4)
    assert second.cursor is not None
    second.cursor.begin_epoch(0)
    rest = transformers.trainer.skip_first_batches(own, 4)
    assert used + list(rest) == list(loader())


def test_a_position_is_by_steps_where_the_checkpoint_has_none() -> None:
    data = training_data()
    data.follow(loader(), 2, None)
    assert data.resume_position(None, (1, 2), 4) == (1, 2)
    assert data.resume_position(point("file", b""), (1, 2), 4) == (1, 2)
    assert data.cursor is not None and data.cursor.resumes_mid_epoch


def test_a_position_is_left_alone_where_the_user_ignores_it_or_nothing_follows() -> None:
    ignoring = training_data(Manager(["not read"]), ignore_data_skip=True)
    ignoring.follow(loader(), 2, None)
    assert ignoring.resume_position(point("file", b""), (1, 0), 4) == (1, 0)
    assert training_data(Manager(["not read"])).resume_position(point("file", b""), (1, 2), 4) == (1, 2)


def test_a_position_that_cannot_be_parsed_is_named() -> None:
    data = training_data(Manager([{"epoch": "1"}]))
    data.follow(loader(), 2, None)
    with pytest.raises(InvalidCheckpoint, match="checkpoint-20: its position in the data"):
        data.resume_position(point("file", b""), (1, 2), 4)


def test_a_loader_that_nothing_follows_is_skipped_as_accelerate_does() -> None:
    assert list(transformers.trainer.skip_first_batches(loader(), 6)) == list(loader())[6:]


def test_a_frameworks_own_way_to_skip_is_for_what_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """ms-swift replaces the function while it trains, and makes another loader."""
    monkeypatch.setattr(transformers.trainer, "skip_first_batches", lambda loader, count: ("theirs", count))
    followed, other = loader(), loader()
    LoaderCursor(followed, seed=0, rank=0, made_for=ONE, now=ONE)
    with skipping_by_position():
        assert transformers.trainer.skip_first_batches(other, 3) == ("theirs", 3)
        assert transformers.trainer.skip_first_batches(followed, 3) is not None
        assert not isinstance(transformers.trainer.skip_first_batches(followed, 3), tuple)
    assert transformers.trainer.skip_first_batches(followed, 3) == ("theirs", 3)


def test_what_is_no_loader_is_read_and_its_first_batches_are_dropped() -> None:
    """A class that mixes loaders, say, of which accelerate cannot make another."""

    class Mixed:
        batch_size = 3

        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

        def __len__(self) -> int:
            return 5

    rest = transformers.trainer.skip_first_batches(Mixed(), 2)
    assert list(rest) == [2, 3, 4] and len(rest) == 3 and rest.batch_size == 3


def test_a_stream_is_read_on_from_the_record_of_the_job() -> None:
    first = training_data(beginning={"next": 0})
    batches = iter(first.read_stream(Stream(), list, 2, None))
    assert [next(batches), next(batches)] == [[0, 1], [2, 3]]
    assert first.stream is not None and first.is_followed
    record = JobRecord(ONE, {}, first.stream.position)
    second = training_data(beginning={"next": 0})
    assert second.resume(point("file", b""), record, {}, 2) is None
    resumed = second.read_stream(Stream(), list, 2, point("file", b""))
    # The Trainer asks for it; the position is known already.
    assert transformers.trainer.skip_first_batches(resumed, 2) is resumed
    assert next(iter(resumed)) == [4, 5]


def test_a_stream_without_a_position_is_read_over() -> None:
    fresh = training_data(beginning={"next": 0}).read_stream(Stream(), list, 2, None)
    assert next(iter(transformers.trainer.skip_first_batches(fresh, 2))) == [4, 5]


@pytest.mark.parametrize(
    ("beginning", "stream", "message"),
    [
        (None, StreamPosition(0, 0, 0, {}, None, 3), "its data was streamed, and now is not"),
        ({"next": 0}, None, "its data was not streamed, and now is streamed"),
    ],
)
def test_data_that_was_read_in_another_way_is_refused(beginning: Any, stream: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        training_data(beginning=beginning).resume(point("file", b""), JobRecord(stream=stream), {}, 2)


def test_a_checkpoint_of_another_number_of_ranks_decides_the_layout() -> None:
    data = training_data()
    layout = data.resume(point("file", b""), JobRecord(StepLayout(2, 2, 1)), {}, 2)
    assert layout == StepLayout(1, 2, 2) and data.layout == StepLayout(2, 2, 1)
    with pytest.raises(CheckpointError, match="of another job"):
        data.resume(point("file", b""), JobRecord(job={"trainer": "A"}), {"trainer": "B"}, 2)


def test_a_stream_that_is_slow_is_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_module, "_STREAM_PATIENCE_S", 0.001)
    manager = Manager()
    data = training_data(manager, beginning={"next": 0})
    with data.drawing():
        assert not manager.paused.wait(0.02)
    data.read_stream(Stream(), list, 2, None)
    with data.drawing():
        assert manager.paused.wait(10)


def test_the_seed_of_batches_is_the_one_for_data() -> None:
    states = []
    seeds: list[dict[str, Any]] = [{"seed": 3}, {"seed": 4, "data_seed": 3}]
    for options in seeds:
        data = training_data(**options)
        data.follow(loader(), 2, None)
        assert data.cursor is not None
        states.append(data.cursor.seed_of(5))
    assert states[0] == states[1]
    assert torch.initial_seed() not in states


# -- ranks that cannot share a step's samples equally ----------------------------------------------------------------


@pytest.fixture
def elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTINGS_ENV, RankSettings(planned_ranks=4).to_json())


FOUR = StepLayout(4, 1, 1)


def test_ranks_that_may_share_unevenly_do_so_in_an_elastic_run_only(
    elastic: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = [training_data(layout=FOUR, world_size=ranks, uneven=True).fit(1) for ranks in (4, 3, 2)]
    assert layouts == [None, StepLayout(3, 1, 2, 4), StepLayout(2, 1, 2)]
    refusals: list[dict[str, Any]] = [
        {"uneven": False},
        {"uneven": True, "beginning": {"next": 0}},
        {"uneven": True, "world_size": 5},
    ]
    for refused in refusals:
        with pytest.raises(CheckpointError, match="cannot share equally"):
            training_data(layout=FOUR, **{"world_size": 3, **refused}).fit(1)
    monkeypatch.delenv(SETTINGS_ENV)
    assert training_data(layout=FOUR, world_size=3, uneven=True).fit(1) is None


def test_what_any_number_of_ranks_can_share_is_reported(elastic: None) -> None:
    for uneven, shared in ((True, 4), (False, None)):
        data = training_data(layout=FOUR, world_size=4, uneven=uneven, gradient_accumulation_steps=1)
        assert data.shared_samples is None
        data.follow(loader(1), 1, None)
        assert data.shared_samples == shared


def test_a_filler_has_no_labels_and_the_epochs_iterator_goes_on(elastic: None) -> None:
    """Rank 2 of three has one of four samples, and the first one two: its first batch only fills up."""
    data = training_data(layout=FOUR, world_size=3, process_index=2, uneven=True)
    assert data.fit(1) == StepLayout(3, 1, 2, 4)
    rows: Any = [{"labels": torch.tensor([number])} for number in range(8)]
    own = data.follow(
        accelerate.data_loader.prepare_data_loader(
            DataLoader(rows, batch_size=1, collate_fn=lambda batch: batch[0]),
            num_processes=3,
            process_index=2,
            put_on_device=False,
        ),
        1,
        None,
    )
    assert data.cursor is not None
    data.cursor.begin_epoch(0)
    epoch, seen = iter(own), []
    for _ in range(2):
        batches = data.weighed(epoch)
        seen += [next(batches)["labels"].item() for _ in range(2)]
        del batches
        data.consume(2)
    assert seen == [-100, 3, -100, 7]


def test_equal_shares_pass_through() -> None:
    data = training_data(uneven=True)
    batches = iter([{"labels": 1}])
    assert data.weighed(batches) is batches


def test_a_batch_without_labels_counts_for_nothing() -> None:
    batch = {"input_ids": torch.ones(1, 3), "labels": torch.ones(1, 3, dtype=torch.long)}
    assert _without_labels(batch)["labels"].tolist() == [[-100] * 3] and batch["input_ids"].sum() == 3
    shifted = {"shift_labels": torch.ones(1, 2, dtype=torch.long)}
    assert _without_labels(shifted)["shift_labels"].tolist() == [[-100] * 2]
    with pytest.raises(KeyError, match="needs labels, and has input_ids"):
        _without_labels({"input_ids": torch.ones(1)})


def test_each_draw_is_noted_when_the_batch_is_there() -> None:
    data, noted = training_data(), list[int]()
    seen: list[int] = []
    manager: Any = SimpleNamespace(batch_drawn=lambda: noted.append(len(seen)))
    data._manager = manager
    for batch in data.timed(iter([1, 2])):
        seen.append(batch)
        assert noted == list(range(len(seen)))
