"""How weights are divided into files."""

from __future__ import annotations

import pytest

from checkpointing.format.layout import divided

SIZES = {"a": 4, "b": 4, "c": 1, "large": 20, "d": 8}


@pytest.mark.parametrize(
    ("most", "groups"),
    [
        (100, [["a", "b", "c", "large", "d"]]),
        (9, [["a", "b", "c"], ["large"], ["d"]]),
        (8, [["a", "b"], ["c"], ["large"], ["d"]]),
        (1, [["a"], ["b"], ["c"], ["large"], ["d"]]),
    ],
)
def test_files_have_at_most_that_size_unless_a_tensor_is_larger(most: int, groups: list[list[str]]) -> None:
    found = divided(SIZES, most)
    assert list(found.values()) == groups
    names = [f"model-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    assert list(found) == (names if len(groups) > 1 else ["model.safetensors"])


def test_no_weights_are_a_file_without_any() -> None:
    assert divided({}, 5) == {"model.safetensors": []}
