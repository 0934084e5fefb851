"""Compares the steps that a resumed run recomputes with the record of their first computation, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from checkpointing.agent.events import StepsRepeated
from checkpointing.errors import RepetitionDiffers
from checkpointing.format.step_record import GENERATORS, StepRecord
from checkpointing.process.ranks import Ranks

Verify = Literal["auto", "strict", "off"]
# A step's results; everything else is what it was computed from.
_RESULTS = {"loss", "gradient_norm", "parameters"}


class _Verdict(NamedTuple):
    """What one rank has found."""

    first: int
    last: int
    differs: tuple[str, ...]
    by_itself: bool


class Repetition:
    """The comparison of one rank: which of its steps are recomputed, and whether they are equal.

    Args:
        start: The step that was resumed from.
        earlier: Records of the steps as they were computed before, by step.
        is_strict: Whether a step that has differed before differs still if it is equal to that repetition.
    """

    def __init__(self, start: int, earlier: Mapping[int, StepRecord], *, is_strict: bool = False) -> None:
        self._start, self._earlier, self._is_strict = start, earlier, is_strict
        self.last = max((step for step in earlier if step > start), default=start)
        self._first, self._equal = 0, start
        self._differs: tuple[str, ...] = ()
        self._by_itself = False
        self._unlike: tuple[str, ...] = ()
        self._has_looked = False

    def look_at_start(self, generators: Mapping[str, int]) -> None:
        """Compare the generators as they were restored; the first call counts."""
        before, self._has_looked, was = self._earlier.get(self._start), True, self._has_looked
        if before is not None and not was:
            self._unlike = before.differences(StepRecord(self._start, generators))

    def differs(self, record: StepRecord) -> tuple[str, ...]:
        """Compare a step, and return what differs; all steps after one are expected to differ, and are not compared."""
        earlier = self._earlier.get(record.step)
        if earlier is None or record.step <= self._start or self._differs:
            return ()
        self._first = self._first or record.step
        found = earlier.differences(record)
        if self._start == 0 and set(found) <= set(GENERATORS):
            # Nothing was restored: a script need not seed what it does not use.
            found = ()
        # It differed the last time, too, and not in the same way.
        self._by_itself = bool(found and earlier.differed) and not self._unlike and _RESULTS.issuperset(found)
        if not found and self._is_strict:
            found = earlier.differed
        if not found:
            self._equal = record.step
            return ()
        self._differs = tuple(dict.fromkeys([*self._unlike, *found]))
        return self._differs

    @property
    def has_found_difference(self) -> bool:
        """Whether a step differs."""
        return bool(self._differs)

    def verdict(self) -> _Verdict:
        """Return what was found so far."""
        return _Verdict(self._first, self._equal, self._differs, self._by_itself)


class ResumeProof:
    """Has all ranks compare, and reports once what they have found; every rank calls all methods at the same step.

    Args:
        ranks: This rank, with a group that the training thread uses.
        verify: `auto` reports a difference, `strict` raises.
        report: Takes the report, on every rank.
        candidates: Names what was probably not restored.
    """

    def __init__(
        self,
        ranks: Ranks,
        verify: Verify,
        report: Callable[[StepsRepeated], None],
        candidates: Callable[[int], list[str]],
    ) -> None:
        self._ranks, self._verify, self._report, self._candidates = ranks, verify, report, candidates
        self._own: Repetition | None = None
        self._start = self._last = 0

    def begin(self, start: int, earlier: Mapping[int, StepRecord]) -> None:
        """Begin after `start`; `earlier` are this rank's records of steps that were computed before."""
        own = Repetition(start, earlier, is_strict=self._verify == "strict")
        # Where a rank has no record, the others' are compared.
        self._start, self._last = start, max(self._ranks.gather(own.last))
        self._own = own if self._last > start else None

    @property
    def wants_to_tell(self) -> bool:
        """Whether this rank has found a difference that the others have not heard of."""
        return self._own is not None and self._own.has_found_difference

    def look_at_start(self, generators: Callable[[], Mapping[str, int]]) -> None:
        """Compare the generators as they were restored, before anything draws from them."""
        if self._own is not None:
            self._own.look_at_start(generators())

    def differs(self, record: StepRecord) -> tuple[str, ...]:
        """Compare a step of this rank, and return what differs."""
        return self._own.differs(record) if self._own is not None else ()

    def end_of_step(self, step: int, settle: Callable[[], None], *, agreed: bool) -> None:
        """Come to a verdict where all steps were recomputed, or the ranks have agreed that one has found something.

        Args:
            step: The step that has ended.
            settle: Waits for what a device has yet to compute.
            agreed: Whether any rank has found a difference.

        Raises:
            RepetitionDiffers: With `strict`: a step differs.
        """
        if self._own is None:
            return
        # What a device is late with belongs to the step before.
        if agreed or step > self._last or self._verify == "strict":
            settle()
            self._conclude(is_over=step >= self._last)

    def close(self, settle: Callable[[], None]) -> None:
        """Come to a verdict on what has been computed so far."""
        if self._own is not None:
            settle()
            self._conclude(is_over=True)

    def _conclude(self, *, is_over: bool) -> None:
        assert self._own is not None
        found: Sequence[_Verdict] = self._ranks.gather(self._own.verdict())
        unequal = [(verdict.last, rank) for rank, verdict in enumerate(found) if verdict.differs]
        if not unequal and not is_over:
            return
        self._own = None
        compared = [verdict for verdict in found if verdict.first]
        if not compared:
            return
        first = min(verdict.first for verdict in compared)
        if not unequal:
            last = min(verdict.last for verdict in compared)
            self._report(StepsRepeated(step=self._start, first=first, last=last))
            return
        last, rank = min(unequal)
        worst = found[rank]
        event = StepsRepeated(
            step=self._start,
            first=first,
            last=last,
            differs=list(worst.differs),
            rank=rank,
            by_itself=worst.by_itself,
            candidates=self._candidates(last + 1) if not worst.by_itself else [],
        )
        self._report(event)
        if self._verify == "strict" and not worst.by_itself:
            raise RepetitionDiffers(event.describe())
