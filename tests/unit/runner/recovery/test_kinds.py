"""The table of failure classes: every row is complete, and one row is all that a class needs."""

from __future__ import annotations

import re

import pytest

from runner.errors import ExitCode
from runner.recovery.classify import RankEnd, classify
from runner.recovery.failure import Failure, combine
from runner.recovery.kinds import Action, FailureKind, Rule, is_failure, kind_of_error
from runner.recovery.policy import AttemptRecord, Restart, Stop, decide

# Actions of which some outcome ends the run with the class's own exit code.
ENDS_RUN = set(Action) - {Action.RESTART, Action.CONTINUE}


def decide_after(failure: Failure, *, times: int = 1, stop_requested: bool = False) -> Restart | Stop:
    history = [AttemptRecord(failure, -1)] * times
    return decide(history, max_restarts=2, max_network_retries=1, stop_requested=stop_requested)


@pytest.mark.parametrize("kind", FailureKind)
def test_every_row_is_complete(kind: FailureKind) -> None:
    rule = kind.rule
    assert rule.known_by and rule.response
    assert "|" not in rule.known_by + rule.response, "it would break the table of the reference"
    assert (rule.exit_code is not None) is (rule.action in ENDS_RUN)
    assert rule.is_failure or not rule.costs_budget, "an end that was wanted costs nothing"
    assert "{cause}" in rule.reason


@pytest.mark.parametrize("kind", FailureKind)
def test_every_class_ends_a_run_sooner_or_later_with_its_exit_code(kind: FailureKind) -> None:
    """For RESTART that is the code of the budget, here without any checkpoint."""
    # The same step each time, and the signature of a deterministic error for the classes that have one.
    signature = "print" if kind.rule.action is Action.SKIP else ""
    failure = Failure(kind, "why", 0, 5, signature)
    decisions = [decide_after(failure, times=times) for times in range(1, 5)]
    ends = [decision for decision in decisions if isinstance(decision, Stop)]
    if kind.rule.action is Action.CONTINUE:
        assert not ends, "nothing has failed"
        return
    if kind.rule.action is Action.HALVE:
        assert not ends, "bounded by the smallest micro-batch; see the tests of the policy"
        return
    assert ends, decisions
    assert ends[0].exit_code == (kind.rule.exit_code if kind.rule.exit_code is not None else ExitCode.NO_PROGRESS)


@pytest.mark.parametrize("kind", FailureKind)
def test_every_pattern_has_examples_and_belongs_to_its_class(kind: FailureKind) -> None:
    examples = kind.rule.examples
    assert bool(examples) is (kind.rule.error is not None)
    assert [kind_of_error(example) for example in examples] == [kind] * len(examples)


@pytest.mark.parametrize("kind", [kind for kind in FailureKind if kind.rule.error is not None])
def test_every_alternative_of_a_pattern_has_an_example(kind: FailureKind) -> None:
    assert kind.rule.error is not None
    for alternative in alternatives(kind.rule.error):
        assert any(alternative.search(example) for example in kind.rule.examples), alternative.pattern


def alternatives(pattern: re.Pattern[str]) -> list[re.Pattern[str]]:
    """Split a pattern at the bars that are in no group."""
    depth, parts = 0, [""]
    for character in re.sub(r"\\.", lambda escaped: chr(0xE000 + ord(escaped[0][1])), pattern.pattern):
        depth += (character == "(") - (character == ")")
        if character == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    unescaped = ["".join(f"\\{chr(ord(c) - 0xE000)}" if c >= "\ue000" else c for c in part) for part in parts]
    return [re.compile(part, pattern.flags) for part in unescaped]


def test_a_text_that_no_pattern_matches_belongs_to_no_class() -> None:
    assert kind_of_error("ValueError: bad row") is None


@pytest.mark.parametrize("kind", FailureKind)
def test_journals_name_the_classes(kind: FailureKind) -> None:
    assert FailureKind(kind.value) is kind
    assert is_failure(kind.value) is kind.rule.is_failure


@pytest.mark.parametrize("kind", ["of a newer version", "", "running"])
def test_an_unknown_class_counts_as_a_failure(kind: str) -> None:
    assert is_failure(kind)


def test_only_wanted_ends_with_everything_saved_are_orderly() -> None:
    assert {kind for kind in FailureKind if kind.is_orderly} == {FailureKind.FINISHED, FailureKind.PREEMPTED}
    assert not any(kind.rule.is_failure for kind in FailureKind if kind.is_orderly)


# -- one row is enough -------------------------------------------------------------------------------------------------

LICENCE = RankEnd(1, 0, 1, "LicenceError: no seat is free", "f.py:3")


@pytest.fixture
def licence(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FailureKind:
    """A class that is defined by its row alone, in the place of one without a pattern."""
    rule = Rule(
        FailureKind.RUNNER_LOST.value,
        known_by="the error of the licence server",
        response="end the run; start it when a seat is free",
        error=re.compile("^LicenceError"),
        advice="; free a seat, then start again",
        reason="no licence: {cause}",
        effect_rank=0,
        **request.param,
    )
    monkeypatch.setattr(FailureKind.RUNNER_LOST, "rule", rule)
    return FailureKind.RUNNER_LOST


ENDING = {"action": Action.GIVE_UP, "exit_code": ExitCode.BAD_NODE}
FREE = {"action": Action.RETRY, "exit_code": ExitCode.BUDGET_SPENT, "costs_budget": False}


@pytest.mark.parametrize("licence", [ENDING], indirect=True)
def test_a_row_is_recognised_and_decided(licence: FailureKind) -> None:
    failure = classify([LICENCE], finished=False, started_step=0, step=5)
    assert failure.kind is licence and failure.cause.endswith("no seat is free; free a seat, then start again")
    assert decide_after(failure) == Stop(ExitCode.BAD_NODE, f"no licence: {failure.cause}")
    assert decide_after(failure, stop_requested=True).exit_code is ExitCode.PREEMPTED  # type: ignore[union-attr]
    # The licence is the cause, the crash of the other node its effect.
    lost = Failure(FailureKind.CRASHED, "rank 3: RuntimeError: Connection closed by peer", 3)
    assert combine([lost, failure]).kind is licence


@pytest.mark.parametrize("licence", [FREE], indirect=True)
def test_a_row_with_bounds_of_its_own_costs_no_budget(licence: FailureKind) -> None:
    failure = classify([LICENCE], finished=False, started_step=0, step=5)
    retry, spent = decide_after(failure), decide_after(failure, times=2)
    assert isinstance(retry, Restart) and isinstance(spent, Stop) and spent.exit_code is ExitCode.BUDGET_SPENT
    crashes = [AttemptRecord(Failure(FailureKind.CRASHED, "why", 0, 5 + step), -1) for step in range(2)]
    history = [crashes[0], AttemptRecord(failure, -1), crashes[1]]
    last = decide(history, max_restarts=2, stop_requested=False)
    assert isinstance(last, Restart) and last.failures_in_a_row == 2
