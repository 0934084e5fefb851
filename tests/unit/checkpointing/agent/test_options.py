"""What crosses the process boundary arrives as it was, or is refused."""

from __future__ import annotations

import json

import pytest

from checkpointing.agent.options import AgentOptions
from checkpointing.commit.retention import Retention

OPTIONS = AgentOptions(
    location="s3://bucket/run",
    run_id="run",
    local_tier="/nvme",
    local_retention=Retention(3, keep_every=20, keep_best=4, best_metric="eval_loss", greater_is_better=True),
    commits=False,
    memory_limit=1 << 40,
    patience_s=600.0,
)


@pytest.mark.parametrize("options", [OPTIONS, AgentOptions(location="/run", run_id="run")])
def test_options_survive_the_way(options: AgentOptions) -> None:
    assert AgentOptions.from_json(options.to_json()) == options


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"surplus": 1}, "surplus is unknown"),
        ({"commits": 1}, "commits must be bool, not 1"),
        ({"location": None}, "location must be str, not None"),
        ({"memory_limit": "8GiB"}, r"memory_limit must be int \| None, not '8GiB'"),
        ({"memory_limit": True}, r"memory_limit must be int \| None, not True"),
        ({"local_retention": 2}, "local_retention must be an object, not 2"),
        ({"local_retention": {"keep_first": 2}}, "local_retention.keep_first is unknown"),
        ({"local_retention": {"keep_every": 0}}, "keep_every=0 is not allowed"),
        ({"local_retention": {"keep_best": 0}}, "keep_best=0 is not allowed"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, object], message: str) -> None:
    text = json.dumps({**json.loads(OPTIONS.to_json()), **change})
    with pytest.raises(ValueError, match=f"^agent options cannot be parsed: {message}"):
        AgentOptions.from_json(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"location": "/run"}', "run_id is missing"),
        ("{", "Expecting"),
        ("[]", r"the value must be an object, not \[\]"),
    ],
)
def test_what_is_no_such_object_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^agent options cannot be parsed: {message}"):
        AgentOptions.from_json(text)
