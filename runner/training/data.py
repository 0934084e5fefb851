"""The training data: read, checked row by row, and split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc

from runner.config import DATA_SUFFIXES, DataConfig

BUNDLED = Path(__file__).parent / "data" / "qa_dataset.parquet"
_LOADERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}
_TEXT_COLUMNS = ("prompt", "completion", "text", "messages", "input_ids")


def load_training_data(config: DataConfig, cache: Path, *, seed: int) -> tuple[Any, Any]:
    """The rows to train on, and those to evaluate with (None: none).

    Raises:
        ValueError: a file cannot be read, has no rows, no column that can be trained on, or a row that is none.
    """
    rows = _load("data.path", config.path or str(BUNDLED), config.split, cache)
    if config.validation_path is not None:
        return rows, _load("data.validation_path", config.validation_path, config.validation_split or "train", cache)
    if config.validation_split is not None:
        return rows, _load("data.path", config.path or str(BUNDLED), config.validation_split, cache)
    if config.validation_share is not None:
        if len(rows) * config.validation_share < 1:
            raise ValueError(f"data.validation_share={config.validation_share} of {len(rows)} rows is not one row")
        parts = rows.train_test_split(test_size=config.validation_share, seed=seed)
        return parts["train"], parts["test"]
    return rows, None


def _load(key: str, source: str, split: str, cache: Path) -> Any:
    name = f"{key}={source!r}"
    suffix = Path(source).suffix
    folder = str(cache / "datasets")
    if suffix not in DATA_SUFFIXES:
        rows = datasets.load_dataset(source, split=split, cache_dir=folder)
    else:
        try:
            rows = datasets.load_dataset(_LOADERS[suffix], data_files=source, split="train", cache_dir=folder)
        except Exception as error:
            # `datasets` says that something went wrong; its cause says what.
            cause = error.__cause__ or error
            where = _first_bad_line(source) if suffix == ".jsonl" else ""
            text = " ".join(str(cause).split())
            raise ValueError(f"{name} cannot be read{where}: {type(cause).__name__}: {text[:300]}") from None
    columns = set(rows.column_names)
    if not ({"prompt", "completion"} <= columns or columns & {"text", "messages", "input_ids"}):
        raise ValueError(
            f"{name} has the columns {', '.join(sorted(columns))}; needed: prompt and completion, or text, or messages"
        )
    if len(rows) == 0:
        raise ValueError(f"{name} has no rows")
    for column in _TEXT_COLUMNS:
        if column in columns:
            number = _first_empty(rows.data.column(column))
            if number is not None:
                raise ValueError(
                    f"{name}, row {number + 1}: {column} is {rows[number][column]!r}; fill it, or leave that row out"
                )
    return rows


def _first_empty(column: pa.ChunkedArray) -> int | None:
    """Number of the first row that holds nothing to train on, from 0."""
    lengths = _lengths(column)
    bad = pc.is_null(column) if lengths is None else pc.or_kleene(pc.is_null(lengths), pc.equal(lengths, 0))
    number = pc.index(bad, True).as_py()
    messages = column.type
    if number == -1 and pa.types.is_list(messages) and pa.types.is_struct(messages.value_type):
        for name in ("role", "content"):
            if messages.value_type.get_field_index(name) == -1:
                return 0
            # Of the first message without a role or a content, the row that it is in.
            parents, values = pc.list_parent_indices(column), pc.struct_field(pc.list_flatten(column), name)
            found = pc.index(pc.is_null(values), True).as_py()
            if found != -1:
                return int(parents[found].as_py())
    return number if number != -1 else None


def _lengths(column: pa.ChunkedArray) -> pa.ChunkedArray | None:
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pc.utf8_length(pc.utf8_trim_whitespace(column))
    return pc.list_value_length(column) if pa.types.is_list(kind) or pa.types.is_large_list(kind) else None


def _first_bad_line(source: str) -> str:
    """`, line N`, where a line of a local file is no JSON object."""
    try:
        with Path(source).open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    good = not line.strip() or isinstance(json.loads(line), dict)
                except ValueError:
                    good = False
                if not good:
                    return f", line {number}"
    except OSError:
        pass
    return ""
