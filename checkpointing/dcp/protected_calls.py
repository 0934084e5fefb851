"""Stands between `torch.distributed.checkpoint` and its writers and readers."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from checkpointing.agent.events import CheckpointQuarantined, CommitFailedEvent, Committed, Event, Resumed
from checkpointing.dcp.committing_writer import CommittingWriter, can_commit
from checkpointing.dcp.folders import CheckpointFolder, open_folder
from checkpointing.dcp.seam import DCP
from checkpointing.dcp.staging import overlap_copies
from checkpointing.dcp.verified_files import can_verify, verified
from checkpointing.errors import CheckpointError, ForeignCheckpoint, InvalidCheckpoint
from checkpointing.host.environment import rank_settings

_MARK = "_commits"


def protect(report: Callable[[Event], None] = lambda event: None) -> None:
    """Commit and verify every checkpoint of `torch.distributed.checkpoint` from now on; again, it changes nothing.

    That concerns torch's writers and readers of files, those on fsspec too, and classes derived from them that do not
    replace what they write. Others, such as the exports to Hugging Face's format, are left as they are.

    Args:
        report: Called on the rank that coordinates with what was committed, loaded or quarantined.

    Raises:
        CheckpointError: This version of torch has other private names than those that were tried.
    """
    if hasattr(state_dict_saver._save_state_dict, _MARK):
        return
    DCP.check()
    dcp = _Protected(report, state_dict_saver._save_state_dict, state_dict_loader._load_state_dict)
    for module, name, call in (
        (state_dict_saver, "_save_state_dict", dcp.save),
        (state_dict_loader, "_load_state_dict", dcp.load),
    ):
        stand_in = functools.partial(call)
        setattr(stand_in, _MARK, True)
        setattr(module, name, stand_in)
    overlap_copies()


class _Protected:
    """The calls that saves and loads go through.

    Args:
        report: See `protect`.
        save: Torch's `_save_state_dict`.
        load: Torch's `_load_state_dict`.
    """

    def __init__(self, report: Callable[[Event], None], save: Callable[..., Any], load: Callable[..., Any]) -> None:
        self._report, self._save, self._load = report, save, load
        self._said: set[str] = set()

    def save(self, state_dict: Any, storage_writer: Any, *args: Any, **kwargs: Any) -> Any:
        """Save as torch does, and commit."""
        if not can_commit(storage_writer):
            self._say(f"saves by {type(storage_writer).__name__} are its own: they are not committed, nor verified")
            return self._save(state_dict, storage_writer, *args, **kwargs)
        group = _Group.of(self._save, state_dict, storage_writer, *args, **kwargs)
        if not group.has_collectives:
            self._say("with use_collectives=False no rank knows when all have saved: saves are not committed")
            return self._save(state_dict, storage_writer, *args, **kwargs)
        writer = CommittingWriter(storage_writer, rank_settings(), group.size)
        step, tier = writer.folder.step, writer.folder.tier
        try:
            with writer.active():
                metadata = self._save(state_dict, writer, *args, **kwargs)
        except (Exception, CheckpointException) as error:
            # A program that saves in the background may ask for the outcome late, or never.
            reason = _cause(error)
            if group.coordinates:
                self._report(CommitFailedEvent(step=step, tier=tier, error=f"{type(reason).__name__}: {reason}"))
            if isinstance(reason, CheckpointError):
                raise reason from None
            raise
        if writer.manifest is not None:
            nbytes, seconds = writer.manifest.total_bytes, round(writer.seconds, 4)
            self._report(Committed(step=step, tier=tier, nbytes=nbytes, duration_s=seconds))
        return metadata

    def load(self, state_dict: Any, storage_reader: Any, *args: Any, **kwargs: Any) -> None:
        """Load as torch does, with every byte compared."""
        if not can_verify(storage_reader):
            self._say(f"loads by {type(storage_reader).__name__} are its own: they are not verified")
            self._load(state_dict, storage_reader, *args, **kwargs)
            return
        folder = open_folder(storage_reader.path)
        group = _Group.of(self._load, state_dict, storage_reader, *args, **kwargs)
        settings = rank_settings()
        attempt = settings.attempt if group.coordinates else 0
        try:
            published = folder.published()
            if attempt:
                folder.begin(attempt, settings.lineage, saves=False)
            with verified(storage_reader, published):
                self._load(state_dict, storage_reader, *args, **kwargs)
        except ForeignCheckpoint:
            self._say(f"{folder.where} has no manifest: it is loaded as it is, not verified")
            self._load(state_dict, storage_reader, *args, **kwargs)
            return
        except (CheckpointError, CheckpointException) as failed:
            found = _cause(failed)
            if isinstance(found, InvalidCheckpoint):
                # Every rank has found the same.
                moves = attempt > 0 and folder.belongs_to(settings.lineage)
                raise self._refused(folder, found, moves=moves) from None
            if isinstance(found, CheckpointError):
                raise found from None
            raise
        if group.coordinates:
            self._report(Resumed(step=folder.step, source=folder.tier))

    def _refused(self, folder: CheckpointFolder, error: InvalidCheckpoint, *, moves: bool) -> DamagedCheckpoint:
        """Return what to raise, once the rank that coordinates has set it aside: a restart finds another one."""
        if not moves:
            return DamagedCheckpoint(error.where, f"{error.reason}; remove it, or start from another one")
        aside = folder.quarantine()
        self._report(CheckpointQuarantined(step=folder.step, reason=error.reason, kept_as=aside))
        return DamagedCheckpoint(error.where, f"{error.reason}; it is kept as {aside}, and nothing starts from it")

    def _say(self, text: str) -> None:
        if text not in self._said and (not dist.is_initialized() or dist.get_rank() == 0):
            print(f"checkpointing: {text}", file=sys.stderr, flush=True)
        self._said.add(text)


class _Group(NamedTuple):
    """The ranks that save or load together.

    Attributes:
        size: Their number.
        coordinates: Whether this rank commits.
        has_collectives: Whether they talk to each other.
    """

    size: int
    coordinates: bool
    has_collectives: bool

    @classmethod
    def of(cls, call: Callable[..., Any], *args: Any, **kwargs: Any) -> _Group:
        """Return those of a call of torch's."""
        bound = inspect.signature(call).bind(*args, **kwargs)
        bound.apply_defaults()
        asked = bound.arguments
        has_collectives = asked.get("use_collectives", True)
        if asked["no_dist"]:
            return cls(1, coordinates=True, has_collectives=has_collectives)
        ranks = asked["process_group"]
        is_first = dist.get_rank(ranks) == asked["coordinator_rank"]
        return cls(dist.get_world_size(ranks), is_first, has_collectives)


def _cause(error: BaseException) -> BaseException:
    """Return the error of the first rank that failed, one of ours before others, where torch has collected them."""
    if not isinstance(error, CheckpointException):
        return error
    found = [one for one, _ in error.failures.values()]
    return next((one for one in found if isinstance(one, CheckpointError)), next(iter(found), error))


class DamagedCheckpoint(InvalidCheckpoint):
    """A checkpoint that a program wanted to load is not what was saved; after a restart it finds the one before."""
