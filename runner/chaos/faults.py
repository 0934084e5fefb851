"""The catalog of faults: what can be done to a training, from outside or at a named place in its code.

Each says what is expected to come of it, so that a campaign knows what to wait for and what to count.
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

from checkpointing.manifest import MANIFEST_NAME
from runner.chaos.scene import TRAINING, Effect, Fault, Moment, NotNow, Scene

# A failpoint that has not been come by after this is not on this training's way (no S3, nothing to prune).
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
        raise NotNow("it has just ended") from None


def _kill_rank(scene: Scene) -> str:
    ranks = scene.ranks()
    if not ranks:
        raise NotNow("no rank lives")
    victim = scene.random.choice(ranks)
    _send(victim, signal.SIGKILL)
    return f"SIGKILL to rank process {victim.pid}"


def _kill_all_ranks(scene: Scene) -> str:
    ranks = scene.ranks()
    if not ranks:
        raise NotNow("no rank lives")
    for victim in ranks:
        with contextlib.suppress(NotNow):
            _send(victim, signal.SIGKILL)
    return f"SIGKILL to {len(ranks)} ranks"


def _kill_helper(module: str) -> Callable[[Scene], str]:
    def strike(scene: Scene) -> str:
        victim = scene.subject.helper(module)
        if victim is None:
            raise NotNow(f"no {module} lives")
        _send(victim, signal.SIGKILL)
        return f"SIGKILL to {victim.pid}"

    return strike


def _kill_supervisor(scene: Scene) -> str:
    scene.subject.process.send_signal(signal.SIGKILL)
    return f"SIGKILL to {scene.subject.process.pid}"


def _stop_rank(scene: Scene) -> str:
    ranks = scene.ranks()
    if not ranks:
        raise NotNow("no rank lives")
    victim = scene.random.choice(ranks)
    _send(victim, signal.SIGSTOP)
    return f"SIGSTOP to rank process {victim.pid}"


def _preempt(scene: Scene) -> str:
    scene.subject.process.send_signal(signal.SIGTERM)
    return "SIGTERM, all the grace that it needs"


def _preempt_short(scene: Scene) -> str:
    """As a spot machine that is gone before it has said so."""
    # With the machine its shared memory goes: also what only the resource tracker knows of by then.
    shared_memory = scene.subject.shared_memory()
    scene.subject.process.send_signal(signal.SIGTERM)
    time.sleep(scene.random.uniform(0.0, _SHORT_GRACE_S))
    if scene.subject.process.poll() is None:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in scene.subject.alive():
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)
            if number is signal.SIGSTOP:
                shared_memory |= scene.subject.shared_memory()
        for path in shared_memory:
            path.unlink(missing_ok=True)
    return f"SIGTERM, and within {_SHORT_GRACE_S} s SIGKILL to all processes"


def _preempt_twice(scene: Scene) -> str:
    scene.subject.process.send_signal(signal.SIGTERM)
    time.sleep(scene.random.uniform(0.02, 0.3))
    if scene.subject.process.poll() is None:
        scene.subject.process.send_signal(signal.SIGTERM)
    return "SIGTERM twice"


# -- failpoints ----------------------------------------------------------------------------------------------------


def _at_failpoint(name: str, action: str, most: int = 1) -> Callable[[Scene], str]:
    """Arm one, and wait until somebody has come by.

    Args:
        most: it strikes at the first to this-th time, at random.
    """

    def strike(scene: Scene) -> str:
        number = scene.random.randint(1, most)
        scene.failpoints.arm(f"{name}={action}@{number}")
        try:
            came = scene.subject.wait(lambda: scene.failpoints.has_fired(name) or None, _REACH_S)
        finally:
            # Fired ones stay quiet by themselves; the folder must outlive this.
            if not scene.failpoints.has_fired(name):
                scene.failpoints.arm("")
        if not came:
            raise NotNow(f"nobody came by {name} within {_REACH_S:.0f} s")
        return f"{action} at the {number}. {name}"

    return strike


def _kill_in_next_attempt(name: str) -> Callable[[Scene], str]:
    """A rank is killed, and then who comes by that place in the next attempt."""

    def strike(scene: Scene) -> str:
        if not scene.tiers.catalog.committed_steps():
            raise NotNow("there is no checkpoint yet")
        attempt = scene.subject.all("attempt_started")[-1]["attempt"]
        scene.failpoints.arm(f"{name}=kill")
        _kill_rank(scene)
        scene.subject.wait(
            lambda: (
                scene.failpoints.has_fired(name) or scene.subject.all("training_started", after=attempt + 1) or None
            ),
            60.0,
        )
        return f"SIGKILL to a rank, and to who came by {name} in the next attempt"

    return strike


# -- the machine ---------------------------------------------------------------------------------------------------


def _jump(scene: Scene) -> str:
    if isinstance(scene.clock, str):
        raise NotNow(scene.clock)
    seconds = scene.random.choice((-_CLOCK_JUMP_S, _CLOCK_JUMP_S))
    scene.clock.set(seconds)
    scene.subject.wait(lambda: None, 3.0)
    scene.clock.set(0)
    return f"by {seconds:+} s, and back after 3 s"


def _needs_a_half(strike: Callable[[Scene], str]) -> Callable[[Scene], str]:
    """The mend is half a micro-batch: where there is none, the run would rightly end."""

    def struck(scene: Scene) -> str:
        shapes = scene.subject.all("batch_shape")
        if shapes and shapes[-1]["micro_batch"] % 2:
            raise NotNow(f"a micro-batch of {shapes[-1]['micro_batch']} cannot be halved")
        return strike(scene)

    return struck


def _squeeze(scene: Scene) -> str:
    if isinstance(scene.memory, str):
        raise NotNow(scene.memory)
    with scene.memory.limited(_SPARE_BYTES):
        scene.subject.wait(lambda: None, _PRESSURE_S)
    return f"no page cache, and {_SPARE_BYTES >> 20} MiB more than in use, for {_PRESSURE_S:.0f} s"


def _run_out(scene: Scene) -> str:
    """Those that need more while the limit stands are ended by the kernel; what a killed rank leaves is free again."""
    if isinstance(scene.memory, str):
        raise NotNow(scene.memory)
    memory, before = scene.memory, scene.memory.num_kills
    with memory.limited(0):
        scene.subject.wait(lambda: memory.num_kills > before or None, 10.0)
    killed = memory.num_kills - before
    if not killed:
        raise NotNow("nobody needed more memory within 10 s")
    return f"the kernel has ended {killed} processes"


# -- what lies in storage ------------------------------------------------------------------------------------------


def _damage(scene: Scene, how: Callable[[Path, random.Random], str]) -> str:
    """All processes are killed, then the newest checkpoint is damaged: only an older one is left to go on from."""
    storage = scene.tiers.durable
    if storage.root is None or scene.tiers.local is not None:
        raise NotNow("checkpoints do not lie in one folder")
    if len(scene.tiers.catalog.committed_steps()) < 2:
        raise NotNow("there are no two checkpoints")
    scene.subject.process.send_signal(signal.SIGKILL)
    scene.subject.process.wait(30)
    # Its agent first commits what is whole.
    scene.subject.leftovers(60.0)
    steps = scene.tiers.catalog.committed_steps()
    if len(steps) < 2:
        return "the supervisor was killed; there were no two checkpoints to damage one"
    folder = storage.directory(steps[-1])
    assert folder is not None
    scene.damaged.add(steps[-1])
    return f"all killed; {folder.name}: {how(folder, scene.random)}"


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
    return "its manifest removed"


def _damaging(how: Callable[[Path, random.Random], str]) -> Callable[[Scene], str]:
    return lambda scene: _damage(scene, how)


# -- the line to S3 ------------------------------------------------------------------------------------------------


def _spoil(how: str, seconds: float) -> Callable[[Scene], str]:
    def strike(scene: Scene) -> str:
        if scene.line is None:
            raise NotNow("S3 is not asked over plain HTTP")
        before = scene.line.num_spoiled
        scene.line.spoil(how, seconds)
        scene.subject.wait(lambda: None, seconds)
        return f"{scene.line.num_spoiled - before} times within {seconds:.0f} s"

    return strike


LINES = {
    "S3 answers 503": _spoil("busy", 3.0),
    "S3 is silent": _spoil("silent", 5.0),
    "S3 breaks connections": _spoil("broken", 3.0),
}

DAMAGES = {
    "file truncated": _truncate,
    "bit flipped": _flip,
    "file missing": _remove_file,
    "manifest missing": _remove_manifest,
}

# -- the catalog ---------------------------------------------------------------------------------------------------

FAULTS = [
    Fault("rank killed", Effect.ATTEMPT, _kill_rank),
    Fault("all ranks killed", Effect.ATTEMPT, _kill_all_ranks),
    Fault("launcher killed", Effect.ATTEMPT, _kill_helper("runner.node.launcher")),
    Fault("agent killed", Effect.ATTEMPT, _kill_helper("checkpointing.agent")),
    Fault("supervisor killed", Effect.RUN, _kill_supervisor),
    Fault("rank stopped", Effect.ATTEMPT, _stop_rank, TRAINING),
    Fault("preempted", Effect.RUN, _preempt),
    Fault("preempted, short grace", Effect.RUN, _preempt_short),
    Fault("preempted twice", Effect.RUN, _preempt_twice),
    # Before, within and after the copy, file, manifest, rename, sync; prune; restore.
    *(
        Fault(f"killed at {name}", Effect.ATTEMPT, _at_failpoint(name, "kill", most), moments)
        for name, most, moments in (
            ("snapshot.copying", 3, TRAINING),
            ("snapshot.copied", 3, TRAINING),
            ("local.begun", 1, TRAINING),
            ("local.write", 4, TRAINING),
            ("local.written", 4, TRAINING),
            ("local.manifest", 1, TRAINING),
            ("local.synced", 1, TRAINING),
            ("local.renamed", 1, TRAINING),
            ("local.committed", 1, TRAINING),
            ("local.removing", 1, TRAINING),
            ("local.unlisted", 1, TRAINING),
            ("remote.part", 2, TRAINING),
            ("remote.uploaded", 2, TRAINING),
            ("remote.publishing", 1, TRAINING),
            ("remote.published", 1, TRAINING),
            ("remote.committed", 1, TRAINING),
            ("remote.unlisted", 1, TRAINING),
        )
    ),
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
    Fault("no memory left", Effect.ATTEMPT, _needs_a_half(_run_out), TRAINING, halves=True),
    Fault(
        "out of memory",
        Effect.ATTEMPT,
        _needs_a_half(_at_failpoint("training.step", "oom", 8)),
        TRAINING,
        halves=True,
    ),
    *(Fault(name, Effect.NOTHING, strike, (Moment.SAVE,), spoils_network=True) for name, strike in LINES.items()),
    *(Fault(name, Effect.RUN, _damaging(how), TRAINING, damages=True) for name, how in DAMAGES.items()),
]
