from __future__ import annotations

import pytest

from checkpointing.memory import available_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1024", 1024), ("2GB", 2 * 10**9), ("2 GiB", 2 * 2**30), ("8Gi", 8 * 2**30), ("1.5mib", 3 * 2**19)],
)
def test_sizes_as_people_write_them(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "many", "-1", "3 apples", "1e9"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not allowed"):
        parse_bytes(text)


def test_there_is_memory() -> None:
    assert 10**7 < available_bytes() < 10**15
