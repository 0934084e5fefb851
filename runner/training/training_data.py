"""Training data: loaded or streamed, checked row by row, and split."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc

from runner.config.schema import DATA_LOADERS, DataConfig

BUNDLED = Path(__file__).parent / "data" / "qa_dataset.parquet"
_TEXT_COLUMNS = ("prompt", "completion", "text", "messages", "input_ids")


def load_training_data(config: DataConfig, cache: Path, *, seed: int) -> tuple[Any, Any]:
    """Load the rows to train on (a stream if so configured), and those to evaluate on, if any; a split has the seed.

    Raises:
        ValueError: A file cannot be read, or has no rows, no usable column, or an empty row.
    """
    source = config.path or str(BUNDLED)
    rows = _stream(source, config.split) if config.streaming else _load("data.path", source, config.split, cache)
    if config.max_rows is not None:
        rows = rows.take(config.max_rows) if config.streaming else rows.take(min(config.max_rows, len(rows)))
    if config.validation_path is not None:
        return rows, _load("data.validation_path", config.validation_path, config.validation_split or "train", cache)
    if config.validation_split is not None:
        return rows, _load("data.path", source, config.validation_split, cache)
    if config.validation_share is not None:
        if len(rows) * config.validation_share < 1:
            raise ValueError(
                f"data.validation_share={config.validation_share} of {len(rows)} rows is less than one row; raise it"
            )
        parts = rows.train_test_split(test_size=config.validation_share, seed=seed)
        return parts["train"], parts["test"]
    return rows, None


def _load(key: str, source: str, split: str, cache: Path) -> Any:
    name = f"{key}={source!r}"
    suffix = Path(source).suffix
    folder = str(cache / "datasets")
    if suffix not in DATA_LOADERS:
        rows = datasets.load_dataset(source, split=split, cache_dir=folder)
    else:
        try:
            rows = datasets.load_dataset(**_file_options(source), cache_dir=folder)
        except Exception as error:
            raise _unreadable(name, error, _first_bad_line(source) if suffix == ".jsonl" else "") from error
    columns = set(rows.column_names)
    _check_columns(name, columns)
    if len(rows) == 0:
        raise ValueError(f"{name} has no rows")
    for column in _TEXT_COLUMNS:
        if column in columns:
            try:
                number = _first_empty(rows.data.column(column))
            except TypeError as error:
                raise ValueError(f"{name}: {column} contains {error}; needed: text, or a list of messages") from None
            if number is not None:
                raise _bad_row(name, number, column, rows[number][column])
    return rows


def _stream(source: str, split: str) -> Any:
    """Return rows that are read and checked on demand; ValueError as above, for the first row at once."""
    name = f"data.path={source!r}"
    is_file = Path(source).suffix in DATA_LOADERS
    try:
        options = _file_options(source) if is_file else {"path": source, "split": split}
        rows = datasets.load_dataset(**options, streaming=True)
        first = next(iter(rows), None)
    except Exception as error:
        if not is_file:
            raise
        raise _unreadable(name, error) from error
    if first is None:
        raise ValueError(f"{name} has no rows")
    _check_columns(name, set(first))
    return rows.map(functools.partial(_checked, name), with_indices=True)


def _checked(name: str, row: dict[str, Any], number: int) -> dict[str, Any]:
    for column in _TEXT_COLUMNS:
        if column not in row:
            continue
        value = row[column]
        if value is not None and not isinstance(value, (str, list)):
            raise ValueError(f"{name}: {column} contains {type(value).__name__}; needed: text, or a list of messages")
        full = bool(value.strip() if isinstance(value, str) else value)
        if full and isinstance(value, list) and not isinstance(value[0], int):
            full = all(map(_is_message, value))
        if not full:
            raise _bad_row(name, number, column, value)
    return row


def _file_options(source: str) -> dict[str, Any]:
    """Return the options of `load_dataset` for a file."""
    suffix = Path(source).suffix
    # "None" and "NA" are ordinary text; only an empty cell is missing.
    options: dict[str, Any] = {"keep_default_na": False, "na_values": [""]} if suffix == ".csv" else {}
    return {"path": DATA_LOADERS[suffix], "data_files": source, "split": "train", **options}


def _check_columns(name: str, columns: set[str]) -> None:
    if not ({"prompt", "completion"} <= columns or columns & {"text", "messages", "input_ids"}):
        raise ValueError(
            f"{name} has the columns {', '.join(sorted(columns))}; needed: prompt and completion, or text, or messages"
        )


def _unreadable(name: str, error: Exception, where: str = "") -> ValueError:
    # The exception of `datasets` is generic; its cause is specific.
    cause = error.__cause__ or error
    text = " ".join(str(cause).split())
    return ValueError(f"{name} cannot be read{where}: {type(cause).__name__}: {text[:300]}")


def _bad_row(name: str, number: int, column: str, value: Any) -> ValueError:
    return ValueError(f"{name}, row {number + 1}: {column} is {value!r}; fill it, or remove the row")


def _first_empty(column: pa.ChunkedArray) -> int | None:
    """Return the index of the first row without anything to train on; TypeError for what is neither text nor lists."""
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        lengths = pc.utf8_length(pc.utf8_trim_whitespace(column))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = pc.list_value_length(column)
    else:
        raise TypeError(str(kind))
    number = pc.index(pc.or_kleene(pc.is_null(lengths), pc.equal(lengths, 0)), True).as_py()
    if number == -1 and hasattr(kind, "value_type") and not pa.types.is_integer(kind.value_type):
        rows = (index for index, messages in enumerate(column) if not all(map(_is_message, messages.as_py())))
        number = next(rows, -1)
    return number if number != -1 else None


def _is_message(message: Any) -> bool:
    """Return whether a value is a chat message with content or a tool call."""
    if isinstance(message, str):
        # `datasets` stores messages as JSON if their fields differ between rows.
        try:
            message = json.loads(message)
        except ValueError:
            return False
    if not isinstance(message, dict) or not message.get("role"):
        return False
    return message.get("content") is not None or bool(message.get("tool_calls"))


def _first_bad_line(source: str) -> str:
    """Return `, line N` for the first line of a local file that is not a JSON object, else an empty text."""
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
