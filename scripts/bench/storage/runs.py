"""The measurements, one at a time, each in processes of its own."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.parts import find
from library.agent import MonitoredAgent
from library.benchmark import ROOT
from library.gateway import Gateway
from library.measuring import scratch_folder
from library.orders import order
from library.workers import TORCHRUN, results_of
from storage.figures import FAR, UPLOADS

TRANSFER, TRAINING = (Path(__file__).with_name(name) for name in ("transfer.py", "training.py"))
AWS_VENV = ROOT / ".bench" / "aws"
BUCKET = "bench"
RANKS = 2
ROUND_TRIP_MS, MBIT_PER_S = 50, 100
_TIMEOUT_S = 900
# A checkpoint of 83 million parameters in single precision, with AdamW.
FILES = {
    "model.safetensors": 333_342_448,
    "optimizer.pt": 666_703_218,
    "rng_state_0.pth": 14_645,
    "rng_state_1.pth": 14_645,
    "trainer_state.json": 21_000,
    "training.pt": 1_465,
}
# 63 MB of weights and AdamW state, 5 s on a link of 100 Mbit/s, with steps of about 0.3 s.
SHAPE = {"vocabulary": 2560, "width": 256, "layers": 5, "tokens": 448}
# More than server, arena and ranks take.
TOUCHED_BYTES = 4 << 30


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    rounds: int  # Of uploads and resumes.
    tries: int = 1  # Repetitions of a disturbed measurement.
    agent_cores: tuple[str, ...] = (FAR,)  # Where the agent runs while training saves over the slow link.
    saves: int = 10  # Over the slow link.
    uploads: tuple[str, ...] = tuple(UPLOADS)  # Methods of upload; none measures only resumes.
    files: dict[str, int] = field(default_factory=lambda: FILES)  # Names and sizes in bytes.
    touched_bytes: int = TOUCHED_BYTES  # Memory to touch before a measurement.
    shape: dict[str, int] = field(default_factory=lambda: SHAPE)
    large_shape: dict[str, int] = field(default_factory=lambda: {"width": 4096, "layers": 5})  # 1.0 GB.


class StorageRuns:
    """Uploads, resumes and trainings against one server, with files in a scratch folder in memory."""

    def __init__(self, server: Gateway, scratch: Path, scale: Scale) -> None:
        self._server, self._scratch, self._scale = server, scratch, scale
        self._bucket = server.make_bucket(BUCKET)
        # Agents and workers inherit it.
        os.environ.update(
            RCLONE_CONFIG="/dev/null",
            RCLONE_CONFIG_S3_TYPE="s3",
            RCLONE_CONFIG_S3_PROVIDER="Ceph",
            RCLONE_CONFIG_S3_ENV_AUTH="true",
            RCLONE_CONFIG_S3_ENDPOINT=server.endpoint,
        )
        self._attempt = 0
        self._source = scratch / "source"
        self._source.mkdir()
        for name, nbytes in scale.files.items():
            with (self._source / name).open("wb") as file:
                for start in range(0, nbytes, 1 << 20):
                    file.write(os.urandom(min(1 << 20, nbytes - start)))

    def clear(self) -> None:
        """Remove all objects and free their memory."""
        self._bucket.objects.all().delete()
        self._server.free_memory()

    def upload(self, method: str) -> dict[str, Any]:
        """Upload the files once; return its `seconds`, and of ours the `extra_bytes` of memory at its peak."""
        prefix = uuid.uuid4().hex
        commands: dict[str, list[object]] = {
            "aws": [AWS_VENV / "bin" / "aws", "s3", "cp", "--recursive", self._source, f"s3://{BUCKET}/{prefix}"],
            "rclone": [find("rclone"), "copy", self._source, f"s3:{BUCKET}/{prefix}"],
        }
        transfer = order(TRANSFER, method, folder=self._source, bucket=BUCKET, prefix=prefix)
        try:
            began = time.perf_counter()
            results = self._run(commands.get(method) or [sys.executable, *transfer])
            return results[0] if results else {"seconds": time.perf_counter() - began}
        finally:
            self.clear()

    def steps(self, *, agent_core: int, num_saves: int) -> dict[str, Any]:
        """Train behind the slow link; return what `time_steps` of the worker does."""
        location = f"s3://{BUCKET}/{uuid.uuid4().hex}"
        how = {"agent_core": agent_core, "num_saves": num_saves, "bytes_per_s": MBIT_PER_S * 1e6 / 8}
        steps = order(TRAINING, "steps", location=location, **self._scale.shape, **how)
        with self._server.behind_slow_link(ROUND_TRIP_MS, MBIT_PER_S) as endpoint:
            result = self._run([sys.executable, *steps], {"AWS_ENDPOINT_URL": endpoint})[0]
        self.clear()
        return result

    def ranks(
        self, measurement: str, location: str, touch_bytes: int = 0
    ) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
        """Run ranks with an agent started for them; return their results, and the agent's newest event of each name."""
        self._attempt += 1
        what = order(TRAINING, measurement, location=location, touch_bytes=touch_bytes, **self._scale.large_shape)
        with MonitoredAgent(location) as agent:
            command = [*TORCHRUN, "--standalone", f"--nproc-per-node={RANKS}", *what]
            results = self._run(command, agent.environment(self._attempt))
        return results, agent.events

    def resume(self, location: str) -> float:
        """Return the seconds from the checkpoint's first byte until the last rank can train."""
        results, events = self.ranks("resume", location, self._scale.touched_bytes)
        assert [result["step"] for result in results] == [1] * RANKS
        first_byte = events["fetched"]["time"] - events["fetched"]["duration_s"]
        took: float = max(result["ended"] for result in results) - first_byte
        return took

    def download(self, prefix: str) -> dict[str, Any]:
        """Download all objects under a prefix with boto3; returns `seconds` and `nbytes`."""
        with scratch_folder(self._scratch) as folder:
            how = {"prefix": prefix, "touch_bytes": self._scale.touched_bytes}
            return self._run([sys.executable, *order(TRANSFER, "download", folder=folder, bucket=BUCKET, **how)])[0]

    def _run(self, command: Sequence[object], environment: dict[str, str] | None = None) -> list[dict[str, Any]]:
        return results_of(command, self._scratch / "log", environment, _TIMEOUT_S)
