"""The training data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets

BUNDLED = Path(__file__).parent / "data" / "qa_dataset.parquet"
_LOADERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}


def load_training_data(path: str | None, split: str, cache: Path) -> Any:
    """The rows to train on: prompt/completion, text or messages columns, as `SFTTrainer` reads them.

    Args:
        path: a file, or the name of a hub data set; None for the bundled pairs.

    Raises:
        ValueError: it has no rows, or no column that can be trained on.
    """
    source = path or str(BUNDLED)
    loader = _LOADERS.get(Path(source).suffix)
    cache_dir = str(cache / "datasets")
    if loader is not None:
        dataset = datasets.load_dataset(loader, data_files=source, split="train", cache_dir=cache_dir)
    else:
        dataset = datasets.load_dataset(source, split=split, cache_dir=cache_dir)
    columns = set(dataset.column_names)
    if not ({"prompt", "completion"} <= columns or columns & {"text", "messages", "input_ids"}):
        raise ValueError(
            f"data.path={source!r} has the columns {', '.join(sorted(columns))}; needed: prompt and completion, or "
            "text, or messages"
        )
    if len(dataset) == 0:
        raise ValueError(f"data.path={source!r} has no rows")
    return dataset
