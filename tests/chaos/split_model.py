"""A file that two nodes write, as in `checkpointing/commit/replicated_save.py`: one commits, one may be slow or wrong.

Each write of the other node may be under way when that node is given up, arrive at any time later, and arrive twice.
On a disk it reaches the file that was open, whatever has become of its name; an upload that is over refuses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from chaos.commit_model import Fault

GOOD, BAD, NOTHING = "good", "bad", "nothing"


@dataclass(frozen=True)
class SplitRules:
    """The rules that the code follows; a mutation breaks one of them."""

    compares_digests: bool = True
    reports_what_is_written: bool = True
    writes_alone_elsewhere: bool = True


CODED = SplitRules()


class State(NamedTuple):
    """A state of everything.

    Attributes:
        phase: Of the node that commits: opened, written, alone (it gave the other up), complete, published.
        other: Of the other node: begun, sending, sent, reported, failed.
        sends: What the other node sends: its memory may be damaged.
        arrivals_left: How often what it has sent may still arrive.
        shared: The file that both write: its two parts.
        is_over: It was dropped or completed.
        published: Which file the checkpoint names: shared, or own.
        own: The file that the first node has written alone.
        damages_left: How often memory may be damaged.
    """

    phase: str = "opened"
    other: str = "begun"
    sends: str = GOOD
    arrivals_left: int = 0
    shared: tuple[str, str] = (NOTHING, NOTHING)
    is_over: bool = False
    published: str = ""
    own: tuple[str, str] = (NOTHING, NOTHING)
    damages_left: int = 1


class SplitModel:
    """See the module."""

    def __init__(self, *, disk: bool, rules: SplitRules = CODED) -> None:
        """Begin with an open file.

        Args:
            disk: A file on a disk, and not an upload.
            rules: What the nodes do.
        """
        self._disk, self._rules = disk, rules
        self.first = State()

    def successors(self, now: State) -> Iterator[tuple[object, State]]:
        """Every next state and how it comes about.

        Raises:
            Fault: in one of them the published file is not what was trained.
        """
        for what, after in (*self._committing(now), *self._other(now)):
            named = {"shared": after.shared, "own": after.own}.get(after.published, (GOOD, GOOD))
            if named != (GOOD, GOOD):
                raise Fault(f"{what}: the checkpoint has {named[0]} and {named[1]}")
            yield what, after

    def _committing(self, now: State) -> Iterator[tuple[str, State]]:
        match now.phase:
            case "opened":
                yield "writes its part", now._replace(phase="written", shared=(GOOD, now.shared[1]))
            case "written":
                reported = now.other == "reported"
                if reported and now.sends == BAD and self._rules.compares_digests:
                    yield "finds other bytes", now._replace(phase="failed", is_over=True)
                elif reported:
                    yield "completes", now._replace(phase="complete", is_over=True, own=now.own)
                # At any time: it may find the other one silent though that is only slow.
                yield "gives the other up", now._replace(phase="alone", is_over=True)
            case "alone" if self._rules.writes_alone_elsewhere:
                yield "writes alone", now._replace(phase="complete", own=(GOOD, GOOD))
            case "alone":
                yield "writes alone", now._replace(phase="complete", shared=(GOOD, GOOD))
            case "complete":
                is_own = now.own != (NOTHING, NOTHING)
                yield "publishes", now._replace(phase="published", published="own" if is_own else "shared")

    def _other(self, now: State) -> Iterator[tuple[str, State]]:
        if now.damages_left and now.other in ("begun", "sending"):
            yield "memory is damaged", now._replace(sends=BAD, damages_left=0)
        if now.other == "begun":
            yield "the other one sends", now._replace(other="sending", arrivals_left=2)
        if now.other == "sending" and not self._rules.reports_what_is_written:
            yield "the other one reports", now._replace(other="reported")
        if now.other == "sent":
            yield "the other one reports", now._replace(other="reported")
        if now.arrivals_left:
            refused = now.is_over and not self._disk
            shared = now.shared if refused else (now.shared[0], now.sends)
            answered = "failed" if refused else "sent"
            other = answered if now.other == "sending" else now.other
            after = now._replace(arrivals_left=now.arrivals_left - 1, shared=shared, other=other)
            yield "what was sent arrives", after
        if now.other != "dead":
            yield "the other one dies", now._replace(other="dead")
