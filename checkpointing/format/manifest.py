"""`manifest.json`: the sole commit point of a checkpoint.

A directory with a whole manifest whose files have the recorded sizes and digests is a checkpoint. Everything else is
not, whatever its name. The manifest carries a digest of itself, so that a flipped bit in a field is detected.
"""

from __future__ import annotations

import json
import re
import reprlib
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from checkpointing.errors import InvalidCheckpoint
from checkpointing.format.digest import PLAIN, algorithm_of, digest_buffer
from checkpointing.format.shard_index import INDEX_NAME

MANIFEST_NAME = "manifest.json"
# Of a checkpoint whose files are whole, and of one whose model and optimizer are spread over shards.
FORMAT_VERSION, SHARDED_FORMAT_VERSION = 1, 2
# Nothing read from a manifest may point outside the checkpoint's own folder.
_FOLDER = re.compile(r"(checkpoint-[0-9]+/[0-9]+\.[0-9a-f]+)?")
# Of any file system's names, in bytes.
_LONGEST_NAME = 255
# Number of folders in a name, and the file.
_MOST_PARTS = 8
# Numbers pass through pages and messages of 64 bits.
_TOO_MANY = 2**63

# What every checkpoint of a format version contains: for each entry, one file whose name begins with one of these.
_REQUIRED = {
    FORMAT_VERSION: (("model.safetensors", "adapter_model.safetensors"), ("optimizer.pt",), ("rng_state",)),
    SHARDED_FORMAT_VERSION: ((INDEX_NAME,), ("rng_state",)),
}


def missing_member(names: Iterable[str]) -> str | None:
    """Return the first required kind of file that is not among these names; None if all are present."""
    names = list(names)
    for kinds in _REQUIRED[_version_of(names)]:
        if not any(name.startswith(kinds) for name in names):
            return kinds[0]
    return None


def _version_of(names: Iterable[str]) -> int:
    return SHARDED_FORMAT_VERSION if INDEX_NAME in names else FORMAT_VERSION


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint: its name inside the directory, size in bytes, and digest (`algorithm:hex`).

    A name may contain folders, separated by `/`.
    """

    name: str
    size: int
    digest: str


@dataclass(frozen=True)
class SnapshotInfo:
    """Where in a run a state was taken.

    Attributes:
        run_id: The run.
        attempt: The attempt (lifetime of the process group) that computed it.
        step: Global optimizer steps finished, the only clock that orders states.
        world_size: Number of ranks that wrote it.
        samples_consumed: The data cursor, in samples drawn by all ranks since the start of the run.
        metrics: Measurements of this step by name, from which the best checkpoint is found.
        not_finite: Names of tensors that hold NaN or infinity, where the state is kept for a post-mortem all the same;
            nothing resumes from it.
    """

    run_id: str
    attempt: int
    step: int
    world_size: int
    samples_consumed: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    not_finite: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint; see `SnapshotInfo` for the fields that are not listed here.

    Attributes:
        created_at: Seconds since the epoch; for people, never for ordering.
        files: Every file but the manifest itself.
        folder: Folder of the files, below the location; empty if it is the manifest's own.
    """

    run_id: str
    attempt: int
    step: int
    world_size: int
    samples_consumed: int
    created_at: float
    files: tuple[FileEntry, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    folder: str = ""
    not_finite: tuple[str, ...] = ()

    @property
    def info(self) -> SnapshotInfo:
        """Where in its run the state was taken."""
        return SnapshotInfo(**{field.name: getattr(self, field.name) for field in fields(SnapshotInfo)})

    @property
    def identity(self) -> str:
        """What this state and its copies have in common, and no other has: 32 hexadecimal digits of a digest."""
        body = {"info": asdict(self.info), "files": [asdict(file) for file in self.files]}
        return _self_digest(body).rpartition(":")[2]

    @property
    def total_bytes(self) -> int:
        """Size of all files."""
        return sum(file.size for file in self.files)

    @property
    def is_sharded(self) -> bool:
        """Whether model and optimizer are spread over shards."""
        return any(file.name == INDEX_NAME for file in self.files)

    def to_json(self) -> bytes:
        """Return the manifest as JSON, with its digest."""
        body: dict[str, Any] = {"format_version": _version_of([file.name for file in self.files]), **asdict(self)}
        body["files"] = [asdict(file) for file in self.files]
        if not self.not_finite:
            # As those of all releases.
            del body["not_finite"]
        return json.dumps({**body, "manifest_digest": _self_digest(body)}, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Manifest:
        """Parse and check what `to_json` returned; `where` names the checkpoint in errors.

        Raises:
            InvalidCheckpoint: It is not JSON, was altered, has another format version, or lacks or mistypes a field.
        """
        try:
            document = json.loads(data)
            if not isinstance(document, dict):
                raise ValueError("it is not an object")
            claimed = document.pop("manifest_digest", None)
            # What can be parsed may be nested too deeply to be serialized.
            actual = _self_digest(document)
        except (ValueError, RecursionError) as error:
            raise InvalidCheckpoint(where, f"{MANIFEST_NAME} is not valid JSON ({error})") from None
        version = document.get("format_version")
        if version not in (FORMAT_VERSION, SHARDED_FORMAT_VERSION) or isinstance(version, bool):
            raise InvalidCheckpoint(
                where,
                f"{MANIFEST_NAME} has format version {reprlib.repr(version)}; this release reads {FORMAT_VERSION} and "
                f"{SHARDED_FORMAT_VERSION}",
            )
        if claimed != actual:
            raise InvalidCheckpoint(where, f"{MANIFEST_NAME} was altered: its own digest is {actual}")
        try:
            return cls(
                run_id=_text(document, "run_id"),
                attempt=_count(document, "attempt"),
                step=_count(document, "step"),
                world_size=_count(document, "world_size"),
                samples_consumed=_count(document, "samples_consumed"),
                created_at=_finite("created_at", document["created_at"]),
                files=_file_entries(_typed(document, "files", list)),
                metrics=_metrics(document.get("metrics", {})),
                folder=_folder(document.get("folder", "")),
                not_finite=_names(document.get("not_finite", [])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidCheckpoint(where, f"{MANIFEST_NAME} lacks or mistypes a field ({error})") from None


def _self_digest(body: Mapping[str, Any]) -> str:
    return digest_buffer(json.dumps(body, sort_keys=True, separators=(",", ":")).encode(), PLAIN)


def _typed(document: Mapping[str, Any], key: str, kind: type) -> Any:
    value = document[key]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{key}={reprlib.repr(value)} is not {kind.__name__}")
    return value


def _text(document: Mapping[str, Any], key: str) -> str:
    value: str = _typed(document, key, str)
    # Half of a surrogate pair is valid JSON, but cannot be printed or name a file.
    value.encode()
    return value


def _count(document: Mapping[str, Any], key: str) -> int:
    value: int = _typed(document, key, int)
    if not 0 <= value < _TOO_MANY:
        raise ValueError(f"{key}={reprlib.repr(value)} is negative or too large")
    return value


def _finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={reprlib.repr(value)} is not a number")
    # NaN compares as neither smaller nor larger, and so fails this test too.
    if not abs(value) <= sys.float_info.max:
        raise ValueError(f"{name}={reprlib.repr(value)} is not finite")
    return float(value)


def _metrics(value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        raise TypeError(f"metrics={reprlib.repr(value)} is not an object")
    "".join(value).encode()
    return {name: _finite(reprlib.repr(name), number) for name, number in value.items()}


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"not_finite={reprlib.repr(value)} is not a list of names")
    "".join(value).encode()
    return tuple(value)


def _folder(value: Any) -> str:
    if not isinstance(value, str) or not _FOLDER.fullmatch(value):
        raise ValueError(f"folder {reprlib.repr(value)} is not allowed")
    return value


def _file_entries(entries: list[Any]) -> tuple[FileEntry, ...]:
    files = tuple(_file_entry(entry) for entry in entries)
    twice = [name for name, count in Counter(file.name for file in files).items() if count > 1]
    if twice:
        raise ValueError(f"file name {reprlib.repr(twice[0])} is there more than once")
    return files


def _file_entry(entry: Any) -> FileEntry:
    if not isinstance(entry, dict):
        raise TypeError(f"file entry {reprlib.repr(entry)} is not an object")
    name = _text(entry, "name")
    parts = name.split("/")
    if any(len(part.encode()) > _LONGEST_NAME for part in parts) or len(parts) > _MOST_PARTS:
        raise ValueError(f"file name {reprlib.repr(name)} is too long")
    # A name must be that of a plain file inside the checkpoint: nothing read from it may point elsewhere.
    if "\\" in name or "\0" in name or name == MANIFEST_NAME or not {"", ".", ".."}.isdisjoint(parts):
        raise ValueError(f"file name {reprlib.repr(name)} is not allowed")
    digest = _text(entry, "digest")
    algorithm_of(digest)
    return FileEntry(name, _count(entry, "size"), digest)
