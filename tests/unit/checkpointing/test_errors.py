"""Errors cross processes as they are: ranks collect each other's."""

from __future__ import annotations

import pickle

import pytest

from checkpointing.errors import (
    CheckpointError,
    DamagedMemory,
    Fenced,
    InvalidCheckpoint,
    LossSpike,
    NonFinite,
    StorageUnreachable,
)


@pytest.mark.parametrize(
    "error",
    [
        InvalidCheckpoint("here", "torn"),
        Fenced(3, "here", 2),
        NonFinite(7, ["weight"]),
        LossSpike(7, "it is high"),
        StorageUnreachable("no answer"),
        DamagedMemory("changed"),
    ],
)
def test_an_error_is_the_same_in_another_process(error: CheckpointError) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error) and str(arrived) == str(error) and vars(arrived) == vars(error)
