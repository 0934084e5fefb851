"""The measurements of `storage.py`, one at a time, each in processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import ROOT, Progress
from monitored_agent import monitored_agent
from storage_server import Gateway, rclone

HERE = Path(__file__).parent
AWS_VENV = ROOT / ".bench" / "aws"
BUCKET = "bench"
RANKS = 2
ROUND_TRIP_MS, MBIT_PER_S = 50, 100
_TIMEOUT_S = 900


class StorageRuns:
    """Uploads, resumes and trainings against one server.

    Args:
        server: The S3 server.
        scratch: Folder in memory for the files to upload.
        files: Their names and sizes in bytes; the contents are random.
        size: Of the trained models: `full` or `tiny`.
        touch_bytes: Memory to touch just before a resume or a download; see `common.touch_memory`.
    """

    def __init__(
        self, server: Gateway, scratch: Path, *, files: Mapping[str, int], size: str, touch_bytes: int = 0
    ) -> None:
        self._touch = ["--touch", str(touch_bytes)]
        self._server, self._scratch, self._size = server, scratch, size
        self._environment = {
            **os.environ,
            **server.environment,
            # The user's own settings do not count.
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "RCLONE_CONFIG": "/dev/null",
            "RCLONE_CONFIG_S3_TYPE": "s3",
            "RCLONE_CONFIG_S3_PROVIDER": "Ceph",
            "RCLONE_CONFIG_S3_ENV_AUTH": "true",
            "RCLONE_CONFIG_S3_ENDPOINT": server.endpoint,
        }
        self._bucket = server.make_bucket(BUCKET)
        # Agents that this process starts inherit its environment.
        os.environ.update({name: self._environment[name] for name in (*server.environment, "AWS_CONFIG_FILE")})
        self._attempt = 0
        self._source = scratch / "source"
        self._source.mkdir()
        for name, nbytes in files.items():
            with (self._source / name).open("wb") as file:
                for start in range(0, nbytes, 1 << 20):
                    file.write(os.urandom(min(1 << 20, nbytes - start)))
        self.say = Progress()

    def clear(self) -> None:
        """Remove all objects and free their memory."""
        self._bucket.objects.all().delete()
        self._server.free_memory()

    # -- uploads -------------------------------------------------------------------------------------------------

    def upload(self, method: str) -> dict[str, Any]:
        """Upload the files once.

        Returns:
            Its `seconds`; of ours also the `extra_bytes` of memory at its peak.
        """
        prefix = uuid.uuid4().hex
        try:
            if method in ("ours", "best"):
                return self._run([sys.executable, HERE / "storage_worker.py", method, self._source, BUCKET, prefix])[0]
            commands: dict[str, list[str | Path]] = {
                "aws": [AWS_VENV / "bin" / "aws", "s3", "cp", "--recursive", self._source, f"s3://{BUCKET}/{prefix}"],
                "rclone": [rclone() or "rclone", "copy", self._source, f"s3:{BUCKET}/{prefix}"],
            }
            began = time.perf_counter()
            self._run(commands[method])
            return {"seconds": time.perf_counter() - began}
        finally:
            self.clear()

    # -- a slow link ---------------------------------------------------------------------------------------------

    def steps(self, *, agent_core: int, num_saves: int) -> dict[str, Any]:
        """Train behind the slow link.

        Returns:
            `pairs` of seconds of a step with a save under way and without, the saves' seconds as `save_s`, and the
            link's processor time as a share of them.
        """
        location = f"s3://{BUCKET}/{uuid.uuid4().hex}"
        command = [sys.executable, str(HERE / "storage_training.py"), "steps", location, "--size", self._size]
        command += ["--agent-core", str(agent_core), "--saves", str(num_saves)]
        command += ["--bytes-per-s", str(MBIT_PER_S * 1e6 / 8)]
        with self._server.behind_slow_link(ROUND_TRIP_MS, MBIT_PER_S) as (endpoint, process):
            result = self._run(command, {"AWS_ENDPOINT_URL": endpoint})[0]
            times = process.cpu_times()
            result["link_cpu_share"] = (times.user + times.system) / sum(result["save_s"])
        self.clear()
        return result

    # -- resuming ------------------------------------------------------------------------------------------------

    def ranks(
        self, method: str, location: str, *options: str
    ) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
        """Run ranks under torchrun with an agent that was started for them, as by a supervisor.

        Returns:
            The ranks' results, and the agent's newest event of each name.
        """
        self._attempt += 1
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command: list[str | Path] = [*torchrun, HERE / "storage_training.py", method, location, "--size", self._size]
        command += options
        with monitored_agent(location) as agent:
            results = self._run(command, agent.environment(self._attempt))
        return results, agent.events

    def resume(self, location: str) -> float:
        """Return the seconds from the checkpoint's first byte until the last rank can train."""
        results, events = self.ranks("resume", location, *self._touch)
        assert [result["step"] for result in results] == [1] * RANKS
        first_byte = events["fetched"]["time"] - events["fetched"]["duration_s"]
        took: float = max(result["ended"] for result in results) - first_byte
        return took

    def download(self, prefix: str) -> dict[str, Any]:
        """Download all objects under a prefix with boto3; returns `seconds` and `nbytes`."""
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        try:
            command: list[str | Path] = [sys.executable, HERE / "storage_worker.py", "download", folder]
            return self._run([*command, BUCKET, prefix, *self._touch])[0]
        finally:
            shutil.rmtree(folder)

    def _run(self, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """Run a command and return its RESULT lines; its failure ends the benchmark."""
        log = self._scratch / "log"
        with (
            log.open("w") as errors,
            subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**self._environment, **(environment or {})},
                start_new_session=True,
            ) as process,
        ):
            try:
                output, _ = process.communicate(timeout=_TIMEOUT_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode != 0:
            raise SystemExit(f"{' '.join(map(str, command))} failed:\n{(log.read_text() + output)[-3000:]}")
        # Two ranks may share a line.
        return [json.JSONDecoder().raw_decode(text)[0] for text in output.split("RESULT ")[1:]]
