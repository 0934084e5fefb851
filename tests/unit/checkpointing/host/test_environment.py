"""The settings that a supervisor passes to its ranks, and what users may set themselves."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from checkpointing.host.environment import SETTINGS_ENV, RankSettings, rank_settings

SETTINGS = RankSettings(
    agent_socket="/run/agent.sock",
    attempt=3,
    location="/checkpoints",
    resume="auto",
    num_failures=2,
    observed_s=90.5,
    micro_batch_divisor=2,
    skipped_steps=((41, 45), (60, 60)),
)
VALUES = json.loads(SETTINGS.to_json())


def test_json_is_read_back_equal() -> None:
    assert RankSettings.from_json(SETTINGS.to_json()) == SETTINGS
    assert RankSettings.from_json(RankSettings().to_json()) == RankSettings()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("[]", "not a JSON object"),
        ("[" * 100_000, "recursion"),
        (json.dumps({"attempt": 1}), "missing or unknown fields: agent_socket, .*skipped_steps"),
        (json.dumps({**VALUES, "later": 1}), "missing or unknown fields: later"),
        (json.dumps({**VALUES, "attempt": "3"}), "attempt is not a number"),
        (json.dumps({**VALUES, "attempt": True}), "attempt is not a number"),
        (json.dumps({**VALUES, "lost_steps": -1}), "lost_steps is not a number"),
        (json.dumps({**VALUES, "observed_s": float("nan")}), "observed_s is not a number of seconds"),
        (json.dumps({**VALUES, "location": None}), "location is not a string"),
        (json.dumps({**VALUES, "allow_changes": 1}), "allow_changes is not true or false"),
        (json.dumps({**VALUES, "skipped_steps": [[1, 2, 3]]}), "skipped_steps is not a list of pairs"),
        (json.dumps({**VALUES, "skipped_steps": "41-45"}), "skipped_steps is not a list of pairs"),
        (json.dumps({**VALUES, "cadence": {"snapshot_steps": "often"}}), "cadence.snapshot_steps is not a number"),
        (json.dumps({**VALUES, "cadence": {"steps": 1}}), "cadence is not an object with keys of"),
    ],
)
def test_anything_else_is_refused_by_one_error(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=rf"^{SETTINGS_ENV} cannot be read: .*{why}.*unset it"):
        RankSettings.from_json(text)


def test_each_field_is_checked() -> None:
    for name in asdict(SETTINGS):
        wrong: dict[str, Any] = {**VALUES, name: {"odd": {}}}
        with pytest.raises(ValueError, match=f"{name} is not"):
            RankSettings.from_json(json.dumps(wrong))


def test_users_may_set_variables_of_their_own() -> None:
    environment = {
        "CHECKPOINT_LOCATION": "/kept",
        "CHECKPOINT_LOCAL_TIER": "/nvme",
        "CHECKPOINT_RESUME": "120",
        "CHECKPOINT_RESUME_FROM": "/stock/checkpoint-3",
        "CHECKPOINT_ALLOW_CHANGES": "1",
    }
    expected = RankSettings(
        location="/kept", local_tier="/nvme", resume="120", resume_from="/stock/checkpoint-3", allow_changes=True
    )
    assert rank_settings(environment) == expected
    assert rank_settings({}) == RankSettings()


def test_a_supervisor_takes_precedence_where_it_says_something() -> None:
    environment = {
        SETTINGS_ENV: SETTINGS.to_json(),
        "CHECKPOINT_LOCATION": "/kept",
        "CHECKPOINT_LOCAL_TIER": "/nvme",
        "CHECKPOINT_RESUME": "never",
        "CHECKPOINT_RESUME_FROM": "/stock",
    }
    found = rank_settings(environment)
    assert (found.location, found.local_tier, found.resume) == ("/checkpoints", "", "auto")
    assert (found.resume_from, found.attempt, found.skipped_steps) == ("/stock", 3, ((41, 45), (60, 60)))
