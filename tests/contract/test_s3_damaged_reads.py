"""A way to an S3 server that damages what is read: no sound checkpoint is lost, however long it lasts.

`READ_FAULT_S=1,10,60,300` sets how long, in seconds; by default it is short, and so is the patience.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.servers import Fault, MeddlingProxy, Server, bucket_on, meddling_proxy
from helpers.small_checkpoint import Agent, write_checkpoint
from infra.parts import needs
from unit.checkpointing.resume.test_agreement import TRAINING, chosen

from checkpointing.commit.catalog import verify
from checkpointing.commit.protocol import StagedFile, commit_snapshot
from checkpointing.commit.tiers import Tiers
from checkpointing.errors import CheckpointError, StorageUnreachable
from checkpointing.format.digest import digest_buffer
from checkpointing.host.environment import READ_PATIENCE_ENV
from checkpointing.storage import open_storage

Damage = Callable[[bytes], bytes]
LASTING_S = [float(text) for text in os.environ.get("READ_FAULT_S", "1").split(",")]
# As long as the longest fault and a tenth more, as the default is to five minutes.
PATIENCE_S = 1.1 * max(LASTING_S)
STEPS = (10, 20, 30)


def zeroed(data: bytes) -> bytes:
    return bytes(len(data) // 2) + data[len(data) // 2 :]


def truncated(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def flipped(data: bytes) -> bytes:
    found = bytearray(data)
    if found:
        found[random.randrange(len(found))] ^= 1 << random.randrange(8)
    return bytes(found)


class Swapped:
    """Each answer has the bytes of the one before."""

    def __init__(self) -> None:
        self._last, self._lock = b"nothing yet", threading.Lock()

    def __call__(self, data: bytes) -> bytes:
        with self._lock:
            last, self._last = self._last, data
        return last


KINDS: dict[str, Callable[[], Damage]] = {
    "zeroed": lambda: zeroed,
    "truncated": lambda: truncated,
    "flipped": lambda: flipped,
    "swapped": Swapped,
}
# What is damaged: files alone, manifests too, or everything, listings and fences included.
WHAT = {
    "files": r"GET .*/(model\.safetensors|optimizer\.pt)",
    "manifests": r"GET .*/manifest\.json",
    "all": "GET .*",
}


@pytest.fixture
def proxy(radosgw_s3: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[MeddlingProxy]:
    monkeypatch.setenv(READ_PATIENCE_ENV, str(PATIENCE_S))
    with meddling_proxy(radosgw_s3) as found:
        yield found


def filled(location: str, folder: Path) -> None:
    for step in STEPS:
        write_checkpoint(folder, step, TRAINING)
        manifest = open_storage(str(folder)).read_manifest(step)
        files = {one.name: (folder / f"checkpoint-{step}" / one.name).read_bytes() for one in manifest.files}
        commit_snapshot(
            open_storage(location),
            manifest.info,
            [
                StagedFile(name, [memoryview(data)], functools.partial(digest_buffer, data))
                for name, data in files.items()
            ],
        )


@needs("radosgw")
@pytest.mark.parametrize("what", WHAT)
def test_a_way_that_damages_what_is_read_costs_no_checkpoint(
    what: str, proxy: MeddlingProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = bucket_on(proxy, monkeypatch)

    def meet(kind: str, lasting_s: float) -> str:
        """A run that resumes meanwhile; returns what is wrong afterwards."""
        location = f"s3://{bucket}/{kind}-{lasting_s:g}-s"
        folder = tmp_path / f"{kind}-{lasting_s:g}"
        filled(location, folder / "source")
        damage, hits, began = KINDS[kind](), [0], list[float]()

        def damaged(data: bytes) -> bytes:
            began[:] = began or [time.monotonic()]
            if time.monotonic() > began[0] + lasting_s:
                return data
            hits[0] += 1
            return damage(data)

        # The listing names its prefix in the query.
        at = WHAT[what].replace("GET .*", f"GET .*{kind}-{lasting_s:g}-s.*", 1)
        proxy.add(at, Fault(carried_out=True, damage=damaged))
        (folder / "agent").mkdir()
        ends, patient_until = list[int | None](), time.monotonic() + lasting_s + 10 * PATIENCE_S
        # As a supervisor does, which starts the ranks again where storage is at fault.
        while not ends or (ends[-1] is None and time.monotonic() < patient_until):
            with contextlib.suppress(StorageUnreachable, OSError):
                ends.append(chosen(Tiers(open_storage(location)), Agent(folder / "agent")))
                continue
            ends.append(None)
            time.sleep(0.1)
        # It may have resumed before that was over.
        time.sleep(max(0.0, began[0] + lasting_s - time.monotonic()) if began else 0.0)
        proxy_free = open_storage(location)
        lost = proxy_free.quarantined()
        steps = Tiers(proxy_free).catalog.committed_steps()
        problems = [f"quarantined: {lost}"] if lost else []
        problems += [f"resumed from {ends[-1]}"] if ends[-1] not in STEPS else []
        problems += [f"committed: {steps}"] if steps != list(STEPS) else []
        problems += [] if hits[0] else ["nothing was damaged"]
        for step in STEPS:
            try:
                verify(proxy_free, step)
            except CheckpointError as error:
                problems.append(str(error))
        return "; ".join(problems) and f"{kind} for {lasting_s} s: {'; '.join(problems)}"

    cases = [(kind, lasting_s) for kind in KINDS for lasting_s in LASTING_S]
    with ThreadPoolExecutor(len(cases)) as pool:
        found = list(pool.map(lambda case: meet(*case), cases))
    assert not any(found), "\n".join(filter(None, found))
