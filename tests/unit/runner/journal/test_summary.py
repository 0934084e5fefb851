from __future__ import annotations

from typing import Any

import pytest
from helpers.journals import entries
from rich.console import Console

from runner.journal.ledger import CAUSES
from runner.journal.summary import BestStep, RunState, describe_repetitions, render, summarise
from runner.ui.status import panel


def event(time: float, name: str, attempt: int = 1, **details: Any) -> dict[str, Any]:
    return {"time": time, "event": name, "attempt": attempt, **details}


def ended(time: float, attempt: int, kind: str, start: int, step: int, began: float, last: float) -> dict[str, Any]:
    return event(
        time, "attempt_ended", attempt, kind=kind, cause="why", rank=1, step=step, start_step=start,
        training_began=began, last_step_at=last, committed_step=0,
    )  # fmt: skip


# 2 s set-up; attempt 1: 8 s start-up, 10 s for steps 0-50, 1 s teardown; 3 s backoff;
# attempt 2 resumes from 40 (10 lost = 2 s): 4 s start-up, 6 s training, killed with its supervisor;
# 20 s down; then a second life: 1 s set-up, 5 s start-up, 5 s for steps 60-100, 0.5 s to the end, 0.5 s shutdown.
EVENTS = [
    event(100, "run_started", 0, run_id="r"),
    event(102, "attempt_started", 1),
    event(110, "training_started", 1, step=0, total_steps=100),
    event(111, "log", 1, step=5, loss=7.0, tokens_per_s=None),
    event(118, "committed", 1, step=40),
    ended(121, 1, "crashed", 0, 50, 110, 120),
    event(124, "attempt_started", 2),
    event(128, "training_started", 2, step=40, total_steps=100),
    event(133, "committed", 2, step=60),
    event(134, "log", 2, step=60, loss=6.0, tokens_per_s=10.0),
    event(154, "run_started", 2, run_id="r"),
    event(155, "attempt_started", 3),
    event(160, "training_started", 3, step=60, total_steps=100),
    event(165, "log", 3, step=100, loss=5.0, tokens_per_s=12.0),
    event(165.2, "committed", 3, step=100),
    ended(165.5, 3, "finished", 60, 100, 160, 165),
    event(166, "run_ended", 3, state="finished", exit_code=0, reason="all ranks finished"),
]


def test_every_second_has_one_cause() -> None:
    run = summarise(entries(EVENTS))
    assert run.time_by_cause == pytest.approx(
        {
            **dict.fromkeys(CAUSES, 0.0),
            "start-up": 3.0,
            # No rank has said that it was there.
            "launch": 17.0,
            "training": 8.0 + 6.0 + 5.0,
            "lost work": 2.0,
            "teardown": 5.0,
            "not running": 20.0,
        }
    )
    assert run.goodput == pytest.approx(19 / 66, abs=1e-5)
    assert run.wall_s == pytest.approx(66.0)


@pytest.mark.parametrize("length", range(1, len(EVENTS) + 1))
def test_the_account_adds_up_at_any_moment(length: int) -> None:
    events = EVENTS[:length]
    assert summarise(entries(events)).wall_s == pytest.approx(events[-1]["time"] - events[0]["time"])
    if events[-1]["event"] != "run_ended":
        assert summarise(entries(events), now=200.0).wall_s == pytest.approx(100.0)


def test_what_the_summary_says() -> None:
    run = summarise(entries(EVENTS))
    assert (run.step, run.total_steps, run.lost_steps, run.committed) == (100, 100, 10, [40, 60, 100])
    text = render(run, {"best model": "/x/best_model"})
    for part in ("finished", "100 of 100", "7.0000 -> 5.0000", "attempts     3", "10 steps, 2.0 s", "/x/best_model"):
        assert part in text


def test_what_a_program_saves_by_itself_is_no_checkpoint_of_the_run() -> None:
    """A restart looked for them where the run keeps its own, and ended with 81."""
    events = [
        event(100, "run_started", 0, run_id="r"),
        event(101, "nothing_saved", 1, reason="no Trainer and no CheckpointManager seen"),
        event(102, "program_saved", 1, step=5, tier="local"),
        event(103, "program_saved", 1, step=10, tier="local"),
    ]
    run = summarise(entries(events))
    assert (run.committed, run.program_saves, run.unsaved) == ([], [5, 10], None)
    assert "2 by the program itself, newest step 10" in render(run, {})


def test_what_is_committed_was_trained() -> None:
    """A script that logs nothing reports its step every ten seconds only."""
    events = [event(100, "attempt_started", 1), event(101, "progress", 1, step=2), event(102, "committed", 1, step=9)]
    assert summarise(entries(events)).step == 9


def test_processes_are_those_of_the_newest_attempt() -> None:
    events = [
        event(100, "run_started", 0, run_id="r", pid=5),
        event(101, "attempt_started", 1, launcher_pid=6, agent_pid=7),
        event(102, "rank_started", 1, rank=1, pid=9),
        event(102, "rank_started", 1, rank=0, pid=8),
    ]
    assert summarise(entries(events)).pids == {"runner": 5, "launcher": 6, "agent": 7, "rank 1": 9, "rank 0": 8}
    events.append(event(103, "attempt_started", 2, launcher_pid=6, agent_pid=7))
    assert summarise(entries(events)).to_dict()["pids"] == {"runner": 5, "launcher": 6, "agent": 7}


def test_slow_ranks_are_those_of_the_running_attempt() -> None:
    slow = event(105, "slow_ranks", 1, ranks=[3], ratios=[1.5], nodes=[1])
    events = [event(100, "attempt_started", 1), slow]
    found = summarise(entries(events)).slow
    assert found is not None and found.ranks == [3]
    for last in (event(106, "slow_ranks", 1, ranks=[], ratios=[], nodes=[]), event(107, "attempt_started", 2)):
        assert summarise(entries([*events, last])).slow is None


def test_what_was_recomputed_is_compared_and_the_newest_difference_counts() -> None:
    resumed = [event(101, "resumed", 1, step=10, source="memory"), event(120, "resumed", 2, step=20, source="local")]
    assert describe_repetitions(summarise(entries(resumed))) == "2 resumes, without a step to compare"
    differs = event(102, "steps_repeated", 1, step=10, first=11, last=10, differs=["batch"], rank=1)
    equal = event(121, "steps_repeated", 2, step=20, first=21, last=23, differs=[])
    found = describe_repetitions(summarise(entries([*resumed, equal])))
    assert found.endswith("resumed from step 20; steps 21\u201323 repeated bit for bit")
    found = describe_repetitions(summarise(entries([*resumed, differs, equal])))
    assert found.startswith("1 of 2 resumes") and "step 11 differs (rank 1): the batch" in found


def test_the_nodes_of_a_run_are_named_with_what_their_changes_cost() -> None:
    run = summarise(
        entries(
            [
                event(100, "run_started", 0, run_id="r"),
                event(100, "attempt_started", 1, nnodes=3, nodes=[0, 1, 2], max_nodes=3),
                event(100, "training_started", 1, step=0, total_steps=100),
                event(110, "log", 1, step=10, loss=7.0),
                ended(110, 1, "node lost", 0, 10, 100, 110),
                event(111, "leader_changed", 1, epoch=2, node=2, host="10.0.0.3"),
                event(111, "attempt_started", 2, nnodes=2, nodes=[1, 2], max_nodes=3),
                event(114.5, "training_started", 2, step=9, total_steps=100),
            ]
        )
    )
    line = "nodes        2 of 3 (1, 2), node 2 leads; 1 changes paused training for 4.5 s and lost 1 steps"
    assert line in render(run, {})
    assert "nodes" not in render(summarise(entries(EVENTS)), {})


def test_what_retention_could_not_remove_is_counted_until_it_has() -> None:
    failed = event(105, "prune_failed", 1, tier="remote", error="object is locked", steps=[10, 20], held_bytes=36e9)
    console = Console(record=True, width=120)
    console.print(panel(summarise(entries([*EVENTS[:4], failed])), 110.0, {}))
    assert "2 checkpoints (remote), 36.0 GB: object is locked" in console.export_text()
    removed = event(106, "pruned", 1, tier="remote", step=20)
    assert not summarise(entries([*EVENTS[:4], failed, removed])).stuck


def evaluated(step: int, value: float, **details: Any) -> dict[str, Any]:
    return event(100 + step, "evaluated", 1, step=step, **{"eval_loss": value, **details})


def test_the_best_step_is_the_first_with_the_lowest_loss() -> None:
    run = summarise(entries([*EVENTS[:3], *(evaluated(*one) for one in ((1, 3.0), (2, 2.0), (3, 2.0), (4, 2.5)))]))
    assert (run.eval_loss, run.best) == (2.5, BestStep(2, "eval_loss", 2.0))
    assert "loss 2.5000; best step 2, eval_loss 2\n" in render(run, {})
    assert summarise(entries(EVENTS[:3])).best is None and "best step" not in render(summarise(entries(EVENTS[:3])), {})


def test_the_best_step_is_chosen_as_the_trainer_does() -> None:
    f1 = {"best_by": "eval_f1", "higher_is_better": True}
    evaluations = [evaluated(1, 2.0, eval_f1=0.5, **f1), evaluated(2, 3.0, eval_f1=0.7, **f1)]
    assert summarise(entries([*EVENTS[:3], *evaluations])).best == BestStep(2, "eval_f1", 0.7)
    missing = [evaluated(1, 2.0, best_by="eval_rouge", higher_is_better=True)]
    assert summarise(entries([*EVENTS[:3], *missing])).best is None


def test_evaluations_of_steps_that_are_recomputed_do_not_count() -> None:
    again = event(120, "training_started", 2, step=5, total_steps=100)
    lines = [*EVENTS[:3], evaluated(4, 3.0), evaluated(8, 1.0), again]
    assert summarise(entries(lines)).best == BestStep(4, "eval_loss", 3.0)
    assert summarise(entries([*lines, evaluated(8, 1.5)])).best == BestStep(8, "eval_loss", 1.5)


def test_an_empty_journal() -> None:
    assert summarise([]).state is RunState.UNKNOWN


@pytest.mark.parametrize("index", range(len(EVENTS)))
def test_an_event_that_a_disk_has_damaged_is_passed_over(index: int) -> None:
    """Each in turn has lost all that it said, or says it of something that does not exist."""
    for damaged in ({"time": EVENTS[index]["time"], "event": EVENTS[index]["event"]}, event(100, "unheard-of")):
        run = summarise(entries([*EVENTS[:index], damaged, *EVENTS[index + 1 :]]), now=200)
        assert render(run, {})


def test_what_the_last_attempt_did_after_its_last_commit_is_lost_once_the_run_has_ended() -> None:
    events = [
        event(100, "run_started", 0, run_id="r"),
        event(100, "attempt_started", 1),
        event(110, "training_started", 1, step=0, total_steps=100),
        event(115, "committed", 1, step=22),
        ended(120, 1, "ended at once", 0, 30, 110, 120),
    ]
    assert summarise(entries(events)).lost_steps == 0, "it may be held in memory yet"
    run = summarise(entries([*events, event(121, "run_ended", 1, state="stopped", exit_code=75, reason="stopped")]))
    assert run.lost_steps == 8 and run.time_by_cause["lost work"] == pytest.approx(10 * 8 / 30, abs=0.01)


def test_the_state_between_attempts() -> None:
    """The gauge for `backoff` was always 0, and a run that waits for a node was said to be starting."""
    events = [*EVENTS[:6], event(121.5, "backoff", 1, delay_s=2.5)]
    assert summarise(entries(events)).state is RunState.BACKOFF
    events.append(event(122, "waiting_for_nodes", 1, nodes=[1]))
    assert summarise(entries(events)).state is RunState.WAITING
    assert summarise(entries([*events, EVENTS[6]])).state is RunState.RUNNING
