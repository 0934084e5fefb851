"""Which output is printed, and how, of ranks of one attempt or of several."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.journals import event

from runner.cli.logs import _PIECE_BYTES, logs
from runner.errors import UsageError
from runner.journal.journal import Journal


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has ended: two attempts of the ranks 2 and 3, which are the first two of their node."""
    journal = Journal(tmp_path / "journal.jsonl", lambda: 1.0)
    journal.append(event("run_started", run_id="run", committed_step=-1), 0)
    for attempt in (1, 2):
        journal.append(event("attempt_started"), attempt)
        for rank in (2, 3):
            journal.append(event("rank_started", rank=rank, pid=rank), attempt)
            folder = tmp_path / "logs" / f"attempt-{attempt}" / f"rank{rank}"
            folder.mkdir(parents=True)
            (folder / "stdout.log").write_text(f"out {rank} of {attempt}\n")
            (folder / "stderr.log").write_text(f"err {rank} of {attempt}\n" + "unfinished" * (attempt == 1))
    journal.append(event("run_ended", state="finished", exit_code=0), 2)
    journal.close()
    return tmp_path


def printed(*arguments: str) -> list[str]:
    result = CliRunner().invoke(logs, arguments)
    if result.exception is not None:
        raise result.exception
    return result.output.splitlines()


def test_the_newest_attempt_is_printed_with_global_ranks(run: Path) -> None:
    assert printed(str(run)) == [
        "[rank 2] err 2 of 2",
        "[rank 2] out 2 of 2",
        "[rank 3] err 3 of 2",
        "[rank 3] out 3 of 2",
    ]


def test_of_one_rank_lines_are_as_they_were_written(run: Path) -> None:
    assert printed(str(run), "--rank", "3", "--attempt", "1") == ["err 3 of 1", "unfinished", "out 3 of 1"]
    assert printed(str(run), "--rank", "3", "--rank", "2", "--attempt", "1")[0] == "[rank 2] err 2 of 1"


def test_following_ends_with_the_run(run: Path) -> None:
    assert printed(str(run), "-f", "--rank", "2") == ["err 2 of 2", "out 2 of 2"]


@pytest.mark.parametrize("options", [[], ["-f"]])
def test_a_last_line_without_its_end_is_printed(options: list[str], run: Path) -> None:
    """That of a process that was killed, or of print(..., end="")."""
    (run / "logs" / "attempt-2" / "rank2" / "stdout.log").write_text("one\nlast")
    output = CliRunner().invoke(logs, [str(run), "--rank", "2", *options]).output
    assert output == "err 2 of 2\none\nlast\n"


def test_an_unfinished_line_is_printed_once_while_it_is_followed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a whole, once it has ended, or the run has."""
    journal = run / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:-1]))
    file = run / "logs" / "attempt-2" / "rank2" / "stdout.log"
    file.write_text("one\nhal")
    more = iter([("f\nla", ""), ("st", lines[-1])])

    def write(_: float) -> None:
        text, event = next(more)
        with file.open("a") as output, journal.open("a") as entries:
            output.write(text)
            entries.write(event)

    monkeypatch.setattr("runner.cli.logs.time.sleep", write)
    assert CliRunner().invoke(logs, [str(run), "-f", "--rank", "2"]).output == "err 2 of 2\none\nhalf\nlast\n"


def test_a_bar_is_one_line_as_it_was_written(run: Path) -> None:
    (run / "logs" / "attempt-2" / "rank2" / "stdout.log").write_bytes(b"\r 10%\r 20%\x0c\nend\r\n")
    result = CliRunner().invoke(logs, [str(run), "--rank", "2"])
    assert result.stdout_bytes == b"err 2 of 2\n\r 10%\r 20%\x0c\nend\r\n"


def test_logs_of_older_runs_are_found(run: Path) -> None:
    """torchrun put two more folders in between, and the local rank was the name."""
    for rank in (0, 1):
        folder = run / "logs" / "attempt-3" / "run-3_x1" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text(f"old {rank}\n")
    assert printed(str(run), "--attempt", "3") == ["[rank 0] old 0", "[rank 1] old 1"]


def test_lines_of_any_length_are_printed(run: Path) -> None:
    (file,) = (run / "logs" / "attempt-2").rglob("rank2/stdout.log")
    lines = ["x" * (2 * _PIECE_BYTES + 5), "short", *["y" * 1000] * 3000]
    file.write_text("\n".join(lines) + "\n")
    whole = printed(str(run), "--rank", "2")[1:]
    assert "".join(whole) == "".join(lines) and whole[-3000:] == lines[-3000:]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [(["--rank", "0"], "no rank 0 here; there are 2, 3"), (["--attempt", "9"], "attempt 9 has no output here")],
)
def test_what_is_not_there_is_refused(arguments: list[str], part: str, run: Path) -> None:
    with pytest.raises(UsageError, match=part):
        printed(str(run), *arguments)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        printed(str(tmp_path))
