"""What may be torn does not survive a start; what was made durable does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runner.system.cache import discard_unsealed, seal


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != "sealed.json"}


def test_what_is_sealed_stays_and_the_rest_goes(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "tokenizer-1").mkdir(parents=True)
    (cache / "tokenizer-1" / "tokenizer.json").write_text("whole")
    seal(cache)
    (cache / "datasets" / "rows").mkdir(parents=True)
    (cache / "datasets" / "rows" / "data.arrow").write_text("")
    discard_unsealed(cache)
    assert files(cache) == {"tokenizer-1", "tokenizer-1/tokenizer.json"}
    # Cut short since.
    (cache / "tokenizer-1" / "tokenizer.json").write_text("")
    discard_unsealed(cache)
    assert files(cache) == set()


def test_nodes_that_share_a_cache_can_seal_it_at_the_same_time(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(seal, [tmp_path] * 64))
    # Of a writer that died.
    (tmp_path / ".sealed.json.1.tmp").write_text("{")
    discard_unsealed(tmp_path)
    assert files(tmp_path) == {"data"}


def test_without_a_list_or_with_a_damaged_one_nothing_stays(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    discard_unsealed(cache)
    for text in (None, "", "[1]", '{"data": null}', "[" * 100_000):
        cache.mkdir(exist_ok=True)
        (cache / "data").write_text("x")
        if text is not None:
            (cache / "sealed.json").write_text(text)
        discard_unsealed(cache)
        assert not (cache / "data").exists(), text
