"""Observes the real code, and checks that its calls are a path through the model."""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
from chaos.commit_model import NOTES, CommitModel, Life, Op

from checkpointing.storage import base, local, local_transaction, object_storage
from checkpointing.storage.fsspec_store import FilesystemStore
from checkpointing.storage.object_store import StorageError, StorageTimeout

T = TypeVar("T")

_NONCE = re.compile(r"^(checkpoint-\d+/\d+)\.[0-9a-f]{12}/")
_ASIDE = re.compile(r"^(checkpoint-\d+/manifest)\.invalid\.[0-9a-f]{12}(\.json)$")
# What the model tells apart, and a call does not.
_CALLS = {"look": ("read", "get"), "newest": ("list",), "unlink one of": ("unlink",)}


class Event(NamedTuple):
    """What a life has done: a call, or a pass of a failpoint (`at`)."""

    life: int
    kind: str
    path: str = ""
    target: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (f"{self.life}:", self.kind, self.path, self.target)))


class Recorder:
    """Records each call and the life that made it.

    Attributes:
        life: whose turn it is.
        uploads: begun in object storage, not completed.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.life = 1
        self.uploads: set[str] = set()

    def add(self, kind: str, path: str = "", target: str = "") -> None:
        """Right before it is done."""
        self.events.append(Event(self.life, kind, path, target))

    def watch_failpoints(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (base, local, local_transaction, object_storage):
            monkeypatch.setattr(module, "failpoint", lambda name: self.add("at", name))


class DiskRecorder(Recorder):
    """Every call that changes or reads what is below a directory."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._root, self._being_written = root, set[str]()
        self.watch_failpoints(monkeypatch)
        real_open, real_io_open, real_fsync, real_pwrite = os.open, io.open, os.fsync, os.pwrite

        def opened(path: Any, flags: int, *rest: Any, **where: Any) -> int:
            if (name := self._name(path)) is not None and not (self._root / name).is_dir():
                if flags & os.O_CREAT:
                    self._create(name)
                elif flags & os.O_DIRECTORY:
                    self.add("fsync", name)  # which fails: it is not there
                elif not flags & os.O_WRONLY:
                    self.add("read", name)
            return real_open(path, flags, *rest, **where)

        def io_opened(path: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
            if (name := self._name(path)) is not None:
                self._create(name) if "w" in mode else self.add("read", name)
            return real_io_open(path, mode, *rest, **options)

        def fsynced(fd: int) -> None:
            if (name := self._name(Path(f"/proc/self/fd/{fd}").readlink())) is not None:
                self._being_written.discard(name)
                self.add("fsync", name)
            real_fsync(fd)

        def written(fd: int, *rest: Any) -> int:
            name = self._name(Path(f"/proc/self/fd/{fd}").readlink())
            if name is not None and name not in self._being_written:
                self.add("write", name)
            return real_pwrite(fd, *rest)

        monkeypatch.setattr(os, "open", opened)
        monkeypatch.setattr(io, "open", io_opened)
        monkeypatch.setattr(os, "fsync", fsynced)
        monkeypatch.setattr(os, "pwrite", written)
        for module, call, kind in (
            (os, "mkdir", "mkdir"),
            (os, "unlink", "unlink"),
            (os, "rmdir", "rmdir"),
            (os, "listdir", "list"),
            (os, "scandir", "list"),
            (os, "rename", "rename"),
            (shutil, "rmtree", "open"),
            (Path, "exists", "exists"),
        ):
            monkeypatch.setattr(module, call, self._recorded(getattr(module, call), kind))

    def _create(self, name: str) -> None:
        self._being_written.add(name)
        self.add("create", name)

    def _recorded(self, real: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **where: Any) -> Any:
            folder = where.get("dir_fd")
            if folder is not None:
                path_there = Path(f"/proc/self/fd/{folder}").readlink() / path
            name = self._name(path if folder is None else path_there)
            # `mkdir` of the root changes nothing; an opened directory is listed by `open`.
            if name is not None and not (kind == "mkdir" and name == "."):
                target = (self._name(rest[0]) or "") if kind == "rename" else ""
                self.add(kind, "" if kind == "list" and name == "." else name, target)
            return real(path, *rest, **where)

        return call

    def _name(self, path: Any) -> str | None:
        if isinstance(path, int):
            return None
        path = Path(str(path).removesuffix(" (deleted)"))
        return str(path.relative_to(self._root)) if path.is_relative_to(self._root) else None


class RecordingStore(FilesystemStore):
    """An object store that says what it is asked for; it may decide about "only if absent", and lose an answer.

    Attributes:
        loses: of the next manifest's put, the answer; whether it is carried out all the same.
    """

    honours_if_absent = False

    def __init__(self, location: str, recorder: Recorder, *, honours: bool) -> None:
        super().__init__(location)
        self._recorder, self.honours_if_absent = recorder, honours
        self.loses: bool | None = None

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        self._recorder.add("put if absent" if if_absent else "put", _plain(key))
        lost, self.loses = self.loses, None if key.startswith("checkpoint-") else self.loses
        if lost is None or not key.startswith("checkpoint-"):
            return super().put(key, data, if_absent=if_absent)
        if lost:
            super().put(key, data, if_absent=if_absent)
        raise StorageTimeout(f"put {key}: no answer")

    def upload(self, key: str, pieces: Iterable[memoryview], nbytes: int | None = None) -> int:
        """Upload in parts, as S3 does."""
        self._recorder.add("part", _plain(key))
        self._recorder.uploads.add(key)
        self._recorder.add("at", "remote.part")
        self._recorder.add("complete", _plain(key))
        if key not in self._recorder.uploads:
            raise StorageError(f"upload {key}: it was aborted")
        self._recorder.uploads.discard(key)
        return super().upload(key, pieces, nbytes)

    def get(self, key: str) -> bytes | None:
        self._recorder.add("get", _plain(key))
        return super().get(key)

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        self._recorder.add("read", _plain(key))
        super().read_into(key, start, target)

    def sizes(self, folder: str = "") -> dict[str, int]:
        self._recorder.add("list", _plain(folder))
        return super().sizes(folder)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._recorder.add("delete", _plain(key))
            super().delete([key])

    def abort_uploads(self, among: Callable[[str], bool] = lambda key: True) -> int:
        self._recorder.add("uploads")
        for key in sorted(filter(among, self._recorder.uploads)):
            self._recorder.add("end upload", _plain(key))
            self._recorder.uploads.discard(key)
        return 0


def _plain(key: str) -> str:
    """As the model calls it, which needs no nonces."""
    return _ASIDE.sub(r"\1\2 aside", _NONCE.sub(r"\1/", key))


class Place(NamedTuple):
    """Where a walk through the model stands: its world, the lives, and the failpoints that each must come by next."""

    world: int
    nodes: tuple[int, ...]
    points: tuple[tuple[str, ...], ...]


def departure(model: CommitModel, events: Iterable[Event]) -> str | None:
    """Where the model does not allow what was done, and what it expects there; None where it allows all of it."""
    places, done = {_start(model)}, list[str]()
    for event in events:
        after = {place for now in places for place in _after(model, now, event)}
        if not after:
            wanted = sorted({_expected(model, now, event.life) for now in places})
            return f"after {done[-3:]} the code does {str(event)!r}, the model {' or '.join(wanted)}"
        places, done = after, [*done, str(event)]
    return None


def unfinished(model: CommitModel, events: Iterable[Event], life: int) -> bool:
    """Return whether the model expects that life to do more."""
    places = {_start(model)}
    for event in events:
        places = {place for now in places for place in _after(model, now, event)}
    return not any(_op(model.lives[life - 1], place.nodes[life - 1])[1] is None for place in places)


def _start(model: CommitModel) -> Place:
    return Place(model.first.world, model.first.nodes, ((),) * len(model.lives))


def _after(model: CommitModel, now: Place, event: Event) -> Iterator[Place]:
    index = event.life - 1
    life, points = model.lives[index], now.points[index]
    if points:
        if event.kind == "at" and event.path == points[0]:
            yield now._replace(points=_with(now.points, index, points[1:]))
        return
    node, op = _op(life, now.nodes[index])
    while op is not None and op.path == "*":  # any number of times
        if event.kind == op.kind and event.path:
            yield now
        node, op = _op(life, life.advance(node, None))
    if op is None or not _fits(op, event):
        return
    outcomes = [(None, now.world)] if op.idle else model._outcomes_of(now.world, op)
    for answer, world in outcomes:
        if op.kind == "unlink one of" and answer != event.path.rpartition("/")[2]:
            continue
        points = () if answer is False else op.points
        yield Place(world, _with(now.nodes, index, life.advance(node, answer)), _with(now.points, index, points))


def _with(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _op(life: Life, node: int) -> tuple[int, Op | None]:
    """Return the next operation of a life that can be observed."""
    while (op := life.op(node)) is not None and op.kind in NOTES:
        node = life.advance(node, None)
    return node, op


def _fits(op: Op, event: Event) -> bool:
    if event.kind not in _CALLS.get(op.kind, (op.kind,)):
        return False
    if op.kind == "unlink one of":
        return True
    path = op.path.removesuffix("*")
    return event.path.startswith(path) if path != op.path else event.path == path and event.target in ("", op.value)


def _expected(model: CommitModel, now: Place, life: int) -> str:
    if now.points[life - 1]:
        return f"passes {now.points[life - 1][0]}"
    _, op = _op(model.lives[life - 1], now.nodes[life - 1])
    return "has ended" if op is None else f"{op.kind} {op.path}".strip()
