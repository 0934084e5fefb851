"""Notifications about a run: a fold over its events.

Of each event at most one notification is made, of the kinds in `notify.events`. A restart costs one: that training has
resumed, and after what.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from checkpointing.agent.events import Committed, Log, TrainingStarted
from runner.journal.events import AttemptEnded, Entry, HangFound, LeaderChanged, Progress, RunEnded, RunStarted
from runner.journal.summary import RunState
from runner.session.masking import masked
from runner.system.text import all_visible

# Longer reasons, such as the message of a script's exception, are cut.
_LONGEST_REASON = 600
_TEXTS = {"resumed": "resumed from step {step} after: {reason}", "finished": "finished at step {step}"}
_OF_STATE = {RunState.FINISHED.value: "finished", RunState.PREEMPTED.value: "preempted"}


@dataclass(frozen=True)
class Notification:
    """One message.

    Attributes:
        kind: One of `notify.events`, or ``test``.
        text: What happened, for people.
        facts: The same for programs.
        time: Seconds since the epoch.
        id: The same for each try to deliver it.
    """

    kind: str
    text: str
    facts: dict[str, Any]
    time: float
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")

    def body(self, style: str) -> bytes:
        """Return what is posted, in the style of `notify.format`."""
        if style == "slack":
            # https://docs.slack.dev/messaging/formatting-message-text#escaping
            text = self.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
            return json.dumps({"text": text}).encode()
        when = datetime.fromtimestamp(self.time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        data = {**self.facts, "text": self.text}
        return json.dumps({"type": f"run.{self.kind}", "timestamp": when, "data": data}).encode()


class Notifications:
    """Makes the notifications of the session that leads a run."""

    def __init__(self, run_id: str, name: str, host: str, wanted: Collection[str]) -> None:
        """Prepare.

        Args:
            run_id: Identity of the run.
            name: Its name for people.
            host: The machine of its leader.
            wanted: The kinds to make.
        """
        self._about, self._name = {"run_id": run_id, "run": name, "host": host}, name
        self._wanted = wanted
        # The newest finished step, the newest committed one, and why the attempt before ended.
        self._step, self._committed, self._cause = 0, -1, ""
        # The newest attempt whose training has begun.
        self._trained = 0

    def take(self, entry: Entry) -> Notification | None:
        """Fold an event; return the notification of it, if there is one."""
        match entry.event:
            case RunStarted(committed_step=step):
                self._committed = step
            case Progress(step=step):
                self._step = step
            case Log() as log:
                self._step = log.step_of_run
            case Committed() as committed:
                self._committed = max(self._committed, committed.step_of_run)
            case AttemptEnded() as end:
                self._step, self._cause = end.step, end.cause
                self._committed = max(self._committed, end.committed_step)
            case LeaderChanged(node=node):
                self._cause = f"the leader was lost, and node {node} leads"
            case TrainingStarted() as begun:
                return self._training_began(begun, entry)
            case HangFound(reason=reason, ranks=ranks):
                names = f"rank {', '.join(map(str, ranks))}" if ranks else "a rank"
                return self._notification("stuck", entry, f"{names}: {reason}", ranks=ranks)
            case RunEnded() as end:
                return self._ended(end, entry)
            case _:
                pass
        return None

    def _training_began(self, begun: TrainingStarted, entry: Entry) -> Notification | None:
        """Report once for each attempt that is not the run's first one."""
        is_news, self._trained = entry.attempt > max(self._trained, 1), entry.attempt
        if not is_news:
            return None
        self._step = begun.step_of_run
        return self._notification("resumed", entry, self._cause or "the runner was started again")

    def _ended(self, end: RunEnded, entry: Entry) -> Notification | None:
        return self._notification(_OF_STATE.get(end.state, "failed"), entry, end.reason, exit_code=end.exit_code)

    def _notification(self, kind: str, entry: Entry, reason: str, **facts: Any) -> Notification | None:
        if kind not in self._wanted:
            return None
        reason = all_visible(masked(reason))
        reason = reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}…"
        text = _TEXTS.get(kind, "{kind} at step {step}: {reason}")
        what = text.format(kind=kind, step=self._step, reason=reason or "no reason is known")
        kept = f"newest checkpoint: step {self._committed}" if self._committed >= 0 else "no checkpoint"
        text = f"[{self._name}] {what}; {kept} (attempt {entry.attempt}, {self._about['host']})"
        known = {"attempt": entry.attempt, "step": self._step, "committed_step": self._committed, "reason": reason}
        return Notification(kind, text, {**self._about, **known, **facts}, entry.time)
