"""What a manager records of its steps, and when a resumed one compares, reports, and ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from helpers.small_checkpoint import point
from unit.checkpointing.doubles import Connection, options

from checkpointing.errors import RepetitionDiffers
from checkpointing.format.layout import step_record_name
from checkpointing.host.environment import RankSettings
from checkpointing.manager.node_services import NodeServices
from checkpointing.manager.proving import Proving
from checkpointing.manager.tracked import Tracked
from checkpointing.process.ranks import Ranks

NAME = step_record_name(0)


class Run:
    """A training of one parameter; another attempt of it is made with the same connection."""

    def __init__(
        self, folder: Path, connection: Connection | None = None, verify: str = "auto", **settings: Any
    ) -> None:
        torch.manual_seed(0)
        self.connection = connection or Connection(folder)
        chosen, ranks = options(folder, RankSettings(verify=verify, **settings)), Ranks()
        self.tracked = Tracked(ranks)
        self.model = torch.nn.Linear(1, 1, bias=False)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.tracked.track(self.model, self.optimizer, None, None, {}, None, pipeline=False)
        node = NodeServices(chosen, ranks, self.connection)
        self.proving = Proving(chosen, ranks, node, self.tracked, lambda step: ["Mine.calls"])

    @property
    def reports(self) -> list[dict[str, Any]]:
        return [event for event in self.connection.client.events if event["event"] == "steps_repeated"]

    def resume(self, start: int, data: bytes | None = None) -> None:
        self.proving.restored(point(NAME, data, start) if data is not None else None)
        self.proving.begin(start)
        # As if so many steps had been restored.
        with torch.no_grad():
            self.model.weight.fill_(float(start))

    def train(self, first: int, last: int, batch: float = 1.0) -> None:
        for step in range(first, last + 1):
            self.proving.batch(torch.full((2,), batch * step))
            with torch.no_grad():
                self.model.weight.add_(1.0)
            self.proving.end_step(step, {"loss": 0.5})
            self.proving.conclude(step, agreed=False)

    def file(self, step: int) -> bytes:
        made = self.proving.files(step)[NAME]
        return made() if callable(made) else made


def interrupted(folder: Path, last: int = 7, **settings: Any) -> Run:
    run = Run(folder, **settings)
    run.resume(0)
    run.train(1, last)
    return run


def test_steps_that_are_equal_are_reported_with_their_numbers(tmp_path: Path) -> None:
    before = interrupted(tmp_path)
    later = Run(tmp_path, before.connection)
    later.resume(5, before.file(5))
    later.train(6, 6)
    assert not later.reports
    later.train(7, 7)
    # A device may be late with the last one.
    later.proving.close()
    [report] = later.reports
    assert (report["step"], report["first"], report["last"], report["differs"]) == (5, 6, 7, [])


def test_a_step_that_differs_is_reported_at_once_with_what_may_be_missing(tmp_path: Path) -> None:
    before = interrupted(tmp_path)
    later = Run(tmp_path, before.connection)
    later.resume(5, before.file(5))
    later.train(6, 6, batch=2.0)
    assert later.proving.has_found_difference
    later.proving.conclude(6, agreed=True)
    [report] = later.reports
    assert (report["last"], report["differs"], report["candidates"]) == (5, ["batch"], ["Mine.calls"])


def test_strict_ends_at_a_step_that_differs(tmp_path: Path) -> None:
    before = interrupted(tmp_path)
    later = Run(tmp_path, before.connection, verify="strict")
    later.resume(5, before.file(5))
    with pytest.raises(RepetitionDiffers, match="the batch"):
        later.train(6, 6, batch=2.0)


def test_a_run_that_was_ended_before_it_repeated_all_reports_what_it_has(tmp_path: Path) -> None:
    before = interrupted(tmp_path)
    later = Run(tmp_path, before.connection)
    later.resume(5, before.file(5))
    later.train(6, 6)
    later.proving.close()
    assert [(report["first"], report["last"]) for report in later.reports] == [(6, 6)]


def test_other_micro_batches_are_another_computation(tmp_path: Path) -> None:
    before = interrupted(tmp_path)
    later = Run(tmp_path, before.connection, micro_batch_divisor=2)
    later.resume(5, before.file(5))
    later.train(6, 8, batch=2.0)
    later.proving.close()
    assert not later.reports


def test_with_off_nothing_is_recorded(tmp_path: Path) -> None:
    run = interrupted(tmp_path, verify="off")
    assert run.proving.files(7) == {} and not run.reports


@pytest.mark.parametrize(("verify", "newest"), [("auto", None), ("strict", 7)])
def test_only_strict_asks_for_a_step_before_the_newest_record(
    verify: Literal["auto", "strict"], newest: int | None, tmp_path: Path
) -> None:
    before = interrupted(tmp_path)
    later = Run(tmp_path, before.connection, verify=verify)
    assert later.proving.newest_comparable() == newest


def test_without_memory_of_an_agent_its_file_next_to_the_checkpoints_is_compared(tmp_path: Path) -> None:
    """An agent without a supervisor is gone with its ranks."""
    before = interrupted(tmp_path)
    later = Run(tmp_path)
    later.proving._node.connection.tiers.durable.sidecars.write(NAME, before.file(7))
    later.resume(5, before.file(5))
    later.train(6, 7)
    later.proving.close()
    assert [(report["first"], report["last"]) for report in later.reports] == [(6, 7)]


def test_a_checkpoints_record_is_a_part_of_the_next_ones(tmp_path: Path) -> None:
    before = interrupted(tmp_path)
    later = Run(tmp_path)
    later.resume(7, before.file(7))
    later.train(8, 8)
    third = Run(tmp_path, verify="strict")
    third.resume(5, later.file(8))
    assert third.file(8) == later.file(8)


def test_what_cannot_be_recorded_ends_nothing_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Torn(dict[str, object]):
        def items(self) -> Any:
            raise RuntimeError("no items")

    run = Run(tmp_path)
    run.resume(0)
    for step in (1, 2):
        run.proving.batch(Torn())
        run.proving.end_step(step, {"loss": torch.zeros(3), "grad_norm": "none"})
    assert caplog.text.count("a step cannot be recorded") == 1


def test_batches_count_where_they_enter_the_model(tmp_path: Path) -> None:
    """What is drawn and changed before the pass is not what the step computes from."""
    run, seen = Run(tmp_path), list[object]()
    run.resume(0)
    run.proving._recorder.batch = seen.append  # type: ignore[method-assign,union-attr]
    run.proving.watch(run.model)
    batches: Iterator[Any] = run.proving.drawn(iter([torch.zeros(2, 1)]))
    run.model(next(batches) + 1)
    [entered] = seen
    assert isinstance(entered, tuple) and torch.equal(entered[0][0], torch.ones(2, 1))
    run.model.eval()
    run.model(torch.zeros(2, 1))
    assert len(seen) == 1


def test_where_no_pass_is_seen_what_is_drawn_counts(tmp_path: Path) -> None:
    """A function that is given the parameters, say, is no module."""
    run, seen = Run(tmp_path), list[object]()
    run.resume(0)
    batches = run.proving.drawn(iter([1.0, 2.0, 3.0]))
    next(batches)
    run.proving.end_step(1, {})
    run.proving._recorder.batch = seen.append  # type: ignore[method-assign,union-attr]
    assert list(batches) == [2.0, 3.0] and seen == [2.0, 3.0]
