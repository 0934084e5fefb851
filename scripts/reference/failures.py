"""The failure classes, from the table in `runner.recovery.kinds`."""

from __future__ import annotations

from runner.recovery.kinds import Action, FailureKind, Rule
from scripts.reference.markdown import page, table, wrap


def render() -> str:
    rows = [
        [
            f"`{kind.value}`",
            kind.rule.known_by,
            kind.rule.response,
            _exit_code(kind.rule),
            "yes" if kind.rule.costs_budget else "no",
        ]
        for kind in FailureKind
    ]
    return page(
        "Failure classes",
        "runner/recovery/kinds.py",
        [
            wrap(
                "Every attempt ends in one of these classes, which the journal records as the `kind` of "
                "`attempt_ended`. Of several failing ranks and nodes the cause counts, not what it led to. A rank's "
                "exception belongs to the first class whose pattern matches its text. What a script says by itself "
                "names none: a `KeyError`, a `ValueError` and the like, or a `raise RuntimeError` in its own files."
            ),
            table(["class", "recognised by", "response", "exit code", "costs a restart"], rows),
            wrap(
                "Classes that cost a restart count against `restart.max_restarts` until a new checkpoint is "
                "committed. When that budget is spent, the run ends with [76 or 79](exit-codes.md). A second failure "
                "at the same step with the same error ends it with 78."
            ),
            "## Errors that identify a class",
            table(["class", "text of a rank's exception, for example"], _examples()),
        ],
    )


def _examples() -> list[list[str]]:
    return [
        [f"`{kind.value}`", " · ".join(f"`{example.strip()}`" for example in kind.rule.examples)]
        for kind in FailureKind
        if kind.rule.examples
    ]


def _exit_code(rule: Rule) -> str:
    if rule.action is Action.CONTINUE:
        return "none"
    return str(rule.exit_code.value) if rule.exit_code is not None else "76, 78 or 79"
