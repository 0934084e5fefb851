"""Where torchrun writes what the ranks of an attempt print: `attempt-3/rank1/stderr.log`.

A module of its own, since it loads torch. torchrun's own folders have a random name and the number of a restart in
between, which is always 0 here: next to the attempt's that looked like another one.
"""

from __future__ import annotations

from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std

from runner.ranks.output import ERROR_NAME, STDERR_NAME, STDOUT_NAME


class RankLogs(LogsSpecs):
    """Folders of the ranks, by their number among all ranks, in an empty folder of the attempt."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), Std.ALL)
        self._folder = folder

    @property
    def root_log_dir(self) -> str:
        """The folder, as torchrun asks for it."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the folders, and return the files of each local rank, whose environment is given."""
        files = LogsDest()
        for local_rank, environment in envs.items():
            folder = self._folder / f"rank{environment['RANK']}"
            folder.mkdir()
            files.stdouts[local_rank] = str(folder / STDOUT_NAME)
            files.stderrs[local_rank] = str(folder / STDERR_NAME)
            files.error_files[local_rank] = environment["TORCHELASTIC_ERROR_FILE"] = str(folder / ERROR_NAME)
        return files
