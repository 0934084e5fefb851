"""The table of compatibility cases: what each one runs, and the verdict it must get.

A case is a small function that trains something on every rank. The harness runs it undisturbed, killed and restarted,
and, where it trains through a Hugging Face trainer, also without `resilient`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compatibility.ranks import Run

# Steps of a case, the steps between two checkpoints, and the number of steps done when the ranks are killed. Data sets
# of 14 samples have 4 steps of 2 x 2 samples: the run is resumed in the middle of its second epoch.
MAX_STEPS = 10
SAVE_STEPS = 3
KILL_STEP = 7


@dataclass(frozen=True)
class Verdict:
    """What must come out of a case.

    Attributes:
        kind: "identical", "refused" or "differs".
        detail: a regular expression that the refusal matches, or the documented reason for the difference.
        part: a regular expression that must match what differs.
        warning: a regular expression that a line of the log must match.
        at_resume: the refusal comes when the run is restarted; by default it must come before training is lost.
    """

    kind: str
    detail: str = ""
    part: str = ""
    warning: str | None = None
    at_resume: bool = False


IDENTICAL = Verdict("identical")


def refused(message: str, *, at_resume: bool = False) -> Verdict:
    return Verdict("refused", message, at_resume=at_resume)


def differs(reason: str, *, part: str, warning: str | None = None) -> Verdict:
    return Verdict("differs", reason, part, warning)


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: "group/what is special about it".
        body: runs on every rank.
        ranks: 1 runs without a process group.
        stock: also run without `resilient`, which must see the same batches and end in the same parameters.
        kills: stage and step at which the ranks are killed, one for each restart.
        needs: packages without which the case is skipped.
        saved: step whose checkpoint must be committed before each kill.
        timeout_s: of each of its runs.
        twice: also run without a failure a second time, which must end in the same bits.
        in_table: False for the cases that test the harness itself.
    """

    name: str
    body: Callable[[Run], None]
    verdict: Verdict = IDENTICAL
    ranks: int = 2
    stock: bool = False
    kills: tuple[tuple[int, int], ...] = ((0, KILL_STEP),)
    needs: tuple[str, ...] = ()
    saved: tuple[int, ...] = (KILL_STEP // SAVE_STEPS * SAVE_STEPS,)
    timeout_s: float = 90.0
    twice: bool = False
    in_table: bool = True

    @property
    def missing(self) -> list[str]:
        """Packages that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


CASES: dict[str, Case] = {}


def case(name: str, **options: Any) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Register a function as the body of a case; for the options see `Case`."""

    def register(body: Callable[[Run], None]) -> Callable[[Run], None]:
        if name in CASES:
            raise ValueError(f"two cases are named {name!r}")
        CASES[name] = Case(name, body, **options)
        return body

    return register


def load_cases() -> dict[str, Case]:
    """Import every `cases_*.py`; imports torch, transformers and trl."""
    for path in sorted(Path(__file__).parent.glob("cases_*.py")):
        importlib.import_module(f"compatibility.{path.stem}")
    return CASES
