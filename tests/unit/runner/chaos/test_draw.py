"""Faults are drawn equally often, and only where they apply."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from checkpointing.commit.tiers import open_tiers
from runner.chaos.draw import FaultDraw
from runner.chaos.result import Injection, Result
from runner.chaos.scene import TRAINING, CampaignFailed, Effect, Fault


def fault(name: str, **options: bool) -> Fault:
    return Fault(name, Effect.ATTEMPT, lambda scene: "done", TRAINING, **options)


def test_all_kinds_are_drawn_equally_often(tmp_path: Path) -> None:
    result, tiers = Result(), open_tiers(str(tmp_path))
    draw = FaultDraw([fault("a"), fault("b"), fault("c")], random.Random(1), result)
    for number in range(9):
        drawn, moment = draw.next(tiers, may_halve=True)
        assert moment in TRAINING
        # A skipped fault counts as a try, or one that never applies would be drawn forever.
        if number % 2:
            draw.skip(drawn, "not now")
        else:
            result.injections.append(Injection(drawn.name, moment.value, 1, 1, "done"))
    tries = Counter(injection.fault for injection in result.injections)
    tries.update({name: number for name, (number, _) in result.skipped.items()})
    assert tries == {"a": 3, "b": 3, "c": 3}


def test_halving_faults_only_where_they_are_allowed(tmp_path: Path) -> None:
    tiers = open_tiers(str(tmp_path))
    draw = FaultDraw([fault("oom", halves=True), fault("kill")], random.Random(1), Result())
    assert not draw.all_halve
    assert {draw.next(tiers, may_halve=False)[0].name for _ in range(20)} == {"kill"}
    assert FaultDraw([fault("oom", halves=True)], random.Random(1), Result()).all_halve


def test_a_fault_that_does_not_apply_to_the_storage_is_refused(tmp_path: Path) -> None:
    draw = FaultDraw([fault("killed at remote.part")], random.Random(1), Result())
    with pytest.raises(CampaignFailed, match="--list"):
        draw.next(open_tiers(str(tmp_path)), may_halve=True)
