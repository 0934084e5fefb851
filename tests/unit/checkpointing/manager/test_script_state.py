"""Generators of a script are saved and restored by their paths; what else it changes is named at saves."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from helpers.small_checkpoint import network, point

from checkpointing.errors import CheckpointError
from checkpointing.format.layout import script_state_name
from checkpointing.manager.script_state import ScriptState
from checkpointing.manager.tracked import Tracked
from checkpointing.process.ranks import Ranks


class Augment:
    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self.calls = 0

    def draw(self) -> float:
        self.calls += 1
        return float(self.generator.random())


def script(seed: int, name: str = "augment") -> tuple[ScriptState, Augment]:
    """What a script has made, before its first step."""
    model, optimizer = network()
    ranks = Ranks()
    tracked, augment = Tracked(ranks), Augment(seed)
    tracked.track(model, optimizer, None, None, {}, None, pipeline=False)
    made = ScriptState(ranks, tracked, list)
    made.roots = lambda: {name: augment}
    made.begin()
    return made, augment


def saved(state: ScriptState) -> bytes:
    [(name, make)] = state.files().items()
    assert name == script_state_name(0)
    return make() if callable(make) else make


def test_a_generator_continues_where_the_checkpoint_has_it() -> None:
    """A variable of this function has the name of what the training holds, and hides nothing: `other` is restored."""
    state, augment = script(1)
    augment.draw()
    data = saved(state)
    expected = [augment.draw() for _ in range(3)]
    later, other = script(2)
    later.restore(point(script_state_name(0), data))
    assert [other.draw() for _ in range(3)] == expected


def test_generators_that_are_made_later_are_found_at_a_later_save() -> None:
    state, augment = script(1)
    saved(state)
    made: Any = augment
    made.second = torch.Generator().manual_seed(3)
    data, expected = saved(state), torch.rand(2, generator=made.second)
    later, other = script(2)
    again: Any = other
    again.second = torch.Generator().manual_seed(4)
    later.restore(point(script_state_name(0), data))
    assert torch.equal(torch.rand(2, generator=again.second), expected)


def test_where_no_generator_is_there_is_no_file() -> None:
    state, augment = script(1)
    del augment.generator
    assert state.files() == {}


def test_a_generator_that_is_not_there_at_a_resume_is_named(caplog: pytest.LogCaptureFixture) -> None:
    state, _ = script(1)
    data = saved(state)
    later, other = script(2, "renamed")
    before = other.generator.bit_generator.state
    with caplog.at_level(logging.WARNING, "checkpointing"):
        later.restore(point(script_state_name(0), data))
    assert "augment.generator" in caplog.text and "make them before training resumes" in caplog.text
    assert other.generator.bit_generator.state == before


def test_a_checkpoint_without_the_file_changes_nothing() -> None:
    state, augment = script(1)
    expected = augment.generator.bit_generator.state
    state.restore(point("other", b""))
    assert augment.generator.bit_generator.state == expected


@pytest.mark.parametrize("content", [{"generators": [1]}, {"generators": {1: 2}}, {}])
def test_a_file_of_another_shape_is_refused(content: object, tmp_path: Any) -> None:
    torch.save(content, tmp_path / "file")
    state, _ = script(1)
    with pytest.raises(CheckpointError):
        state.restore(point(script_state_name(0), (tmp_path / "file").read_bytes()))


def test_what_training_changes_and_nothing_saves_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    state, augment = script(1)
    with caplog.at_level(logging.WARNING, "checkpointing"):
        for step in (1, 2, 3, 4):
            augment.draw()
            state.look(step)
    assert caplog.text.count("augment.calls") == 1 and "augment.generator" not in caplog.text
    assert "augment.calls" in state.changed(5)


def test_what_is_saved_elsewhere_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    state, augment = script(1)
    state.saved = lambda: [augment]
    state.begin()
    with caplog.at_level(logging.WARNING, "checkpointing"):
        for step in (1, 2):
            augment.draw()
            state.look(step)
    assert not caplog.text
