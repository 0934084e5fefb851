"""The catalog of faults: what can be done to a run, from outside or at a failpoint in its code.

Each fault declares its expected effect, so that a campaign knows what to wait for and what to count.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from checkpointing.agent.events import BatchShape, TrainingStarted
from checkpointing.format.manifest import MANIFEST_NAME
from runner.chaos.scene import TRAINING, Effect, Fault, Moment, NotApplicable, Scene

# A failpoint that was not reached within this time is not on this run's path (no S3, nothing to prune).
_REACH_S = 20.0
_SHORT_GRACE_S = 0.3
_CLOCK_JUMP_S = 3600
_PRESSURE_S = 3.0
_SPARE_BYTES = 64 << 20


# -- processes -----------------------------------------------------------------------------------------------------


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        raise NotApplicable("the process has just ended") from None


def _running_ranks(scene: Scene) -> list[psutil.Process]:
    ranks = scene.ranks()
    if not ranks:
        raise NotApplicable("no rank is running")
    return ranks


def _send_to_rank(number: signal.Signals) -> Callable[[Scene], str]:
    def inject(scene: Scene) -> str:
        victim = scene.random.choice(_running_ranks(scene))
        _send(victim, number)
        return f"{number.name} to rank process {victim.pid}"

    return inject


_kill_rank = _send_to_rank(signal.SIGKILL)


def _kill_all_ranks(scene: Scene) -> str:
    ranks = _running_ranks(scene)
    for victim in ranks:
        with contextlib.suppress(NotApplicable):
            _send(victim, signal.SIGKILL)
    return f"SIGKILL to {len(ranks)} ranks"


def _kill_helper(module: str) -> Callable[[Scene], str]:
    def inject(scene: Scene) -> str:
        victim = scene.run.helper(module)
        if victim is None:
            raise NotApplicable(f"no {module} is running")
        _send(victim, signal.SIGKILL)
        return f"SIGKILL to {victim.pid}"

    return inject


def _kill_supervisor(scene: Scene) -> str:
    scene.run.process.send_signal(signal.SIGKILL)
    return f"SIGKILL to {scene.run.process.pid}"


def _preempt(scene: Scene) -> str:
    scene.run.process.send_signal(signal.SIGTERM)
    return "SIGTERM, with enough grace time"


def _preempt_short(scene: Scene) -> str:
    """Imitate a spot instance that is taken before its grace period is over."""
    # Shared memory disappears with the node, including what only the resource tracker still knows.
    shared_memory = scene.run.shared_memory()
    scene.run.process.send_signal(signal.SIGTERM)
    time.sleep(scene.random.uniform(0.0, _SHORT_GRACE_S))
    if scene.run.process.poll() is None:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in scene.run.alive():
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)
            if number is signal.SIGSTOP:
                shared_memory |= scene.run.shared_memory()
        for path in shared_memory:
            path.unlink(missing_ok=True)
    return f"SIGTERM, then SIGKILL to all processes within {_SHORT_GRACE_S} s"


def _preempt_twice(scene: Scene) -> str:
    scene.run.process.send_signal(signal.SIGTERM)
    time.sleep(scene.random.uniform(0.02, 0.3))
    if scene.run.process.poll() is None:
        scene.run.process.send_signal(signal.SIGTERM)
    return "SIGTERM twice"


# -- failpoints ----------------------------------------------------------------------------------------------------


def _at_failpoint(name: str, action: str, most: int = 1) -> Callable[[Scene], str]:
    """Return a function that arms a failpoint, and waits until it fires: at the first to `most`-th hit, at random."""

    def inject(scene: Scene) -> str:
        number = scene.random.randint(1, most)
        scene.failpoints.arm(f"{name}={action}@{number}")
        try:
            fired = scene.run.wait(lambda: scene.failpoints.has_fired(name) or None, _REACH_S)
        finally:
            # A failpoint that fired does not fire again, and its folder is still needed to see that.
            if not scene.failpoints.has_fired(name):
                scene.failpoints.arm("")
        if not fired:
            raise NotApplicable(f"{name} was not reached within {_REACH_S:.0f} s")
        return f"{action} at {name}, hit {number}"

    return inject


def _kill_in_next_attempt(name: str) -> Callable[[Scene], str]:
    """Return a function that kills a rank, and then the process that reaches the failpoint in the next attempt."""

    def inject(scene: Scene) -> str:
        if not scene.tiers.catalog.committed_steps():
            raise NotApplicable("there is no checkpoint yet")
        attempt = max(entry.attempt for entry in scene.run.entries)
        scene.failpoints.arm(f"{name}=kill")
        _kill_rank(scene)
        scene.run.wait(
            lambda: scene.failpoints.has_fired(name) or scene.run.all(TrainingStarted, after=attempt + 1) or None,
            60.0,
        )
        return f"SIGKILL to a rank, and at {name} in the next attempt"

    return inject


# -- the node ------------------------------------------------------------------------------------------------------


def _jump(scene: Scene) -> str:
    if isinstance(scene.clock, str):
        raise NotApplicable(scene.clock)
    seconds = scene.random.choice((-_CLOCK_JUMP_S, _CLOCK_JUMP_S))
    scene.clock.set(seconds)
    scene.run.wait(lambda: None, 3.0)
    scene.clock.set(0)
    return f"clock set by {seconds:+} s, and back after 3 s"


def _if_divisible(fault: Callable[[Scene], str]) -> Callable[[Scene], str]:
    """Limit a fault to runs whose micro-batch can be halved; the others are right to fail."""

    def inject(scene: Scene) -> str:
        shapes = scene.run.all(BatchShape)
        if not shapes:
            raise NotApplicable("the job has said of no micro-batch, which could be halved")
        if shapes[-1].micro_batch % 2:
            raise NotApplicable(f"a micro-batch of {shapes[-1].micro_batch} cannot be halved")
        return fault(scene)

    return inject


def _squeeze(scene: Scene) -> str:
    if isinstance(scene.memory, str):
        raise NotApplicable(scene.memory)
    with scene.memory.limited(_SPARE_BYTES):
        scene.run.wait(lambda: None, _PRESSURE_S)
    return f"no page cache, and {_SPARE_BYTES >> 20} MiB more than in use, for {_PRESSURE_S:.0f} s"


def _run_out(scene: Scene) -> str:
    """Let the kernel kill the processes that need more memory while the limit applies."""
    if isinstance(scene.memory, str):
        raise NotApplicable(scene.memory)
    memory, before = scene.memory, scene.memory.num_kills
    with memory.limited(0):
        scene.run.wait(lambda: memory.num_kills > before or None, 10.0)
    killed = memory.num_kills - before
    if not killed:
        raise NotApplicable("no process needed more memory within 10 s")
    return f"the kernel killed {killed} processes"


# -- stored checkpoints --------------------------------------------------------------------------------------------


def _damage(how: Callable[[Path, random.Random], str]) -> Callable[[Scene], str]:
    """Return a function that kills all processes and damages the newest checkpoint, so that an older one is needed."""

    def inject(scene: Scene) -> str:
        storage = scene.tiers.durable
        if storage.root is None or scene.tiers.local is not None:
            raise NotApplicable("checkpoints are not in one local folder")
        if len(scene.tiers.catalog.committed_steps()) < 2:
            raise NotApplicable("there are fewer than two checkpoints")
        scene.run.process.send_signal(signal.SIGKILL)
        scene.run.process.wait(30)
        # The agent first commits the complete snapshots that it holds.
        scene.run.leftovers(60.0)
        steps = scene.tiers.catalog.committed_steps()
        if len(steps) < 2:
            return "the supervisor was killed; fewer than two checkpoints were left, so none was damaged"
        folder = storage.directory(steps[-1])
        assert folder is not None
        scene.damaged.add(steps[-1])
        return f"all killed; {folder.name}: {how(folder, scene.random)}"

    return inject


def _some_file(folder: Path, random: random.Random) -> Path:
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name != MANIFEST_NAME)
    return random.choice([file for file in files if file.stat().st_size])


def _truncate(folder: Path, random: random.Random) -> str:
    file = _some_file(folder, random)
    size = random.randrange(file.stat().st_size)
    os.truncate(file, size)
    return f"{file.name} cut to {size} bytes"


def _flip(folder: Path, random: random.Random) -> str:
    file = _some_file(folder, random)
    position, bit = random.randrange(file.stat().st_size), random.randrange(8)
    with file.open("r+b") as stream:
        stream.seek(position)
        byte = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([byte ^ (1 << bit)]))
    return f"bit {bit} of byte {position} of {file.name} flipped"


def _remove_file(folder: Path, random: random.Random) -> str:
    file = _some_file(folder, random)
    file.unlink()
    return f"{file.name} removed"


def _remove_manifest(folder: Path, random: random.Random) -> str:
    (folder / MANIFEST_NAME).unlink()
    return "manifest removed"


# -- the path to S3 ------------------------------------------------------------------------------------------------


def _disturb(how: str, seconds: float) -> Callable[[Scene], str]:
    def inject(scene: Scene) -> str:
        if scene.proxy is None:
            raise NotApplicable("the S3 endpoint is not plain HTTP")
        before = scene.proxy.num_disturbed
        scene.proxy.disturb(how, seconds)
        scene.run.wait(lambda: None, seconds)
        return f"{scene.proxy.num_disturbed - before} requests affected within {seconds:.0f} s"

    return inject


NETWORK = {
    "S3 answers 503": _disturb("busy", 3.0),
    "S3 is silent": _disturb("silent", 5.0),
    "S3 breaks connections": _disturb("broken", 3.0),
}

DAMAGES = {
    "file truncated": _truncate,
    "bit flipped": _flip,
    "file missing": _remove_file,
    "manifest missing": _remove_manifest,
}

# Before, within and after each step of a save (copy, file, manifest, rename, sync) and of pruning: a process is killed
# at the first to this-th hit of the failpoint.
_KILLS = (
    ("snapshot.copying", 3),
    ("snapshot.copied", 3),
    ("local.begun", 1),
    ("local.write", 4),
    ("local.written", 4),
    ("local.manifest", 1),
    ("local.synced", 1),
    ("local.renamed", 1),
    ("local.committed", 1),
    ("local.removing", 1),
    ("local.unlisted", 1),
    ("remote.part", 2),
    ("remote.uploaded", 2),
    ("remote.publishing", 1),
    ("remote.published", 1),
    ("remote.committed", 1),
    ("remote.unlisted", 1),
)

# -- the catalog ---------------------------------------------------------------------------------------------------

FAULTS = [
    Fault("rank killed", Effect.ATTEMPT, _kill_rank),
    Fault("all ranks killed", Effect.ATTEMPT, _kill_all_ranks),
    Fault("launcher killed", Effect.ATTEMPT, _kill_helper("runner.launcher.launcher")),
    Fault("agent killed", Effect.ATTEMPT, _kill_helper("checkpointing.agent")),
    Fault("supervisor killed", Effect.RUN, _kill_supervisor),
    Fault("rank stopped", Effect.ATTEMPT, _send_to_rank(signal.SIGSTOP), TRAINING),
    Fault("preempted", Effect.RUN, _preempt),
    Fault("preempted, short grace", Effect.RUN, _preempt_short),
    Fault("preempted twice", Effect.RUN, _preempt_twice),
    *(Fault(f"killed at {name}", Effect.ATTEMPT, _at_failpoint(name, "kill", most), TRAINING) for name, most in _KILLS),
    *(
        Fault(f"killed at {name}", Effect.ATTEMPT, _kill_in_next_attempt(name), TRAINING, restarts=2)
        for name in ("fence.opened", "fence.published", "restore.read")
    ),
    Fault("disk full", Effect.NOTHING, _at_failpoint("local.write", "full", 4), TRAINING),
    Fault("disk full at the manifest", Effect.NOTHING, _at_failpoint("local.written", "full", 2), TRAINING),
    Fault("I/O error", Effect.NOTHING, _at_failpoint("local.write", "error", 4), TRAINING),
    Fault("I/O error at the commit", Effect.NOTHING, _at_failpoint("local.synced", "error"), TRAINING),
    Fault("disk hangs for 3 s", Effect.NOTHING, _at_failpoint("local.write", "pause", 4), TRAINING),
    Fault("upload fails", Effect.NOTHING, _at_failpoint("remote.part", "error", 2), TRAINING),
    Fault("NaN in a batch", Effect.ATTEMPT, _at_failpoint("training.loss", "nan", 8), TRAINING),
    Fault("clock jumps by an hour", Effect.NOTHING, _jump),
    Fault("memory pressure", Effect.NOTHING, _squeeze, TRAINING),
    Fault("no memory left", Effect.ATTEMPT, _if_divisible(_run_out), TRAINING, halves=True),
    Fault(
        "out of memory",
        Effect.ATTEMPT,
        _if_divisible(_at_failpoint("training.step", "oom", 8)),
        TRAINING,
        halves=True,
    ),
    *(Fault(name, Effect.NOTHING, inject, (Moment.SAVE,), disturbs_network=True) for name, inject in NETWORK.items()),
    *(Fault(name, Effect.RUN, _damage(how), TRAINING, damages=True) for name, how in DAMAGES.items()),
]
