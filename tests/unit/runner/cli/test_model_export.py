"""Which options of `runner checkpoints export` convert, and what is said where the means are missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.cli import model_export
from runner.cli.model_export import converter, in_a_process
from runner.errors import UsageError

NONE: dict[str, Any] = {
    **dict.fromkeys(("model_only", "merge", "gguf"), False),
    **dict.fromkeys(("base_model", "dtype", "max_shard_size", "gguf_converter")),
}
# Converts nothing: writes down how it was called.
CONVERTER = "import sys, pathlib; pathlib.Path(sys.argv[3]).write_text(' '.join(sys.argv[1:]))"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(model_export, "in_a_process", lambda *call: calls.append(call))
    return calls


def test_without_options_nothing_is_converted() -> None:
    assert converter(**NONE) is None


@pytest.mark.parametrize(
    ("options", "module", "given"),
    [
        ({"model_only": True}, "checkpointing.files.model_conversion", ()),
        (
            {"dtype": "bf16", "max_shard_size": "2GB"},
            "checkpointing.files.model_conversion",
            ("--dtype=bf16", "--max-shard-bytes=2000000000"),
        ),
        ({"merge": True, "base_model": "base"}, "runner.training.merged_model", ("--base-model=base",)),
    ],
)
def test_options_choose_a_process(
    options: dict[str, Any], module: str, given: tuple[str, ...], ran: list[tuple[str, ...]]
) -> None:
    convert = converter(**NONE | options)
    assert convert is not None
    convert(Path("in"), Path("out"))
    assert ran == [(module, "in", "out", *given)]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"base_model": "base"}, "--base-model is for --merge; add it"),
        ({"max_shard_size": "much"}, "--max-shard-size: memory size 'much' is not allowed"),
        ({"gguf_converter": "/gone.py"}, "which is not in /gone.py; clone https://github.com/ggml-org/llama.cpp"),
        ({"gguf": True}, "--gguf needs llama.cpp's convert_hf_to_gguf.py, which is not in PATH; clone https"),
    ],
)
def test_what_cannot_be_done_is_said(options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UsageError, match=reason):
        converter(**NONE | options)


def test_the_converter_is_found_in_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: list[tuple[str, ...]]
) -> None:
    script = tmp_path / "convert_hf_to_gguf.py"
    script.write_text(CONVERTER)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    convert = converter(**NONE | {"gguf": True, "dtype": "fp16"})
    assert convert is not None
    convert(Path("in"), tmp_path)
    assert [module for module, *_ in ran] == ["checkpointing.files.model_conversion"]
    assert (tmp_path / "model.gguf").read_text() == f"{tmp_path} --outfile {tmp_path}/model.gguf --outtype f16"


@pytest.mark.parametrize("script", ["raise SystemExit('no such architecture')", "pass"])
def test_a_converter_that_fails_is_named(script: str, tmp_path: Path, ran: list[tuple[str, ...]]) -> None:
    path = tmp_path / "mine.py"
    path.write_text(script)
    convert = converter(**NONE | {"gguf_converter": str(path)})
    assert convert is not None
    with pytest.raises(UsageError, match=r"mine\.py failed with \d; leave --gguf out"):
        convert(Path("in"), tmp_path)


def test_the_end_of_a_process_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    module = tmp_path / "ends.py"
    for text, equal in (("print('a\\x1b[2J')", True), ("print('b'); raise SystemExit(3)", False)):
        module.write_text(text)
        assert in_a_process("ends") == equal
    assert capsys.readouterr().out == "a\\x1b[2J\nb\n"
    module.write_text("import sys; print('warning', file=sys.stderr); print('why', file=sys.stderr); sys.exit(2)")
    with pytest.raises(UsageError, match=r"^why$"):
        in_a_process("ends")
    # More than a pipe holds.
    module.write_text("import sys; sys.stderr.write('x' * 300_000); print('c')")
    assert in_a_process("ends")
    module.write_text("1 / 0")
    with pytest.raises(RuntimeError, match=r"ends ended with 1:[\s\S]*ZeroDivisionError"):
        in_a_process("ends")
