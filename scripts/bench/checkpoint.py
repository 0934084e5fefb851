"""What checkpoints cost training: ours against the peers, on the same model and steps, in turns.

Every variant runs in a process of its own, in rounds of changing order; what is printed are medians over all rounds
and ratios of them. See `docs/benchmarks/checkpoint.md` for the last result. The driver itself needs no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from common import ROOT, machine, make_venv, spread, undisturbed

from checkpointing.agent import protocol
from checkpointing.agent.client import AgentProcess
from checkpointing.agent.options import AgentOptions
from checkpointing.environment import SETTINGS_ENV, RankSettings

WORKER = Path(__file__).with_name("checkpoint_worker.py")
DLROVER_VENV = ROOT / ".bench" / "dlrover"
DLROVER_PACKAGES = ["dlrover==0.6.1", "grpcio==1.85.1", "protobuf==7.36.2", "torch==2.13.0", "numpy"]

TITLES = {
    "none": "none",
    "hf": "HF Trainer, synchronous",
    "dcp-thread": "DCP async, thread",
    "dcp-process": "DCP async, process",
    "dcp-shm": "DCP async, process, shared stager",
    "dcp-shm-async": "DCP async, process, async shared stager",
    "dlrover": "DLRover Flash Checkpoint 0.6.1",
    "ours": "ours",
}
PEERS = [name for name in TITLES if name not in ("none", "ours")]
# Never the best peer: with the shared stager the same is quicker.
LEFT_OUT_WHEN_QUICK = ["dcp-process"]
# 1.25 GB of weights and AdamW state; a step takes about a second on one core.
SHAPE = {"width": 768, "layers": 12, "tokens": 16}
SMALL_SHAPE = {"width": 256, "layers": 8, "tokens": 320}
SAVE_EVERY = 5
SLOW_DISK_BYTES_PER_S = 20_000_000
MODES = {"spare": "a core to spare", "pinned": "all on one core"}


@dataclass
class Series:
    """What was measured of one variant in one mode, over all rounds."""

    blocked_s: list[float] = field(default_factory=list)
    durable_s: list[float] = field(default_factory=list)
    overhead_s: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)


class PeakMemory(threading.Thread):
    """The most memory that a process and its children held: anonymous, and shared (counted once)."""

    def __init__(self, *pids: int) -> None:
        super().__init__(daemon=True)
        self._pids, self._ended = pids, threading.Event()
        self.nbytes = 0

    def run(self) -> None:
        while not self._ended.wait(0.1):
            self.nbytes = max(self.nbytes, self._now())

    def stop(self) -> int:
        self._ended.set()
        self.join()
        return self.nbytes

    def _now(self) -> int:
        anonymous, shared = 0, [0]
        for pid in self._pids:
            with contextlib.suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                for each in (process, *process.children(recursive=True)):
                    fields = dict(
                        line.split(":", 1) for line in Path(f"/proc/{each.pid}/status").read_text().splitlines()
                    )
                    # A process that has just ended has none.
                    anonymous += 1024 * int(fields.get("RssAnon", "0").split()[0])
                    shared.append(1024 * int(fields.get("RssShmem", "0").split()[0]))
        return anonymous + max(shared)


@contextlib.contextmanager
def throttled(pid: int | None) -> Iterator[bool]:
    """Limit a process's writes to the disk by the kernel's own means (blkio cgroup); False where that is missing."""
    group = Path(f"/sys/fs/cgroup/blkio/checkpoint-bench-{os.getpid()}")
    if pid is None:
        yield False
        return
    try:
        group.mkdir()
        device = Path(tempfile.gettempdir()).stat().st_dev
        rule = f"{os.major(device)}:{os.minor(device)} {SLOW_DISK_BYTES_PER_S}"
        (group / "blkio.throttle.write_bps_device").write_text(rule)
        (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        with contextlib.suppress(OSError):
            group.rmdir()
        yield False
        return
    try:
        yield True
    finally:
        with contextlib.suppress(OSError):
            (group.parent / "cgroup.procs").write_text(str(pid))
            group.rmdir()


def _drain(monitor: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            protocol.receive(monitor)


class Bench:
    """Runs workers one at a time, in a scratch folder on the disk under test."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.began = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.0f} s] {text}", flush=True)

    @contextlib.contextmanager
    def agent(self, folder: Path) -> Iterator[AgentProcess]:
        agent = AgentProcess.start(AgentOptions(location=str(folder), run_id="bench"))
        # As a supervisor does: the agent lives as long as somebody listens.
        monitor = protocol.connect(agent.socket_path)
        protocol.send(monitor, {"do": "hello", "role": "monitor"})
        threading.Thread(target=_drain, args=(monitor,), daemon=True).start()
        try:
            yield agent
        finally:
            # A signal does not end an agent that has a supervisor.
            protocol.send(monitor, {"do": "shutdown"})
            agent.close()
            monitor.close()

    def work(
        self,
        method: str,
        folder: Path,
        shape: dict[str, int],
        *,
        steps: int,
        save_every: int = SAVE_EVERY,
        core: int | None = None,
        agent: AgentProcess | None = None,
        finish: bool = True,
        throttle: bool = False,
    ) -> dict[str, Any]:
        """One run of the worker; its figures, and `peak_bytes` of it with all its processes."""
        python = DLROVER_VENV / "bin" / "python" if method == "dlrover" else Path(sys.executable)
        command = [str(python), str(WORKER), method, "--folder", str(folder), "--wait"]
        command += ["--steps", str(steps), "--save-every", str(save_every)]
        command += [part for key, value in shape.items() for part in (f"--{key}", str(value))]
        command += [] if finish else ["--no-finish"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        if agent is not None:
            settings = RankSettings(agent_socket=agent.socket_path, attempt=time.monotonic_ns() // 1_000_000)
            environment[SETTINGS_ENV] = settings.to_json()
        if core is not None:
            command = ["taskset", "-c", str(core), *command]
            if agent is not None:
                for thread in psutil.Process(agent.process.pid).threads():
                    os.sched_setaffinity(thread.id, {core})
        log = self.scratch / "worker.log"
        with (
            log.open("w") as errors,
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                start_new_session=True,
            ) as process,
        ):
            assert process.stdin is not None and process.stdout is not None
            memory = PeakMemory(process.pid, *([agent.process.pid] if agent is not None else []))
            try:
                for line in process.stdout:
                    if line.startswith("READY"):
                        with throttled(agent.process.pid if throttle and agent is not None else None) as limited:
                            memory.start()
                            process.stdin.write("\n")
                            process.stdin.flush()
                            answer = next((line for line in process.stdout if line.startswith("RESULT ")), None)
                        if answer is not None:
                            figures: dict[str, Any] = json.loads(answer.removeprefix("RESULT "))
                            return {**figures, "peak_bytes": memory.stop(), "throttled": limited}
                raise SystemExit(f"{method} failed:\n{log.read_text()[-3000:]}")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def run(self, method: str, *, steps: int, core: int | None) -> dict[str, Any]:
        """One variant from scratch; whatever it wrote is removed and flushed before the next."""
        with self.folder() as folder:
            if method != "ours":
                return self.work(method, folder, SHAPE, steps=steps, core=core)
            with self.agent(folder) as agent:
                return self.work(method, folder, SHAPE, steps=steps, core=core, agent=agent)

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        folder = Path(tempfile.mkdtemp(dir=self.scratch))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.sync()

    def dd(self, nbytes: int, *flags: str) -> float:
        """Seconds that `dd` takes for the bytes of a state, out of the page cache."""
        source, target = self.scratch / "source", self.scratch / "target"
        if not source.exists():
            with source.open("wb") as file:
                for _ in range(nbytes // (4 << 20)):
                    file.write(os.urandom(4 << 20))
        with source.open("rb", buffering=0) as file:
            while file.read(4 << 20):
                pass
        os.sync()
        began = time.perf_counter()
        subprocess.run(["dd", f"if={source}", f"of={target}", "bs=4M", *flags], check=True, capture_output=True)
        seconds = time.perf_counter() - began
        target.unlink()
        return seconds

    def resume_pair(self) -> tuple[float, float]:
        """Seconds of `CheckpointManager.resume()`: from memory, and from the disk with its cache dropped."""
        with self.folder() as folder:
            with self.agent(folder) as agent:
                self.work("ours", folder, SHAPE, steps=1, save_every=1, agent=agent)
                from_memory = self.work("ours", folder, SHAPE, steps=0, agent=agent)
            for path in folder.glob("checkpoint-*/*"):
                fd = os.open(path, os.O_RDONLY)
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
            with self.agent(folder) as agent:
                from_disk = self.work("ours", folder, SHAPE, steps=0, agent=agent)
        assert from_memory["start"] == from_disk["start"] == 1
        return from_memory["resume_s"], from_disk["resume_s"]

    def slow_disk_pair(self, *, steps: int) -> tuple[float, float] | None:
        """Median seconds of a step: with a save every 4 steps to a disk of 20 MB/s, and without; None if untestable."""
        with self.folder() as folder, self.agent(folder) as agent:
            saving = self.work(
                "ours", folder, SMALL_SHAPE, steps=steps, save_every=4, agent=agent, finish=False, throttle=True
            )
            agent.process.kill()
            plain = self.work("none", folder, SMALL_SHAPE, steps=steps, save_every=0)
        if not saving["throttled"]:
            return None
        return statistics.median(saving["step_s"]), statistics.median(plain["step_s"])


def figures_of(
    results: dict[str, dict[str, Series]],
    dd_s: dict[str, list[float]],
    resumes: list[tuple[float, float]],
    slow: list[tuple[float, float]],
    state_bytes: int,
) -> dict[str, float]:
    """The ratios that this project holds itself to; below one is in our favour, but for `ram_resume_speedup`."""

    def median(mode: str, method: str, what: str) -> float:
        values = getattr(results[mode][method], what)
        return statistics.median(values) if values else float("nan")

    def against(mode: str, what: str) -> tuple[float, float]:
        ours = median(mode, "ours", what)
        best = min(median(mode, peer, what) for peer in PEERS if getattr(results[mode][peer], what))
        return ours / median(mode, "hf", what), ours / best

    blocked_hf, blocked_best = against("spare", "blocked_s")
    overhead_hf, overhead_best = against("pinned", "overhead_s")
    durable = median("spare", "ours", "durable_s")
    extra = median("spare", "ours", "peak_bytes") - median("spare", "none", "peak_bytes")
    figures = {
        "blocked_vs_hf": blocked_hf,
        "blocked_vs_best_peer": blocked_best,
        "overhead_vs_hf": overhead_hf,
        "overhead_vs_best_peer": overhead_best,
        "durable_vs_dd": durable / statistics.median(dd_s["fdatasync"]),
        "durable_vs_direct": durable / statistics.median(dd_s["direct"]),
        "peak_extra_mb": extra / 1e6,
        "peak_extra_vs_two_states": extra / (2 * state_bytes),
        "ram_resume_speedup": statistics.median(disk / memory for memory, disk in resumes),
    }
    if slow:
        figures["slow_disk_step_ratio"] = statistics.median(saving / plain for saving, plain in slow)
    return figures


def table_of(results: dict[str, dict[str, Series]]) -> str:
    """Markdown, one row per variant: medians with quartiles, per save."""
    lines = [
        "| | blocked s | overhead s, a core to spare | overhead s, all on one core | durable s | peak memory GB |",
        "|---|---|---|---|---|---|",
    ]
    for method, title in TITLES.items():
        if not results["spare"][method].peak_bytes:
            continue
        spare, pinned = results["spare"][method], results["pinned"][method]
        cells = [
            spread(spare.blocked_s, 4 if method == "ours" else 2),
            spread(spare.overhead_s) if method != "none" else "-",
            spread(pinned.overhead_s) if method != "none" else "-",
            spread(spare.durable_s),
            f"{statistics.median(spare.peak_bytes) / 1e9:.2f}" if spare.peak_bytes else "-",
        ]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(results: dict[str, dict[str, Series]], path: Path) -> None:
    """Blocked time and overhead per save, as bars, the former on a logarithmic axis."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "bench"
    from matplotlib import pyplot

    methods = [*PEERS, "ours"]
    names = [TITLES[method] for method in methods]
    colours = ["#8a8f98"] * len(PEERS) + ["#1f77b4"]
    panels = [("spare", "blocked_s", "blocked s per save"), ("pinned", "overhead_s", "overhead s per save, one core")]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.4), sharey=True, layout="constrained")
    for axis, (mode, what, label) in zip(axes, panels, strict=True):
        values = [statistics.median(getattr(results[mode][method], what) or [0.0]) for method in methods]
        bars = axis.barh(names, values, color=colours)
        axis.bar_label(bars, labels=[f"{value:.3g}" for value in values], padding=3)
        axis.set_xlabel(label)
        axis.margins(x=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_xscale("log")
    axes[0].invert_yaxis()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of short runs, without DCP's plain process")
    parser.add_argument("--rounds", type=int, default=4, help="default: 4")
    parser.add_argument("--steps", type=int, default=21, help="per run, a save every 5; default: 21")
    parser.add_argument("--json", type=Path, help="write the ratios there")
    parser.add_argument("--docs", action="store_true", help="write table and plot into docs/benchmarks/")
    parser.add_argument("--scratch", type=Path, help="folder on the disk under test; default: the temporary folder")
    parser.add_argument("--seed", type=int, default=0, help="of the order within the rounds")
    options = parser.parse_args()
    rounds, steps = (1, 11) if options.quick else (options.rounds, options.steps)
    make_venv(DLROVER_VENV, DLROVER_PACKAGES, "DLRover and torch")
    random.seed(options.seed)

    scratch = Path(tempfile.mkdtemp(prefix="checkpoint-bench-", dir=options.scratch))
    bench = Bench(scratch)
    results = {mode: {method: Series() for method in TITLES} for mode in MODES}
    dd_s: dict[str, list[float]] = {"fdatasync": [], "direct": []}
    resumes: list[tuple[float, float]] = []
    slow: list[tuple[float, float]] = []
    state_bytes = 0
    num_saves = (steps - 1) // SAVE_EVERY
    try:
        for number in range(rounds):
            for mode in MODES:
                plain_s = 0.0
                methods = [*(PEERS if not options.quick else set(PEERS) - set(LEFT_OUT_WHEN_QUICK)), "ours"]
                for method in ["none", *random.sample(sorted(methods), len(methods))]:
                    core, tries = 0 if mode == "pinned" else None, 1 if options.quick else 3
                    run = undisturbed(
                        functools.partial(bench.run, method, steps=steps, core=core),
                        method,
                        tries=tries,
                        say=bench.say,
                    )
                    state_bytes = run["state_bytes"]
                    series = results[mode][method]
                    plain_s = run["total_s"] if method == "none" else plain_s
                    series.peak_bytes.append(run["peak_bytes"])
                    if method != "none":
                        series.blocked_s += run["blocked_s"]
                        series.durable_s += run["durable_s"]
                        series.overhead_s.append((run["total_s"] - plain_s) / num_saves)
                    bench.say(
                        f"round {number + 1}/{rounds}, {MODES[mode]}, {method}: {run['total_s']:.2f} s, "
                        f"blocked {spread(run['blocked_s'], 4)}, durable {spread(run['durable_s'])}"
                    )
            for _ in range(2):
                dd_s["fdatasync"].append(bench.dd(state_bytes, "conv=fdatasync"))
                dd_s["direct"].append(bench.dd(state_bytes, "oflag=direct"))
            bench.say(f"dd: {dd_s}")
            resumes.append(bench.resume_pair())
            bench.say(f"resume from memory {resumes[-1][0]:.2f} s, from disk {resumes[-1][1]:.2f} s")
            pair = bench.slow_disk_pair(steps=40 if options.quick else 80)
            if pair is not None:
                slow.append(pair)
                bench.say(f"slow disk: median step {pair[0]:.3f} s, without saves {pair[1]:.3f} s")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

    figures = figures_of(results, dd_s, resumes, slow, state_bytes)
    table = table_of(results)
    print(f"\n{table}\n")
    lines = [f"| `{name}` | {value:.4g} |" for name, value in figures.items()]
    print("\n".join(lines))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    if options.docs:
        docs = ROOT / "docs" / "benchmarks"
        plot(results, docs / "checkpoint.svg")
        command = " ".join(["python", "scripts/bench/checkpoint.py", *sys.argv[1:]])
        rows = "\n".join(["| figure | value |", "|---|---|", *lines])
        text = (
            "# Checkpoints: what a save costs training\n\n"
            f"`{command}`, {datetime.date.today()}, on {machine()}; 1 rank, "
            f"1 thread, {state_bytes / 1e9:.2f} GB of state, a save every {SAVE_EVERY} steps of about 1 s, "
            f"{rounds} rounds of {steps} steps. Per save: median (quartiles). Overhead is (total time - total time of "
            '"none" in the same round) / saves. Hugging Face does not fsync: its "durable" is not. A run during which '
            "more than a tenth of the processor time went to other virtual machines is repeated, twice at most.\n\n"
            f"![blocked time and overhead](checkpoint.svg)\n\n{table}\n\n"
            f"`dd` of the same bytes: {spread(dd_s['fdatasync'])} s with `conv=fdatasync`, "
            f"{spread(dd_s['direct'])} s with `oflag=direct`. Resume from memory "
            f"{spread([memory for memory, _ in resumes])} s, from the disk with its cache dropped "
            f"{spread([disk for _, disk in resumes])} s.\n\n{rows}\n"
        )
        (docs / "checkpoint.md").write_text(text)


if __name__ == "__main__":
    main()
