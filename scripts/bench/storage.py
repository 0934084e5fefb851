"""What S3 costs: our uploads and resumes against AWS's and rclone's tools and boto3, and training over a slow link.

Against Ceph's radosgw on loopback, in rounds in which all take turns; what is printed are medians over the rounds of
ratios within each. See `docs/storage-benchmark.md` for the last result. The driver itself needs no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import psutil
from common import ROOT, machine, make_venv, spread, undisturbed

from checkpointing.agent import protocol
from checkpointing.agent.client import ATTEMPT_ENV, SOCKET_ENV, AgentProcess

sys.path.append(str(ROOT / "tests"))
from infra.parts import PARTS, find, missing
from servers import Server, radosgw_server

HERE = Path(__file__).parent
AWS_VENV = ROOT / ".bench" / "aws"
AWS_PACKAGES = ["awscli==1.46.3"]
BUCKET = "bench"
# As of 83 million parameters in single precision, with AdamW.
FILES = {
    "model.safetensors": 333_342_448,
    "optimizer.pt": 666_703_218,
    "rng_state_0.pth": 14_645,
    "rng_state_1.pth": 14_645,
    "trainer_state.json": 21_000,
    "training.pt": 1_465,
}
RANKS = 2
# More than server, arena and ranks take.
TOUCHED_BYTES = 4 << 30
ROUND_TRIP_MS, MBIT_PER_S = 50, 100
# Server and link, on the one side; training on core 0.
FAR_CORE = 1

UPLOADS = {"ours": "ours", "aws": "aws s3 cp", "rclone": "rclone copy", "best": "boto3, tuned"}
BARS = {
    "upload_vs_cli": ("≥", 1.8),
    "upload_vs_best": ("≥", 0.9),
    "upload_extra_mb": ("≤", 256.0),
    "slow_link_step_ratio": ("≤", 1.02),
    "resume_vs_download": ("≤", 1.3),
}


@dataclass
class Measured:
    """All that was measured, by rounds; seconds, but for what says otherwise."""

    upload_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in UPLOADS})
    extra_bytes: list[int] = field(default_factory=list)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    resume_s: list[float] = field(default_factory=list)
    download_s: list[float] = field(default_factory=list)
    checkpoint_bytes: int = 0


def _listen(monitor: socket.socket, events: dict[str, dict[str, Any]]) -> None:
    """Note what an agent says, with the time; until it ends."""
    with contextlib.suppress(OSError):
        while True:
            event, _ = protocol.receive(monitor)
            events[str(event.get("event"))] = {**event, "time": time.monotonic()}


class Bench:
    """Runs one measurement at a time, each in processes of its own, against one server."""

    def __init__(self, server: Server, server_folder: Path, scratch: Path) -> None:
        self.server, self.server_folder, self.scratch = server, server_folder, scratch
        self.environment = {
            **os.environ,
            **server.environment,
            # Default settings, whatever this user's are.
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
        self.bucket = boto3.resource(
            "s3",
            endpoint_url=server.endpoint,
            aws_access_key_id=server.environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=server.environment["AWS_SECRET_ACCESS_KEY"],
            region_name=server.environment["AWS_DEFAULT_REGION"],
        ).create_bucket(Bucket=BUCKET)
        # For the agents that are started here.
        os.environ.update({name: self.environment[name] for name in (*server.environment, "AWS_CONFIG_FILE")})
        self.attempt = 0
        self.source = scratch / "source"
        self.source.mkdir()
        for name, nbytes in FILES.items():
            with (self.source / name).open("wb") as file:
                for start in range(0, nbytes, 1 << 20):
                    file.write(os.urandom(min(1 << 20, nbytes - start)))
        self.began = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.0f} s] {text}", flush=True)

    def run(self, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """A command's RESULT lines; one that fails ends the benchmark."""
        log = self.scratch / "log"
        with (
            log.open("w") as errors,
            subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**self.environment, **(environment or {})},
                start_new_session=True,
            ) as process,
        ):
            try:
                output, _ = process.communicate(timeout=900)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode != 0:
            raise SystemExit(f"{' '.join(map(str, command))} failed:\n{(log.read_text() + output)[-3000:]}")
        # Two ranks may share a line.
        return [json.JSONDecoder().raw_decode(text)[0] for text in output.split("RESULT ")[1:]]

    def clear(self) -> None:
        """Remove every object, and have the server free their memory now instead of in two hours."""
        self.bucket.objects.all().delete()
        configuration = str(self.server_folder / "ceph.conf")
        subprocess.run(
            ["radosgw-admin", "-n", "client.rgw", "--log-file=/dev/null", "gc", "process", "--include-all"],
            check=True,
            capture_output=True,
            env={**os.environ, "CEPH_CONF": configuration, "CEPH_ARGS": f"-c {configuration} --admin-socket="},
        )

    # -- uploads -------------------------------------------------------------------------------------------------

    def upload(self, method: str) -> dict[str, Any]:
        """Upload the files once; its seconds."""
        prefix = uuid.uuid4().hex
        try:
            if method in ("ours", "best"):
                return self.run([sys.executable, HERE / "storage_worker.py", method, self.source, BUCKET, prefix])[0]
            binary = find("rclone")
            assert binary is not None
            commands: dict[str, list[str | Path]] = {
                "aws": [AWS_VENV / "bin" / "aws", "s3", "cp", "--recursive", self.source, f"s3://{BUCKET}/{prefix}"],
                "rclone": [binary, "copy", self.source, f"s3:{BUCKET}/{prefix}"],
            }
            began = time.perf_counter()
            self.run(commands[method])
            return {"seconds": time.perf_counter() - began}
        finally:
            self.clear()

    # -- a slow link ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def link(self) -> Iterator[tuple[str, psutil.Process]]:
        """The server's endpoint behind a slow link, both on the far core."""
        for path in (self.server_folder / "run").glob("*.pid"):
            for thread in psutil.Process(int(path.read_text())).threads():
                os.sched_setaffinity(thread.id, {FAR_CORE})
        port = self.server.endpoint.rsplit(":", 1)[1]
        command = ["taskset", "-c", str(FAR_CORE), sys.executable, str(HERE / "link.py")]
        with subprocess.Popen(
            [*command, port, str(ROUND_TRIP_MS), str(MBIT_PER_S)], stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdout is not None
                yield f"http://127.0.0.1:{int(process.stdout.readline())}", psutil.Process(process.pid)
            finally:
                process.kill()
        for path in (self.server_folder / "run").glob("*.pid"):
            for thread in psutil.Process(int(path.read_text())).threads():
                os.sched_setaffinity(thread.id, range(os.cpu_count() or 1))

    def steps(self, *, agent_core: int, num_saves: int) -> dict[str, Any]:
        """Seconds of steps with and without saves; and the link's processor time, as a share of that of the saves."""
        location = f"s3://{BUCKET}/{uuid.uuid4().hex}"
        command = [sys.executable, str(HERE / "storage_training.py"), "steps", location]
        command += ["--agent-core", str(agent_core), "--saves", str(num_saves)]
        command += ["--bytes-per-s", str(MBIT_PER_S * 1e6 / 8)]
        with self.link() as (endpoint, process):
            result = self.run(command, {"AWS_ENDPOINT_URL": endpoint})[0]
            times = process.cpu_times()
            result["link_cpu_share"] = (times.user + times.system) / sum(result["save_s"])
        self.clear()
        return result

    # -- resuming ------------------------------------------------------------------------------------------------

    def ranks(self, method: str, location: str) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
        """Ranks of torchrun with an agent that is started here, as a supervisor would: what both have said."""
        self.attempt += 1
        agent = AgentProcess.start(location, "bench")
        monitor = protocol.connect(agent.socket_path)
        events: dict[str, dict[str, Any]] = {}
        try:
            protocol.send(monitor, {"do": "hello", "role": "monitor"})
            listener = threading.Thread(target=_listen, args=(monitor, events))
            listener.start()
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
            environment = {SOCKET_ENV: agent.socket_path, ATTEMPT_ENV: str(self.attempt)}
            results = self.run([*torchrun, HERE / "storage_training.py", method, location], environment)
        finally:
            # A signal does not end an agent that has a supervisor.
            protocol.send(monitor, {"do": "shutdown"})
            agent.close()
        listener.join()
        return results, events

    def resume(self, location: str) -> float:
        """Seconds from the checkpoint's first byte until the last rank could train."""
        results, events = self.ranks("resume", location)
        assert [result["step"] for result in results] == [1] * RANKS
        first_byte = events["fetched"]["time"] - events["fetched"]["duration_s"]
        took: float = max(result["ended"] for result in results) - first_byte
        return took

    def download(self, prefix: str) -> dict[str, Any]:
        folder = Path(tempfile.mkdtemp(dir=self.scratch))
        try:
            return self.run([sys.executable, HERE / "storage_worker.py", "download", folder, BUCKET, prefix])[0]
        finally:
            shutil.rmtree(folder)


def measure(bench: Bench, *, quick: bool, rounds: int) -> Measured:
    """Everything, in rounds."""
    measured = Measured()
    total_bytes, tries = sum(FILES.values()), 1 if quick else 3
    calm = functools.partial(undisturbed, tries=tries, say=bench.say, touch_bytes=TOUCHED_BYTES)
    bench.upload("best")  # the server takes longer for the first, whoever makes it
    for number in range(rounds):
        for method in UPLOADS:
            result = calm(functools.partial(bench.upload, method), method)
            measured.upload_s[method].append(result["seconds"])
            if method == "ours":
                measured.extra_bytes.append(result["extra_bytes"])
            rate = total_bytes / result["seconds"] / 1e6
            bench.say(f"round {number + 1}/{rounds}, upload, {UPLOADS[method]}: {rate:.0f} MB/s")

    prefix = uuid.uuid4().hex
    location = f"s3://{BUCKET}/{prefix}"
    bench.ranks("save", location)
    for number in range(rounds):
        measured.resume_s.append(calm(functools.partial(bench.resume, location), "resume"))
        result = calm(functools.partial(bench.download, f"{prefix}/checkpoint-1/"), "download")
        measured.download_s.append(result["seconds"])
        measured.checkpoint_bytes = result["nbytes"]
        bench.say(
            f"round {number + 1}/{rounds}, resume {measured.resume_s[-1]:.2f} s, "
            f"plain download {measured.download_s[-1]:.2f} s"
        )
    bench.clear()

    if (os.cpu_count() or 1) <= FAR_CORE:
        bench.say("the slow link needs a core of its own: left out")
        return measured
    for agent_core in (FAR_CORE,) if quick else (FAR_CORE, 0):
        steps = bench.steps(agent_core=agent_core, num_saves=10 if quick else 30)
        measured.steps[agent_core] = steps
        bench.say(
            f"slow link, agent on core {agent_core}: step with a save on its way / without: "
            f"{spread([saving / plain for saving, plain in steps['pairs']], 3)}"
        )
    return measured


def figures_of(measured: Measured) -> dict[str, float]:
    """The ratios that this project holds itself to, each the median of what was measured side by side."""
    ours, aws, rclone_, best = (measured.upload_s[name] for name in UPLOADS)
    figures = {
        "upload_vs_cli": statistics.median(min(pair) / mine for mine, *pair in zip(ours, aws, rclone_, strict=True)),
        "upload_vs_best": statistics.median(theirs / mine for mine, theirs in zip(ours, best, strict=True)),
        "upload_extra_mb": max(measured.extra_bytes) / 1e6,
        "resume_vs_download": statistics.median(
            resume / download for resume, download in zip(measured.resume_s, measured.download_s, strict=True)
        ),
    }
    if measured.steps:
        pairs = measured.steps[FAR_CORE]["pairs"]
        figures["slow_link_step_ratio"] = statistics.median(saving / plain for saving, plain in pairs)
    return figures


def table_of(measured: Measured, figures: Mapping[str, float]) -> str:
    """Markdown, one row per figure, with the absolute values that it comes from."""

    def rate(nbytes: int, seconds: Sequence[float]) -> str:
        return spread([nbytes / each / 1e6 for each in seconds], 0)

    uploads = {name: rate(sum(FILES.values()), seconds) for name, seconds in measured.upload_s.items()}
    behind = {
        "upload_vs_cli": f"MB/s: ours {uploads['ours']}, aws {uploads['aws']}, rclone {uploads['rclone']}",
        "upload_vs_best": f"MB/s: ours {uploads['ours']}, boto3 {uploads['best']}",
        "upload_extra_mb": "all of the process's anonymous memory, at its peak",
        "resume_vs_download": f"MB/s: resume {rate(measured.checkpoint_bytes, measured.resume_s)}, download "
        f"{rate(measured.checkpoint_bytes, measured.download_s)}",
    }
    if measured.steps:
        far = measured.steps[FAR_CORE]
        ratios = {core: [saving / plain for saving, plain in each["pairs"]] for core, each in measured.steps.items()}
        behind["slow_link_step_ratio"] = (
            f"{spread(ratios[FAR_CORE], 3)} of {len(far['pairs'])} pairs; a step takes "
            f"{spread([plain for _, plain in far['pairs']])} s, a save {spread(far['save_s'], 1)} s; with the agent on "
            f"training's own core {spread(ratios.get(0, []), 3)}"
        )
    lines = ["| figure | measured | bar | | behind it: median (quartiles) |", "|---|---|---|---|---|"]
    for name, value in figures.items():
        sign, bar = BARS[name]
        verdict = "PASS" if (value >= bar if sign == "≥" else value <= bar) else "MISS"
        lines.append(f"| `{name}` | {value:.4g} | {sign} {bar:g} | {verdict} | {behind[name]} |")
    return "\n".join(lines)


METHOD = f"""\
**Uploads**: the same {sum(FILES.values()) / 1e9:.2f} GB of random bytes in {len(FILES)} files, in turns, by new
processes each time. Ours: `commit_snapshot` out of an arena, with the digests (a second thread, as in the agent) and
the manifest's commit, without the process's start and the attempt's begin. `aws s3 cp --recursive` ({AWS_PACKAGES[0]})
and `rclone copy`, with their default settings, out of files in memory (tmpfs), timed from the command to its end.
boto3: `upload_file` of the same files, unsigned payload, no checksum, parts of 32 MB, 8 at once, without the process's
start. The server has taken in as much before, and its memory is freed after each. Before each, {TOUCHED_BYTES >> 30}
GiB of memory are taken and freed: a virtual machine's first use of a page takes its host's time, and whoever comes
first would pay for it.

**Slow link**: {ROUND_TRIP_MS} ms and {MBIT_PER_S} Mbit/s, by `scripts/bench/link.py`. One process trains with one
thread on core 0; server and link are on core {FAR_CORE}. While a save is on its way, the agent is stopped (SIGSTOP) for
every other step; the figure is the median over all such pairs of a step with the agent at work / without. It is that
with the agent on core {FAR_CORE}, as on a machine that has a core to spare.

**Resume**: {RANKS} ranks under torchrun, gloo, one thread each, new processes that have nothing on their disk and have
made their model. From the moment when the agent asks for the checkpoint's first byte until `resume()` has returned in
the last rank, where its first step can begin. Against boto3's `download_file` of the checkpoint's files to tmpfs, parts
of 32 MB, 8 at once, its client made before.

A measurement of uploads or resumes during which more than a tenth of the processor time went to other virtual machines
is repeated, twice at most.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds, nothing repeated")
    parser.add_argument("--rounds", type=int, default=6, help="default: 6")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--docs", action="store_true", help="write docs/storage-benchmark.md")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm"), help="folder in memory; default: /dev/shm")
    options = parser.parse_args()
    for part in ("radosgw", "rclone"):
        if why := missing(part):
            sys.exit(f"{part} is missing: {why}; {PARTS[part].remedy()}")
    make_venv(AWS_VENV, AWS_PACKAGES, "awscli")
    # The server and a gigabyte in /dev/shm must not outlive us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rounds = 2 if options.quick else options.rounds

    scratch = Path(tempfile.mkdtemp(prefix="storage-bench-", dir=options.scratch))
    server_folder = Path(tempfile.mkdtemp(prefix="storage-bench-")) / "radosgw"
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, server_folder.parent, ignore_errors=True)
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        try:
            server = stack.enter_context(radosgw_server(server_folder))
        except RuntimeError as error:
            sys.exit(f"radosgw did not start: {error}")
        measured = measure(Bench(server, server_folder, scratch), quick=options.quick, rounds=rounds)

    figures = figures_of(measured)
    table = table_of(measured, figures)
    print(f"\n{table}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    if options.docs:
        command = " ".join(["python", "scripts/bench/storage.py", *sys.argv[1:]])
        text = (
            f"# What S3 costs\n\n`{command}`, {datetime.date.today()}, on {machine()}; Ceph's radosgw on loopback, its "
            f"data in memory, on the same cores; {rounds} rounds.\n\n{table}\n\n{METHOD}"
        )
        (ROOT / "docs" / "storage-benchmark.md").write_text(text)


if __name__ == "__main__":
    main()
