"""What the checkpoint agent and the ranks report: put on record, shown to the user, and kept for decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from checkpointing.agent.protocol import Message
from checkpointing.heartbeat import Heartbeat
from runner.ui.progress import ProgressDisplay

Record = Callable[..., None]
_PROGRESS_EVERY_S = 10.0


class AgentEvents:
    """The state of a node's checkpoints, as a fold over the events of its agent.

    Attributes:
        committed_step: The newest that this node's agent has committed or found; -1 before the first.
        batch: Samples per micro-batch, and micro-batches per step, as the ranks have said; None before.
        fenced: Why no attempt of this runner may write any more; None while it may.
        commit_s: Seconds that the last commit took; None before the first.
    """

    def __init__(self, display: ProgressDisplay, record: Record) -> None:
        self._display, self._record = display, record
        self.committed_step = -1
        self.batch: tuple[int, int] | None = None
        self.fenced: str | None = None
        self.commit_s: float | None = None
        # By tier: saves that it has refused since the last one that it took, and why the newest was.
        self._failed_saves: dict[str, tuple[int, str]] = {}
        # The newest step that the journal has of heartbeats, and when it was recorded.
        self._recorded_step, self._recorded_at = 0, 0.0

    @property
    def failed_saves(self) -> tuple[int, str]:
        """Saves in a row that one tier has refused, the most of any, and why the last one was."""
        return max(self._failed_saves.values(), default=(0, ""))

    def begin_attempt(self, number: int) -> None:
        """Forget what only the attempt before this one has reported."""
        # The next one may not come so far as to say.
        self.batch = None
        self._recorded_step, self._recorded_at = 0, 0.0
        self._display.state.attempt, self._display.state.activity = number, "starting"

    def show_heartbeats(self, beats: Iterable[Heartbeat], now: float) -> None:
        """Show how far the ranks have come, and record it every 10 s: a script may log no loss, or seldom.

        Args:
            now: Monotonic seconds.
        """
        steps = [beat.step for beat in beats if beat.start_time]
        if steps:
            step = max(steps)
            self._display.state.step, self._display.state.activity = step, f"step {step}"
            if step != self._recorded_step and now - self._recorded_at >= _PROGRESS_EVERY_S:
                self._recorded_step, self._recorded_at = step, now
                self._record("progress", step=step)
        self._display.refresh()

    def handle(self, event: str, message: Message) -> None:
        """Take in an event of this node's agent."""
        if event == "transfer":
            self._display.state.show_transfer(message)
            return
        if event == "batch_shape":
            self.batch = (int(message["micro_batch"]), int(message["accumulation"]))
            self._record(event, **message)
            return
        message.pop("attempt", None)
        self._record(event, **message)
        self._act_on(event, message)
        self._show_training(event, message)

    def handle_forwarded(self, event: str, details: Message) -> None:
        """Take in what rank 0 or an agent of another node has reported, as if it had been reported here."""
        if event == "batch_shape":
            self.batch = (int(details["micro_batch"]), int(details["accumulation"]))
            return
        self._record(event, **details)
        if event == "resumed":
            self._show_resumption(details)
        else:
            self._show_training(event, details)

    def _act_on(self, event: str, message: Message) -> None:
        say = self._display.message
        if event in ("committed", "commit_failed", "fetched", "fetch_failed"):
            self._display.state.transfer = ""
        match event:
            case "committed":
                self._failed_saves.pop(message["tier"], None)
                self.commit_s = message.get("duration_s")
                # Of a further stage, counted over all of them.
                self.committed_step = max(self.committed_step, int(message.get("run_step") or message["step"]))
                self._display.state.committed_step = message["step"]
            case "stage":
                say(f"stage {message['number']} of the script begins: its checkpoints are in {message['stage']}")
            case "commit_failed":
                count, _ = self._failed_saves.get(message["tier"], (0, ""))
                self._failed_saves[message["tier"]] = (count + 1, message["error"])
                say(f"checkpoint of step {message['step']} failed: {message['error']}")
            case "tier_unreachable":
                say(f"the {message['tier']} checkpoints cannot be reached: {message['reason']}")
            case "storage_retried":
                last = f"the last for: {message['reason']}"
                say(f"calls to the {message['tier']} checkpoints that were tried again: {message['count']}, {last}")
            case "fetched":
                size, seconds = message["nbytes"] / 1e6, message["duration_s"]
                say(f"read checkpoint-{message['step']} into memory: {size:,.1f} MB in {seconds:.1f} s")
            case "resumed":
                self._show_resumption(message)
            case "fenced":
                self.fenced = message["reason"]
            case "memory_short":
                say(f"memory for snapshots is short: {message['reason']}")
            case "snapshot_damaged" | "snapshot_dropped" if message["reason"]:
                say(f"the snapshot of step {message['step']} is not used: {message['reason']}")
            case "checkpoint_set_aside":
                say(f"checkpoint-{message['step']} is not used: {message['reason']}; kept as {message['kept_as']}")

    def _show_resumption(self, message: Message) -> None:
        state = self._display.state
        lost = state.step - message["step"]
        self._display.message(
            f"attempt {state.attempt} goes on from step {message['step']}"
            + f" ({'held in memory' if message['from'] == 'memory' else message['from'] + ' checkpoint'})"
            + (f", {lost} steps to compute again" if lost > 0 else "")
        )
        state.step = message["step"]

    def _show_training(self, event: str, message: Message) -> None:
        state = self._display.state
        if event == "training_started":
            state.total_steps = message["total_steps"]
        elif event == "log":
            state.loss = message["loss"]
            state.tokens_per_s = message.get("tokens_per_s") or state.tokens_per_s
