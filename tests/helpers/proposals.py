"""What rank 0 proposes to resume from, with what is done about damaged checkpoints; no time passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from checkpointing.agent.events import Event
from checkpointing.commit.tiers import Tiers
from checkpointing.resume.agreement import _Proposal, _propose, _quarantine
from checkpointing.resume.doubts import Doubts


def proposed(tiers: Tiers, announce: Callable[[Event], None]) -> _Proposal:
    doubts = Doubts(0, sleep=lambda seconds: None)
    while True:
        proposal = _propose(tiers, tiers.catalog, "auto", {}, doubts, announce)
        if proposal.step is not None or proposal.again:
            for one in doubts.condemned:
                _quarantine(tiers.nearest_first[one.tier], one.step, one.text, announce)
            doubts.forget_condemned()
        if not proposal.again:
            return replace(proposal, condemned=doubts.condemned)
