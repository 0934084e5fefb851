"""How ranks are started: as forks of a preloaded process, or as fresh interpreters if forks cannot use the GPU."""

from __future__ import annotations

from dataclasses import replace

from runner.journal.events import ColdStart, Record
from runner.recovery.failure import Failure
from runner.ui.progress import ProgressDisplay


class StartMethod:
    """Chooses how ranks are started.

    Attributes:
        cold: Whether ranks are fresh interpreters instead of forks of a preloaded one.
    """

    def __init__(self, *, cold: bool, display: ProgressDisplay, record: Record) -> None:
        """Begin with the user's choice.

        Args:
            cold: Whether the user wants fresh interpreters.
            display: The console.
            record: Appends an event to the journal.
        """
        self.cold, self._display, self._record = cold, display, record

    def revise(self, failure: Failure) -> Failure:
        """Change to fresh interpreters if an attempt failed because forks cannot use the GPU.

        Args:
            failure: Why the attempt ended.

        Returns:
            The failure; it is not worth a retry if the ranks were fresh interpreters already.
        """
        if self.cold:
            # Forking is not the cause.
            return replace(failure, may_pass=failure.may_pass and not failure.in_fork, in_fork=False)
        if failure.in_fork:
            self.cold = True
            self._record(ColdStart(reason=failure.cause))
            self._display.message(
                "a module that is imported before the ranks are forked has initialized the GPU driver, which forks "
                "cannot use then; from now on ranks start as fresh interpreters, which takes some seconds more (--cold "
                "does so from the beginning)"
            )
        return failure
