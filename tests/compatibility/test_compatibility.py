"""The compatibility table: a few cases by default, one for each kind of behaviour and then all of it in `soak`.

`scripts/compatibility` runs all of it, too, and writes docs/reference/compatibility.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import pytest
from compatibility.harness import ForkServer, fork_server

pytestmark = [pytest.mark.xdist_group("compatibility"), pytest.mark.timeout(400)]

REPRESENTATIVE = [
    "trainer/defaults",
    "trainer/gradient accumulation",
    "trainer/killed twice",
    "trainer/group_by_length",
    "trainer/early stopping",
    "trainer/moving average in states",
    "trainer/overridden _save_checkpoint",
    "trainer/on_save finds the checkpoint",
    "trainer/load_best_model_at_end",
    "samplers/weighted, global generator",
    "samplers/own sampler with set_epoch",
    "samplers/own loader",
    "streams/datasets streaming",
    "randomness/masked language modelling, workers",
    "trl/SFT LoRA",
    "trl/DPO synchronised reference model",
    "trl/GRPO several iterations",
    "trl/RLOO",
    "models/BatchNorm, buffers of each rank",
    "models/extra state, dict",
    "optimizers/numpy rate",
    "optimizers/object in a group",
    "states/lambda",
    "states/of each rank",
    "loops/last step is committed",
    "loaders/noise for each sample, workers",
    "readers/stock Trainer resumes",
    "migration/in a folder of a stock Trainer",
    "stages/SFT, then DPO",
    "stages/two trainers in one folder",
]
# Of these, what the default tiers run: a trainer, a loop of one's own, a stream, an adapter, a migration.
DEFAULT = {
    "trainer/killed twice",
    "trainer/load_best_model_at_end",
    "samplers/own loader",
    "streams/datasets streaming",
    "trl/SFT LoRA",
    "models/BatchNorm, buffers of each rank",
    "states/of each rank",
    "loops/last step is committed",
    "readers/stock Trainer resumes",
    "migration/in a folder of a stock Trainer",
}
# What the harness must find out, and a part of what it must say.
HARNESS = {
    "harness/data set that cannot be resumed": ("differs", "after the kill: batch of stage 0"),
    "harness/state that nobody saves": ("differs", "after the kill: average/0"),
    "harness/batches that resilient changes": ("differs", "changed by resilient: batch of stage 0, step 0000"),
    "harness/error": ("crash", "KeyError: 'nothing of this name'"),
    "harness/refusal": ("refused", "this is not supported; use that"),
    "harness/refusal at the restart": ("refused", "restart 1: CheckpointError: now it is not supported"),
    "harness/hang": ("hang", "no end within the time"),
    "harness/rank that dies": ("crash", "the ranks ended with"),
    "harness/mismatch": ("differs", "weights/a"),
    "harness/package that nobody has": ("skipped", "no_such_package"),
}
HARNESS_DEFAULT = {
    "harness/state that nobody saves",
    "harness/error",
    "harness/hang",
    "harness/package that nobody has",
}


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    with fork_server() as started:
        yield started


def soaking(names: Iterable[str], default: Collection[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in default else [pytest.mark.soak]) for name in names]


@pytest.mark.parametrize("name", soaking(REPRESENTATIVE, DEFAULT))
def test_case(server: ForkServer, name: str) -> None:
    case, _ = server.cases[name]
    outcome = server.judge(name)
    if outcome.kind == "skipped":
        pytest.skip(outcome.note)
    assert outcome.matches(case.verdict), f"{outcome.kind}: {outcome.note}\n{outcome.log[-2000:]}"


@pytest.mark.parametrize("name", soaking(HARNESS, HARNESS_DEFAULT))
def test_harness_tells(server: ForkServer, name: str) -> None:
    kind, note = HARNESS[name]
    case, _ = server.cases[name]
    outcome = server.judge(name)
    assert (outcome.kind, note in outcome.note) == (kind, True), outcome.note
    assert outcome.matches(case.verdict) == (kind == "skipped"), "expected to be identical, and is not"


def test_late_refusal_is_not_accepted(server: ForkServer) -> None:
    outcome = server.judge("harness/refusal at the restart")
    assert outcome.at_resume


def test_table_is_large_enough(server: ForkServer) -> None:
    table = [case for case, _ in server.cases.values() if case.in_table]
    assert len(table) >= 150
    assert all(case.verdict.detail for case in table if case.verdict.kind != "identical"), "a reason for each exception"


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_whole_table(server: ForkServer) -> None:
    """All cases whose packages are installed: each ends as the table says."""
    wrong = []
    for name, (case, _) in server.cases.items():
        if not case.in_table:
            continue
        outcome = server.judge(name)
        if outcome.kind != "skipped" and not outcome.matches(case.verdict):
            wrong.append(f"{name}: {outcome.kind}: {outcome.note}")
    assert not wrong, "\n".join(wrong)
