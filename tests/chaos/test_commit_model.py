"""Every order of steps of two writers, a pruner and a reader that resumes, with crashes at each: what must hold, holds.

Bounds that take seconds; the tier `soak` explores wider ones, for minutes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from chaos import disk_model, object_model
from chaos.commit_model import CommitModel, explore
from chaos.disk_model import DiskModel
from chaos.object_model import ObjectModel

# What is explored, by what is new in it, and how many states there are at least: a model that does nothing passes, too.
DISK: dict[str, tuple[dict[str, Any], int]] = {
    "two writers": ({"saves": (1, 1), "crashes": 0, "power_cuts": False}, 10_000),
    "a writer that goes on": ({"saves": (2, 0), "crashes": 0, "power_cuts": False}, 10_000),
    "a writer that is killed, the next one sweeps": (
        {"saves": (1, 0), "crashes": 1, "power_cuts": False, "first_mortal": 1},
        10_000,
    ),
    "a power cut": ({"saves": (1, 1), "crashes": 1}, 10_000),
    "a power cut, and a third life": ({"saves": (1, 0, 0), "crashes": 1, "any_order": True}, 10_000),
    "two power cuts": ({"saves": (1, 0), "crashes": 2}, 1_000),
    "two files, a power cut": ({"saves": (1, 0), "crashes": 1, "files": ("model", "state")}, 1_000),
    "a sweeper that was given up": ({"saves": (0, 1), "crashes": 0, "first": "sweep", "power_cuts": False}, 1_000),
    "memory that changes": ({"saves": (2, 0), "crashes": 0, "power_cuts": False, "flips": 1}, 1_000),
    "memory that changes, two writers": ({"saves": (1, 1), "crashes": 0, "power_cuts": False, "flips": 1}, 10_000),
    "a write that lied": ({"saves": (2, 0), "crashes": 0, "power_cuts": False, "lies": 1}, 1_000),
    "a write that lied, a power cut": ({"saves": (1, 0), "crashes": 1, "lies": 1}, 1_000),
}
OBJECTS: dict[str, tuple[dict[str, Any], int]] = {
    "two writers": ({"saves": (1, 1), "crashes": 0}, 1_000),
    "a writer that goes on": ({"saves": (2, 0), "crashes": 0}, 1_000),
    "a writer that is killed, the next one sweeps": ({"saves": (1, 0), "crashes": 1, "first_mortal": 1}, 1_000),
    "a third life": ({"saves": (1, 0, 0), "crashes": 1}, 1_000),
    "answers that are lost, calls that arrive late": ({"saves": (1, 1), "crashes": 0, "answers_to_lose": 1}, 1_000),
    "a sweeper that was given up": ({"saves": (0, 1), "crashes": 0, "first": "sweep"}, 1_000),
    "two that begin": ({"saves": (1, 0), "crashes": 0, "first": "begin"}, 1_000),
    "memory that changes": ({"saves": (1, 1), "crashes": 0, "flips": 1}, 1_000),
    "a server that does not decide, one writer after the other": (
        {"saves": (1, 0), "crashes": 1, "first_mortal": 1, "honours": False},
        1_000,
    ),
}
LARGE_DISK: dict[str, dict[str, Any]] = {
    "two writers, two saves": {"saves": (2, 1), "crashes": 0, "power_cuts": False},
    "three lives": {"saves": (1, 1, 0), "crashes": 1, "power_cuts": False},
    "three lives, a power cut": {"saves": (1, 1, 0), "crashes": 1},
    "three lives, two power cuts": {"saves": (1, 0, 0), "crashes": 2, "any_order": True},
    "two saves, a power cut": {"saves": (2, 1, 0), "crashes": 1},
    "two power cuts, two saves": {"saves": (1, 1, 0), "crashes": 2},
}
LARGE_OBJECTS: dict[str, dict[str, Any]] = {
    "two writers, two saves": {"saves": (2, 1), "crashes": 0},
    "three lives": {"saves": (1, 1, 0), "crashes": 1},
    "two answers": {"saves": (1, 1), "crashes": 0, "answers_to_lose": 2},
}


def assert_holds(model: CommitModel, at_least: int) -> None:
    outcome = explore(model)
    print(outcome)
    assert outcome.fault is None, str(outcome)
    assert outcome.num_states >= at_least, str(outcome)


@pytest.mark.parametrize("case", DISK)
def test_on_a_disk(case: str) -> None:
    bounds, at_least = DISK[case]
    assert_holds(DiskModel(**bounds), at_least)


@pytest.mark.parametrize("case", OBJECTS)
def test_in_object_storage(case: str) -> None:
    bounds, at_least = OBJECTS[case]
    assert_holds(ObjectModel(**bounds), at_least)


@pytest.mark.soak
@pytest.mark.parametrize("case", LARGE_DISK)
def test_on_a_disk_within_wider_bounds(case: str) -> None:
    assert_holds(DiskModel(**LARGE_DISK[case]), 10_000)


@pytest.mark.soak
@pytest.mark.parametrize("case", LARGE_OBJECTS)
def test_in_object_storage_within_wider_bounds(case: str) -> None:
    assert_holds(ObjectModel(**LARGE_OBJECTS[case]), 10_000)


# -- what may still happen: each must be found, and be what ARCHITECTURE.md says ---------------------------------------

WINDOWS: dict[str, tuple[CommitModel, str]] = {
    # The user is warned once. The old writer looks, the new one commits, the old one's PUT overwrites the manifest.
    "a server that does not decide between two writers": (
        ObjectModel(saves=(1, 1), crashes=0, honours=False),
        "a reader found step 2, and now 1",
    ),
    "a server that does not decide, and a PUT that arrives late": (
        ObjectModel(saves=(1, 1), crashes=0, honours=False, answers_to_lose=1),
        "a reader found step 2, and now 1",
    ),
    # Names of checkpoints carry no attempt, so what is done by name meets whatever has the name by then.
    "a writer that stalls in a quarantine while a newer one quarantines and commits the same step, on a disk": (
        DiskModel(saves=(0, 1), crashes=0, power_cuts=False, first="resume", damaged_step=2),
        "step 2 was acknowledged, but a reader finds 1",
    ),
    "a writer that stalls in a quarantine while a newer one quarantines and commits the same step, in object storage": (
        ObjectModel(saves=(0, 1), crashes=0, first="resume", damaged_step=2),
        "step 2 was acknowledged, but a reader finds 1",
    ),
    "a writer that stalls in its prune while the user goes back to what it is about to remove, on a disk": (
        DiskModel(saves=(0, 0), crashes=0, power_cuts=False, first="prune", roll_back_to=1),
        "step 1 was acknowledged, but a reader finds none",
    ),
    "a writer that stalls in its prune while the user goes back to what it is about to remove, in object storage": (
        ObjectModel(saves=(0, 0), crashes=0, first="prune", roll_back_to=1),
        "step 1 was acknowledged, but a reader finds none",
    ),
    "an attempt that stalls as it writes its fence while a newer one begins, on a disk": (
        DiskModel(saves=(1, 0), crashes=0, power_cuts=False, first="begin"),
        "step 2 was acknowledged, but a reader finds 1",
    ),
}


@pytest.mark.parametrize("window", WINDOWS)
def test_what_is_known_to_remain_is_found(window: str) -> None:
    model, fault = WINDOWS[window]
    outcome = explore(model)
    print(outcome)
    assert outcome.fault is not None and fault in outcome.fault, str(outcome)


# -- the test of the test: every part of the protocol is there for a reason --------------------------------------------

ONE_LIFE: dict[str, Any] = {"saves": (1, 0), "crashes": 1}
TWO_LIVES: dict[str, Any] = {"saves": (1, 1), "crashes": 0, "power_cuts": False}
DISK_MUTATIONS: dict[str, tuple[dict[str, bool], dict[str, Any], str]] = {
    "no fsync of files": ({"fsyncs_files": False}, ONE_LIFE, "was acknowledged"),
    "no fsync of the manifest": ({"fsyncs_manifest": False}, ONE_LIFE, "was acknowledged"),
    "no fsync of the directory": ({"fsyncs_folder": False}, ONE_LIFE, "was acknowledged"),
    "no fsync of the parent": ({"fsyncs_parent": False}, ONE_LIFE, "was acknowledged"),
    "rename before the files' fsync": (
        {"fsyncs_before_rename": False},
        {"saves": (1, 0, 0), "crashes": 1},
        "was acknowledged",
    ),
    "written in place, the manifest before the files": (
        {"writes_beside": False, "manifest_last": False},
        TWO_LIVES,
        "was acknowledged",
    ),
    "a temporary directory without an attempt's number": (
        {"own_folder": False},
        TWO_LIVES,
        "a reader found step 2, and now 1",
    ),
    "bytes not compared with digests": (
        {"digests_compared": False},
        {"saves": (0, 0), "crashes": 0, "damaged_step": 2},
        "is torn or mixed",
    ),
    "files listed before the checkpoints are": (
        {"steps_with_their_sizes": False},
        {"saves": (0, 1), "crashes": 0, "first": "sweep", "power_cuts": False},
        "was acknowledged",
    ),
    "no look at the fence after publishing": ({"looks_after": False}, TWO_LIVES, "was acknowledged"),
    "a fence that lets older attempts count": (
        {"fence_excludes": False},
        TWO_LIVES,
        "a reader found step 2, and now 1",
    ),
    "a fence that is written after a look at what counts": (
        {"fence_opened_first": False},
        TWO_LIVES,
        "was acknowledged",
    ),
    "no fsync of the fence": ({"fsyncs_fence": False}, ONE_LIFE, "the fence is torn"),
    "no sweep": ({"sweeps": False}, ONE_LIFE, "is left"),
    "a sweep that takes a newer attempt's files": (
        {"sweeps_only_older": False},
        {"saves": (0, 1), "crashes": 0, "first": "sweep", "power_cuts": False},
        "is about to take what 2 writes",
    ),
    "a sweep without fsync": ({"sweep_fsyncs": False}, {"saves": (1, 0, 0), "crashes": 1}, "is left"),
    "prune before the new one is durable": ({"prunes_after_commit": False}, ONE_LIFE, "was acknowledged"),
    "prune without a rename, files before the manifest": (
        {"prune_renames": False, "prune_manifest_first": False},
        ONE_LIFE,
        "is left",
    ),
    "prune without fsync": ({"prune_fsyncs": False}, ONE_LIFE, "is left"),
    "prune of the newest": ({"keeps_newest": False}, ONE_LIFE, "was acknowledged"),
    "memory not compared": (
        {"compares_memory": False},
        {"saves": (1, 0), "crashes": 0, "power_cuts": False, "flips": 1},
        "step 2 was acknowledged, but a reader finds 1",
    ),
    "pruned for what was not read back": (
        {"reads_back": False},
        {"saves": (1, 0), "crashes": 0, "power_cuts": False, "lies": 1},
        "step 1 was acknowledged, but a reader finds none",
    ),
}
BOTH: dict[str, Any] = {"saves": (1, 1), "crashes": 0}
KILLED: dict[str, Any] = {"saves": (1, 0), "crashes": 1, "first_mortal": 1}
LOST: dict[str, Any] = {"saves": (1, 0), "crashes": 0, "answers_to_lose": 1}
OBJECT_MUTATIONS: dict[str, tuple[dict[str, bool], dict[str, Any], str]] = {
    "the manifest before the files": ({"manifest_last": False}, BOTH, "was acknowledged"),
    "a put without If-None-Match": ({"puts_if_absent": False}, BOTH, "a reader found step 2, and now 1"),
    "a folder without an attempt's number": ({"own_folder": False}, BOTH, "a reader found step 2, and now 1"),
    "no look at the fence after publishing": ({"looks_after": False}, BOTH, "was acknowledged"),
    "a fence that lets older attempts count": ({"fence_excludes": False}, BOTH, "a reader found step 2, and now 1"),
    "a fence that is written after a look at what counts": ({"fence_opened_first": False}, BOTH, "was acknowledged"),
    "no look at the fence before a quarantine": (
        {"looks_before_quarantine": False},
        {**BOTH, "answers_to_lose": 1},
        "was acknowledged",
    ),
    "no second look at who has put the manifest": ({"reads_back": False}, LOST, "a reader found step 2, and now 1"),
    "files of a manifest that may arrive are deleted": (
        {"keeps_what_may_be_named": False},
        LOST,
        "a reader found step 2, and now 1",
    ),
    "files of a manifest that may be counted are deleted": (
        {"keeps_what_may_be_counted": False},
        BOTH,
        "a reader found step 2, and now 1",
    ),
    "no sweep": ({"sweeps": False}, KILLED, "is left"),
    "a sweep that takes a newer attempt's files": (
        {"sweeps_only_older": False},
        {"saves": (0, 1), "crashes": 0, "first": "sweep"},
        "is about to take what 2 writes",
    ),
    "a sweep that takes what manifests name": ({"sweep_spares_named": False}, BOTH, "was acknowledged"),
    "prune before the new one is durable": ({"prunes_after_commit": False}, BOTH, "was acknowledged"),
    "prune of files before the manifest": ({"prune_manifest_first": False}, KILLED, "is left"),
    "prune of the newest": ({"keeps_newest": False}, BOTH, "was acknowledged"),
    "memory not compared": ({"compares_memory": False}, {**BOTH, "flips": 1}, "was acknowledged"),
}


@pytest.mark.parametrize("mutation", DISK_MUTATIONS)
def test_on_a_disk_nothing_can_be_left_out(mutation: str) -> None:
    changed, bounds, fault = DISK_MUTATIONS[mutation]
    outcome = explore(DiskModel(replace(disk_model.CODED, **changed), **bounds))
    print(outcome)
    assert outcome.fault is not None and fault in outcome.fault, str(outcome)


@pytest.mark.parametrize("mutation", OBJECT_MUTATIONS)
def test_in_object_storage_nothing_can_be_left_out(mutation: str) -> None:
    changed, bounds, fault = OBJECT_MUTATIONS[mutation]
    outcome = explore(ObjectModel(replace(object_model.CODED, **changed), **bounds))
    print(outcome)
    assert outcome.fault is not None and fault in outcome.fault, str(outcome)


def test_every_rule_is_mutated() -> None:
    for rules, mutations in ((disk_model.CODED, DISK_MUTATIONS), (object_model.CODED, OBJECT_MUTATIONS)):
        mutated = {name for changed, *_ in mutations.values() for name in changed}
        # The look before publishing spares work; the one before a quarantine makes a window narrower (see WINDOWS).
        assert mutated | {"looks_before", "looks_before_quarantine"} == {*rules.__dataclass_fields__}


@pytest.mark.parametrize(
    "model",
    [
        DiskModel(replace(disk_model.CODED, looks_before=False), **TWO_LIVES),
        ObjectModel(replace(object_model.CODED, looks_before=False), **BOTH),
    ],
)
def test_the_look_before_publishing_only_spares_work(model: CommitModel) -> None:
    assert_holds(model, 1_000)
