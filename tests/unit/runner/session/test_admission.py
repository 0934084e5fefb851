"""Which nodes train next, as a table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointing.agent.events import BatchShape
from runner.config.schema import Config
from runner.errors import UsageError
from runner.recovery.policy import WHOLE_BATCHES, BatchDivision
from runner.recovery.restart_state import RestartState
from runner.session.admission import (
    _FOLLOW_S,
    _RETURN_S,
    Limits,
    Seen,
    StepSamples,
    admit,
    change,
    check_shares,
    counts_samples,
    samples_per_step,
)
from runner.session.identity import JobIdentity

FIXED = Limits(3, 3)
ELASTIC = Limits(2, 3, last_call_s=30, grow_interval_s=60)


def nodes(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


@pytest.mark.parametrize(
    ("ready", "missing"), [((0,), [1, 2]), ((0, 2), [1]), ((0, 5), [1]), ((0, 4, 5), []), ((3, 4, 5, 6), [])]
)
def test_a_spare_takes_the_place_of_a_missing_node(ready: tuple[int, ...], missing: list[int]) -> None:
    assert FIXED.missing(nodes(*ready)) == missing


@pytest.mark.parametrize(
    ("limits", "seen", "enough_s", "chosen"),
    [
        # All, or nobody.
        (FIXED, Seen(nodes(0, 1)), 0, None),
        (FIXED, Seen(nodes(0, 1, 2)), 0, {0, 1, 2}),
        (FIXED, Seen(nodes(0, 1), members=nodes(0, 1, 2)), 1e9, None),
        # The first attempt: as many as come in time.
        (ELASTIC, Seen(nodes(0)), 0, None),
        (ELASTIC, Seen(nodes(0, 1)), 29, None),
        (ELASTIC, Seen(nodes(0, 1)), 30, {0, 1}),
        (ELASTIC, Seen(nodes(0, 1, 2)), 0, {0, 1, 2}),
        # One is lost: without waiting for it, nor for a node that is new.
        (ELASTIC, Seen(nodes(0, 2), members=nodes(0, 1, 2)), 0, {0, 2}),
        (ELASTIC, Seen(nodes(0, 2), nodes(3), nodes(0, 1, 2)), 0, {0, 2}),
        (ELASTIC, Seen(nodes(0), members=nodes(0, 1, 2)), 1e9, None),
        # The others' ranks are still ending.
        (ELASTIC, Seen(nodes(0, 1), nodes(2), nodes(0, 1, 2)), 0, None),
        (ELASTIC, Seen(nodes(0, 1), nodes(2), nodes(0, 1, 2)), _RETURN_S, {0, 1}),
        # More than the run may have: those that hold the state first, then the lowest.
        (Limits(1, 2), Seen(nodes(0, 1, 2), members=nodes(0, 2)), 0, {0, 2}),
        (Limits(1, 2), Seen(nodes(0, 1, 2, 3)), 0, {0, 1}),
        # The leader is lost: those that followed it look for the next one.
        (ELASTIC, Seen(nodes(1, 2), leader=1, expected=nodes(1, 2)), 0, {1, 2}),
        (Limits(1, 3, 30), Seen(nodes(1), leader=1, expected=nodes(1, 2)), 4, None),
        (Limits(1, 3, 30), Seen(nodes(1), leader=1, expected=nodes(1, 2)), _FOLLOW_S, {1}),
        (ELASTIC, Seen(nodes(1), leader=1, expected=nodes(1)), 1e9, None),
        # The leader always.
        (Limits(1, 2), Seen(nodes(0, 1, 2), members=nodes(0, 1), leader=2), 0, {0, 2}),
        (Limits(1, 2), Seen(nodes(0, 1, 2), members=nodes(1, 2)), 0, {0, 1}),
        # As many as can share the samples of a step: 4 ranks can, 3 nodes of 2 cannot.
        (Limits(1, 4, samples=8, local_ranks=2), Seen(nodes(0, 1, 2), members=nodes(0, 1, 2, 3)), 0, {0, 1}),
        # Of 2 nodes with 2 ranks each, all 4 ranks compute the same samples; 3 nodes cannot.
        (Limits(1, 4, samples=1, local_ranks=2, model_ranks=4), Seen(nodes(0, 1, 2)), 0, {0, 1}),
        (Limits(3, 4, samples=8, local_ranks=2), Seen(nodes(0, 1, 2), members=nodes(0, 1, 2, 3)), 0, None),
        # Unless some ranks may have fewer samples than others; each needs one, and one more makes it uneven.
        (Limits(1, 4, samples=8, local_ranks=2, uneven=True), Seen(nodes(0, 1, 2), members=nodes(0, 1)), 0, {0, 1, 2}),
        (Limits(1, 4, samples=5, local_ranks=2, uneven=True), Seen(nodes(0, 1, 2), members=nodes(0, 1)), 0, {0, 1}),
        # Two of three are all that can: no last call.
        (Limits(1, 3, 30, samples=8, local_ranks=1), Seen(nodes(0, 1)), 0, {0, 1}),
    ],
)
def test_who_begins(limits: Limits, seen: Seen, enough_s: float, chosen: set[int] | None) -> None:
    assert admit(limits, seen, enough_s=enough_s) == chosen


@pytest.mark.parametrize(
    ("seen", "leaving", "since_s", "chosen"),
    [
        (Seen(nodes(0), members=nodes(0, 1, 2)), set(), 1e9, None),
        # It has come back, but not long enough after the last change.
        (Seen(nodes(0, 2), members=nodes(0, 1)), set(), 59, None),
        (Seen(nodes(0, 2), members=nodes(0, 1)), set(), 60, {0, 1, 2}),
        (Seen(nodes(0), nodes(2), nodes(0, 1)), set(), 60, None),
        # A spare changes nothing, but is there when one leaves.
        (Seen(nodes(0, 3), members=nodes(0, 1, 2)), set(), 60, None),
        (Seen(nodes(0, 3), members=nodes(0, 1, 2)), {1}, 0, {0, 2, 3}),
        (Seen(nodes(0), members=nodes(0, 1, 2)), {1}, 0, {0, 2}),
        # Too few would be left: the run stops as a whole, which is not decided here.
        (Seen(nodes(0), members=nodes(0, 1)), {1}, 0, None),
    ],
)
def test_what_a_running_attempt_is_paused_for(
    seen: Seen, leaving: set[int], since_s: float, chosen: set[int] | None
) -> None:
    assert change(ELASTIC, seen, leaving=leaving, since_change_s=since_s) == chosen


def test_only_a_range_is_elastic() -> None:
    assert ELASTIC.is_elastic and not FIXED.is_elastic


@pytest.mark.parametrize(
    ("uneven", "parts", "text"),
    [
        (True, "virtual ranks", "has 4 virtual ranks, which 6 ranks cannot share; start at most 4 ranks in all"),
        (False, "samples", "has 4 samples, which 6 ranks cannot share equally; start 1, 2, 4 ranks in all"),
    ],
)
def test_too_many_ranks_for_a_step(uneven: bool, parts: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Limits(3, 3, samples=4, local_ranks=2, uneven=uneven, parts=parts).check()


def step_samples(known: int | None, *, has_script: bool = False) -> StepSamples:
    trainer = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
    config = Config.model_validate({"model": {"name_or_path": "model"}, "trainer": trainer})
    return StepSamples(config, known, WHOLE_BATCHES, has_script=has_script)


class Checkpoints:
    """A catalog with checkpoints of these steps and samples, the newest first; None is a broken one."""

    def __init__(self, *found: tuple[int, int] | None) -> None:
        self._found = found

    def scan(self) -> Iterator[Any]:
        for one in self._found:
            manifest = SimpleNamespace(step=one[0], samples_consumed=one[1]) if one is not None else None
            yield SimpleNamespace(manifest=manifest)


@pytest.mark.parametrize(("found", "number"), [([None, (10, 80), (5, 30)], 8), ([(0, 0)], None), ([], None)])
def test_the_newest_checkpoint_counts(found: list[tuple[int, int] | None], number: int | None) -> None:
    catalog: Any = Checkpoints(*found)
    assert samples_per_step(catalog) == number


def test_the_checkpoint_counts_before_the_configuration() -> None:
    assert step_samples(8).number(6) == 8
    assert step_samples(None).number(6) == 72


def test_of_a_script_only_what_its_ranks_have_reported_is_known() -> None:
    samples = step_samples(None, has_script=True)
    samples.learn(None, 2)
    assert samples.number(6) is None
    assert samples.learn(BatchShape(micro_batch=2, accumulation=5), 2)
    assert samples.number(6) == 20 and not samples.may_be_uneven


@pytest.mark.parametrize(("virtual_ranks", "number"), [(None, 6), (8, 8)])
def test_virtual_ranks_are_what_is_shared(virtual_ranks: int | None, number: int) -> None:
    elastic = {"mode": "exact", "virtual_ranks": virtual_ranks}
    config = Config.model_validate({"model": {"name_or_path": "model"}, "elastic": elastic})
    samples = StepSamples(config, 48, WHOLE_BATCHES, has_script=False)
    assert samples.number(6) == number and samples.may_be_uneven and samples.parts == "virtual ranks"
    # A script says how many it has.
    script = StepSamples(config, 48, BatchDivision(samples=4), has_script=True)
    assert script.number(6) == (virtual_ranks or 4)


def test_ranks_that_compute_the_same_samples_count_as_one() -> None:
    samples = step_samples(None, has_script=True)
    shape = BatchShape(micro_batch=2, accumulation=5, model_ranks=2)
    assert samples.learn(shape, 4) and samples.number(8) == 20 and samples.model_ranks == 2
    assert not samples.learn(shape, 4)


@pytest.mark.parametrize("batch", [None, BatchShape(micro_batch=1, accumulation=1)])
def test_what_is_known_stays(batch: BatchShape | None) -> None:
    samples = step_samples(8)
    assert not samples.learn(batch, 3)
    assert samples.number(6) == 8


def test_samples_that_any_number_of_ranks_can_share() -> None:
    """Three ranks share 8 samples in two micro-batches of up to 2 each, which are not 12."""
    samples = step_samples(None, has_script=True)
    shape = BatchShape(micro_batch=2, accumulation=2, samples=8)
    assert samples.learn(shape, 3) and samples.number(6) == 8 and samples.may_be_uneven
    assert not samples.learn(shape, 3)
    # The next attempt's ranks say otherwise: the script has changed.
    assert samples.learn(BatchShape(micro_batch=2, accumulation=2), 2) and not samples.may_be_uneven


def test_what_an_earlier_session_was_told_is_known(tmp_path: Path) -> None:
    config = Config.model_validate({"output_dir": str(tmp_path / "run")})
    state = RestartState(batch=BatchDivision(2, 2, 1, 8, 2))
    known = StepSamples(config, None, RestartState.from_json(state.to_json(1)).batch, has_script=True)
    assert known.may_be_uneven and known.model_ranks == 2


def test_ranks_that_cannot_share_a_step_are_refused_before_anything_is_started() -> None:
    for ranks in (1, 2, 4, 8):
        check_shares(8, ranks)
    check_shares(8, 3, 4)
    with pytest.raises(UsageError, match=r"a step of this run has 8 samples, which 3 ranks .* start 1, 2, 4, 8"):
        check_shares(8, 3)


def test_ranks_that_compute_the_same_samples_share_them_as_one() -> None:
    check_shares(6, 12, model_ranks=2)
    with pytest.raises(UsageError, match=r"6 samples, which 8 ranks .* start 2, 4, 6, 12 ranks"):
        check_shares(6, 8, model_ranks=2)
    with pytest.raises(UsageError, match="which 3 ranks"):
        check_shares(6, 3, model_ranks=2)


def test_samples_are_counted_where_it_is_known_how_steps_are_cut() -> None:
    own, configured = JobIdentity({"job": "script train.py"}), JobIdentity({"job": "the configured job"})
    assert counts_samples(configured, RestartState()) and not counts_samples(own, RestartState())
    assert counts_samples(own, RestartState(batch=BatchDivision(4, 1)))
