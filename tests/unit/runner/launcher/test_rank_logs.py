from __future__ import annotations

from pathlib import Path

from runner.launcher.rank_logs import RankLogs


def test_a_path_has_the_numbers_of_the_attempt_and_of_the_rank_only(tmp_path: Path) -> None:
    """The attempt's folder had another one in it, of attempt 0."""
    folder = tmp_path / "attempt-3"
    folder.mkdir()
    environments = {0: {"RANK": "4"}, 1: {"RANK": "5"}}
    logs = RankLogs(folder)
    files = logs.reify(environments)
    assert files.stdouts[1] == str(folder / "rank5" / "stdout.log")
    assert files.stderrs == {0: str(folder / "rank4" / "stderr.log"), 1: str(folder / "rank5" / "stderr.log")}
    assert files.error_files[0] == environments[0]["TORCHELASTIC_ERROR_FILE"] == str(folder / "rank4" / "error.json")
    assert (folder / "rank4").is_dir() and logs.root_log_dir == str(folder)
