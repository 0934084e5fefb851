"""What the events of the agent do to the console, the journal and the state that decisions read."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.node_fakes import FakeDisplay, beat

from checkpointing.agent.events import (
    BatchShape,
    CheckpointQuarantined,
    CommitFailedEvent,
    Committed,
    Event,
    FencedEvent,
    Fetched,
    FetchFailed,
    Log,
    MemoryShort,
    Resumed,
    SlowRanks,
    SnapshotDamaged,
    SnapshotDropped,
    StageEntered,
    StorageRetried,
    TierUnreachable,
    TrainingStarted,
    Transfer,
)
from checkpointing.host.heartbeat import Phase
from runner.journal.events import Progress
from runner.node.agent_events import AgentEvents


class Bench:
    def __init__(self) -> None:
        self.display, self.recorded = FakeDisplay(), list[Event]()
        self.transfers: list[Transfer] = []
        self.display.state.show_transfer = self.transfers.append
        display: Any = self.display
        self.events = AgentEvents(display, self.recorded.append)


def test_the_newest_commit_counts_and_never_goes_back() -> None:
    bench = Bench()
    bench.events.handle(Committed(step=3, run_step=103, tier="remote", duration_s=2.5))
    bench.events.handle(Committed(step=2, tier="local"))
    assert (bench.events.committed_step, bench.events.commit_s) == (103, None)
    assert bench.display.state.committed_step == 2


def test_failed_saves_are_counted_by_tier_until_one_succeeds() -> None:
    bench = Bench()
    for tier, error in (("remote", "503"), ("local", "full"), ("remote", "timed out")):
        bench.events.handle(CommitFailedEvent(step=5, tier=tier, error=error))
    assert bench.events.failed_saves == (2, "timed out")
    bench.events.handle(Committed(step=6, tier="remote"))
    assert bench.events.failed_saves == (1, "full")


def test_a_fence_is_kept() -> None:
    bench = Bench()
    assert bench.events.fenced is None
    bench.events.handle(FencedEvent(reason="attempt 9 has begun elsewhere"))
    assert bench.events.fenced == "attempt 9 has begun elsewhere"
    bench.events.begin_attempt(10)
    assert bench.events.fenced is None


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (StageEntered(number=2, stage="dpo"), "stage 2 of the script begins: its checkpoints are in dpo"),
        (CommitFailedEvent(step=4, tier="remote", error="503"), "checkpoint of step 4 failed: 503"),
        (TierUnreachable(tier="remote", reason="503"), "the remote checkpoints cannot be reached: 503"),
        (StorageRetried(tier="remote", count=7, reason="503"), "retried 7 storage calls"),
        (
            Fetched(step=4, tier="remote", nbytes=2_000_000, duration_s=1.0),
            "read checkpoint-4 into memory: 2.0 MB in 1.0 s",
        ),
        (MemoryShort(arenas=1, reason="8 GB needed"), "memory for snapshots is short: 8 GB needed"),
        (SnapshotDamaged(step=4, reason="digest"), "the snapshot of step 4 is not used: digest"),
        (SnapshotDropped(step=4, reason="incomplete"), "the snapshot of step 4 is not used: incomplete"),
        (CheckpointQuarantined(step=4, reason="digest", kept_as="x"), "checkpoint-4 is not used: digest"),
    ],
)
def test_what_the_user_should_know_is_shown_and_recorded(event: Event, text: str) -> None:
    bench = Bench()
    bench.events.handle(event)
    assert bench.recorded == [event]
    assert text in bench.display.texts[0]


@pytest.mark.parametrize(
    "event", [Committed(step=4, tier="local"), FetchFailed(step=4, error="gone"), SnapshotDropped(step=4, reason="")]
)
def test_ordinary_events_print_nothing(event: Event) -> None:
    bench = Bench()
    bench.events.handle(event)
    assert bench.recorded == [event] and not bench.display.texts


def test_a_transfer_is_shown_until_it_ends_and_not_recorded() -> None:
    bench = Bench()
    bench.events.handle(Transfer(step=4, what="upload", done=1, total=2))
    assert len(bench.transfers) == 1 and not bench.recorded
    bench.display.state.transfer = "upload of step 4"
    bench.events.handle(CommitFailedEvent(step=4, tier="remote", error="503"))
    assert bench.display.state.transfer == ""


@pytest.mark.parametrize(("step", "again"), [(100, "; recomputing 5 steps"), (105, "")])
def test_a_resumption_names_its_source_and_the_steps_to_compute_again(step: int, again: str) -> None:
    bench = Bench()
    bench.display.state.step, bench.display.state.attempt = 105, 2
    bench.events.handle(Resumed(step=step, source="memory"))
    assert bench.display.texts == [f"attempt 2 resumed from step {step} (in-memory snapshot){again}"]
    assert bench.display.state.step == step


def test_logs_set_loss_and_speed_which_stays_if_it_is_not_measured() -> None:
    bench = Bench()
    bench.events.handle(TrainingStarted(step=0, total_steps=200))
    bench.events.handle(Log(step=1, loss=3.0, metrics={"tokens_per_s": 1000.0}))
    bench.events.handle(Log(step=2, loss=2.0))
    state = bench.display.state
    assert (state.total_steps, state.loss, state.tokens_per_s) == (200, 2.0, 1000.0)
    assert bench.events.total_steps == 200
    # Another attempt may end before it has begun to train.
    bench.events.begin_attempt(2)
    assert bench.events.total_steps is None


def test_what_another_node_forwards_is_shown_and_changes_no_checkpoint_state() -> None:
    bench = Bench()
    bench.events.handle_forwarded(BatchShape(micro_batch=8, accumulation=2))
    bench.events.handle_forwarded(Resumed(step=7, source="remote"))
    bench.events.handle_forwarded(Log(step=8, loss=1.5))
    assert bench.events.batch == BatchShape(micro_batch=8, accumulation=2)
    assert [event.name for event in bench.recorded] == ["resumed", "log"]
    assert "resumed from step 7 (remote checkpoint)" in bench.display.texts[0] and bench.display.state.loss == 1.5
    # What was newer is quarantined.
    assert bench.display.state.committed_step == 7


def test_a_new_attempt_forgets_the_batch_of_the_last_one() -> None:
    bench = Bench()
    bench.events.handle(BatchShape(micro_batch=8, accumulation=2))
    assert bench.events.batch == BatchShape(micro_batch=8, accumulation=2) and bench.recorded
    bench.events.begin_attempt(3)
    assert bench.events.batch is None
    assert (bench.display.state.attempt, bench.display.state.activity) == (
        3,
        "loading libraries, and starting the ranks",
    )


def test_progress_is_recorded_every_ten_seconds_and_only_if_there_is_any() -> None:
    bench = Bench()

    def show(now: float, *steps: int) -> list[int]:
        bench.events.show_heartbeats([beat(Phase.TRAINING, step) for step in steps], now)
        return [event.step for event in bench.recorded if isinstance(event, Progress)]

    assert show(100.0, 4, 5) == [5]
    assert show(109.9, 9, 8) == [5]
    assert bench.display.state.step == 9 and bench.display.state.activity == "step 9"
    assert show(110.1, 9, 9) == [5, 9]
    assert show(125.0, 9, 9) == [5, 9]
    assert bench.display.refreshes == 4


def test_heartbeats_before_the_first_step_say_what_is_done() -> None:
    bench = Bench()
    bench.events.show_heartbeats([beat(Phase.RESTORING)._replace(start_time=0.0)], 100.0)
    assert not bench.recorded and bench.display.state.activity == "restoring the newest checkpoint"
    for phase, activity in (
        (Phase.TRAINING, "computing step 8"),
        (Phase.COMPILING, "torch.compile, in the first step"),
    ):
        bench.events.show_heartbeats([beat(phase, 7)._replace(start_step=7)], 100.0)
        assert bench.display.state.activity == activity and not bench.display.state.trains
    bench.events.show_heartbeats([beat(Phase.TRAINING, 8)._replace(start_step=7)], 100.0)
    assert bench.display.state.activity == "step 8" and bench.display.state.trains


def test_slow_ranks_are_named_and_forgotten_by_the_next_attempt() -> None:
    bench = Bench()
    slow = SlowRanks(ranks=[3], ratios=[1.62], nodes=[1])
    # Rank 0 may be on another node.
    bench.events.handle_forwarded(slow)
    assert bench.recorded == [slow] and bench.events.slow == slow
    bench.events.handle(SlowRanks(ranks=[], ratios=[], nodes=[]))
    assert bench.display.texts == [
        "slow ranks, by the time that the median rank needs: rank 3 on node 1: 1.6 times (in its forward passes)",
        "no rank is slower than the others any more",
    ]
    bench.events.begin_attempt(2)
    assert bench.events.slow is None


def test_what_a_program_has_saved_by_itself_counts_until_the_next_attempt() -> None:
    bench = Bench()
    bench.events.handle_program(Resumed(step=5, source="local").to_dict())
    bench.events.handle_program(Committed(step=10).to_dict())
    assert (bench.events.program_start, bench.events.program_step, bench.events.program_saves) == (5, 10, True)
    # Nothing looks for it where the run keeps its own.
    assert [event.name for event in bench.recorded] == ["resumed", "program_saved"]
    assert bench.events.committed_step == -1
    # Any process of the same user can write to the socket.
    for report in ({}, {"event": "fenced", "reason": "x"}, {"event": "committed", "step": "x"}, {"event": 7}):
        bench.events.handle_program(report)
    assert len(bench.recorded) == 2 and bench.events.fenced is None
    bench.events.begin_attempt(2)
    assert (bench.events.program_start, bench.events.program_step, bench.events.program_saves) == (0, 0, True)


def test_failed_saves_of_a_program_count_until_one_succeeds() -> None:
    bench = Bench()
    for step in (5, 10):
        bench.events.handle_program(CommitFailedEvent(step=step, error="full").to_dict())
    assert bench.events.failed_saves == (2, "full")
    bench.events.handle_program(Committed(step=15).to_dict())
    assert bench.events.failed_saves == (0, "")
