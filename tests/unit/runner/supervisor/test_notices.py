"""Messages that are shown once, and when there is something to show."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.node_fakes import FakeDisplay

from runner.config.schema import Config
from runner.recovery.failure import Failure
from runner.recovery.kinds import FailureKind
from runner.supervisor.supervisor import Notices


class Bench:
    def __init__(self, **config: Any) -> None:
        self.display = FakeDisplay()
        display: Any = self.display
        self.notices = Notices(Config.model_validate({"trainer": {"learning_rate": 2e-5}, **config}), display)


def test_the_scaled_learning_rate_is_shown_once() -> None:
    bench = Bench()
    bench.notices.show_learning_rate(4)
    bench.notices.show_learning_rate(8)
    (text,) = bench.display.texts
    assert text.startswith("learning rate 2e-05 x 4 ranks = 8e-05")


def test_with_virtual_ranks_it_follows_their_number() -> None:
    bench = Bench(elastic={"mode": "exact", "virtual_ranks": 8})
    bench.notices.show_learning_rate(1)
    assert bench.display.texts[0].startswith("learning rate 2e-05 x 8 virtual ranks = 0.00016")


@pytest.mark.parametrize(
    ("ranks", "config"),
    [(1, {}), (4, {"scale_learning_rate": False}), (4, {"trainer": {"learning_rate": None}})],
)
def test_a_learning_rate_as_configured_is_not_shown(ranks: int, config: dict[str, Any]) -> None:
    bench = Bench(**config)
    bench.notices.show_learning_rate(ranks)
    assert not bench.display.texts


@pytest.mark.parametrize(
    ("kind", "rank", "shown"),
    [
        (FailureKind.CRASHED, 1, True),
        (FailureKind.OUT_OF_MEMORY, 0, True),
        # torchrun itself: no rank has run.
        (FailureKind.CRASHED, None, False),
        # Nothing went wrong, or before it could save anything.
        (FailureKind.FINISHED, None, False),
        (FailureKind.BOOT, 0, False),
        (FailureKind.NETWORK, 1, False),
    ],
)
def test_a_script_that_saves_nothing_is_pointed_out_once(kind: FailureKind, rank: int | None, shown: bool) -> None:
    bench = Bench()
    for _ in range(2):
        bench.notices.show_unsaved(Failure(kind, "why", rank))
    assert len(bench.display.texts) == int(shown)
