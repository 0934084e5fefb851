from __future__ import annotations

import pytest
from pydantic import ValidationError

from runner.config.launch import Section


class Own(Section):
    rate: float = 1.0
    """How fast."""


def test_unknown_keys_and_numbers_that_are_none_are_errors_and_docstrings_describe_keys() -> None:
    assert Own.model_json_schema()["properties"]["rate"]["description"] == "How fast."
    for wrong in ({"rats": 1.0}, {"rate": float("nan")}):
        with pytest.raises(ValidationError):
            Own.model_validate(wrong)
