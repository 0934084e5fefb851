"""The digest by which a data set is recognised."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from checkpointing.data.data_digest import fingerprint


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(17))


def test_the_fingerprint_tells_data_sets_apart() -> None:
    from datasets import Dataset as Rows

    one = Rows.from_dict({"text": [f"row {n}" for n in range(50)]})
    same, other = Rows.from_dict({"text": [f"row {n}" for n in range(50)]}), one.select(range(49))
    assert fingerprint(one) == fingerprint(same)
    assert fingerprint(one) != fingerprint(other)
    # A transform may draw at random: rows are looked at as they are stored.
    assert fingerprint(one.with_transform(lambda rows: {"x": [random.random() for _ in rows["text"]]})) == fingerprint(
        one
    )
    tensors = [{"x": torch.arange(3) + n} for n in range(20)]
    assert fingerprint(tensors) == fingerprint([dict(row) for row in tensors])
    assert fingerprint(tensors) != fingerprint([{"x": row["x"] + 1} for row in tensors])
    assert fingerprint(Stream()) is None
    assert fingerprint([]) is None
