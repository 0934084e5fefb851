"""What the job of a campaign over nodes is."""

from __future__ import annotations

from runner.chaos.node_campaign import without_dropout
from runner.config.schema import Config


def test_a_job_has_no_dropout_and_stays_the_same_otherwise() -> None:
    job = Config.model_validate({"model": {"config": {"attention_dropout": 0.1, "hidden_size": 128}}})
    changed = without_dropout(job)
    assert changed.model.config == {"attention_dropout": 0.0, "hidden_size": 128} and changed.method.dropout == 0.0
    assert job.model.config["attention_dropout"] == 0.1
