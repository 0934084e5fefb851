"""The commit protocol on a disk (`checkpointing/storage/local_transaction.py`), and what a power cut may leave there.

A killed process leaves everything that it has done. A power cut leaves what was fsync'ed, and of the rest any part:
each name that was given, moved or removed in a directory since that was fsync'ed, by itself, in any combination (a
rename is one change); and of each file that was not fsync'ed all of its bytes, or not. That is what POSIX allows, and
more than most file systems do.

Besides, the memory that a snapshot is written from may change at any moment (`flips`), and the disk may say that it has
written a file and hold other bytes (`lies`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from chaos.commit_model import CommitModel, Fault, Fence, Judged, Life, Op, Script, Situation

MANIFEST = "manifest.json"
# A file in a checkpoint's directory: how much of it is durable, and what a power cut may make of that.
ABSENT, TORN, WHOLE = "absent", "torn", "whole"
_FATES = {
    "written": (ABSENT, TORN, WHOLE),
    "synced": (ABSENT, WHOLE),
    "named": (TORN, WHOLE),
    WHOLE: (WHOLE,),
    TORN: (TORN,),
    "unlinked": (ABSENT, WHOLE),
    "unlinked unsynced": (ABSENT, TORN, WHOLE),
    "unlinked torn": (ABSENT, TORN),
}
_FSYNCED = {"written": "synced", "named": WHOLE}
_FOLDER_FSYNCED = {"written": "named", "synced": WHOLE}
_UNLINKED = {"synced": "unlinked", WHOLE: "unlinked", TORN: "unlinked torn"}
_READABLE = {"written", "synced", "named", WHOLE}

# A file: its state, and the attempt that wrote it. A directory's inode: step, and the attempt that made it.
File = tuple[str, int]
Inode = Any


class Disk(NamedTuple):
    """Everything that is on the disk, and the memory of those that write.

    Attributes:
        durable: names in the root.
        pending: changes of them since its last fsync.
        directories: their contents.
        unsynced: fences that were not fsync'ed.
        flips: how often the memory of a writer may yet change.
        spoilt: attempts whose snapshot in memory has changed.
        lies: how many files may yet hold other bytes than the disk says.
        lied: steps of which it holds other bytes: nobody can have them back.
    """

    durable: tuple[tuple[str, Inode], ...]
    pending: tuple[tuple[tuple[str, Inode | None], ...], ...] = ()
    directories: tuple[tuple[Inode, tuple[tuple[str, File], ...]], ...] = ()
    unsynced: frozenset[Inode] = frozenset()
    flips: int = 0
    spoilt: frozenset[int] = frozenset()
    lies: int = 0
    lied: frozenset[int] = frozenset()


@dataclass(frozen=True)
class DiskRules:
    """The rules that the code follows; a mutation breaks one of them."""

    fsyncs_files: bool = True
    fsyncs_manifest: bool = True
    fsyncs_folder: bool = True
    fsyncs_parent: bool = True
    manifest_last: bool = True
    digests_compared: bool = True
    steps_with_their_sizes: bool = True
    writes_beside: bool = True
    fsyncs_before_rename: bool = True
    own_folder: bool = True
    looks_before: bool = True
    looks_after: bool = True
    looks_before_quarantine: bool = True
    fence_excludes: bool = True
    fsyncs_fence: bool = True
    fence_opened_first: bool = True
    sweeps_only_older: bool = True
    sweeps: bool = True
    prunes_after_commit: bool = True
    prune_renames: bool = True
    prune_fsyncs: bool = True
    sweep_fsyncs: bool = True
    prune_manifest_first: bool = True
    keeps_newest: bool = True
    compares_memory: bool = True
    reads_back: bool = True


CODED = DiskRules()


@functools.lru_cache(maxsize=1 << 18)
def _names(durable: tuple[tuple[str, Inode], ...], pending: tuple[Any, ...]) -> dict[str, Inode]:
    names = dict(durable)
    for change in pending:
        for name, inode in change:
            if inode is None:
                names.pop(name, None)
            else:
                names[name] = inode
    return names


class DiskScripts:
    """What a writer does, call by call."""

    def __init__(self, rules: DiskRules, files: Sequence[str], *, power_cuts: bool, any_order: bool) -> None:
        """Without power cuts nothing that an fsync does can be seen."""
        self.rules, self.files, self._fsyncs_idle, self._any_order = rules, files, not power_cuts, any_order

    def fsync(self, path: str, inode: Inode = None, points: tuple[str, ...] = ()) -> Script:
        yield Op("fsync", path, inode, points, idle=self._fsyncs_idle)

    # -- an attempt begins ---------------------------------------------------------------------------------------

    def read_fence(self) -> Script:
        return (yield Op("read", ".fence.json")) or Fence()

    def begin(self, attempt: int) -> Script:
        fence = yield from self.read_fence()
        if fence.attempt >= attempt:
            return False
        if self.rules.fence_opened_first:
            opened = Fence(attempt, fence.accepted, fence.oldest)
            yield from self.replace_fence(opened, "fence.opened")
            yield Op("then", value="opened")
        counting = yield from self.counting()
        yield Op("then", value=tuple(sorted(counting)))
        oldest = attempt if self.rules.fence_excludes else 0
        yield from self.replace_fence(Fence(attempt, tuple(sorted(counting)), oldest), "fence.published")
        return True

    def counting(self) -> Script:
        fence = yield from self.read_fence()
        counting = set(fence.accepted)
        steps = _steps((yield Op("list", value=_is_checkpoint)))
        yield Op("list", "*", idle=True)
        for step in steps:
            attempt = yield Op("read", f"checkpoint-{step}/{MANIFEST}")
            if attempt is not None and fence.admits(step, attempt):
                counting.add((step, attempt))
        return counting

    def replace_fence(self, fence: Fence, point: str) -> Script:
        temporary = f".fence.json.{fence.attempt}.tmp"
        yield Op("create", temporary, fence)
        if self.rules.fsyncs_fence:
            yield from self.fsync(temporary, points=("fence.written",))
        points = () if self.rules.fsyncs_fence else (point,)
        yield Op("rename", temporary, ".fence.json", points, may_go_back=True)
        if self.rules.fsyncs_fence:
            yield from self.fsync(".", points=(point,))

    def sweep(self, attempt: int) -> Script:
        names = yield Op("list", value=_is_leftover)
        yield Op("sweeping")
        if names and self.rules.sweep_fsyncs:
            yield from self.fsync(".")
        for name in names:
            writer = _writer(name)
            if self.rules.sweeps_only_older and writer > attempt:
                continue
            if self.rules.sweeps:
                yield Op("sweeps", name, writer)
                if name.startswith(".fence"):
                    yield Op("unlink", name)
                else:
                    yield from self.remove_tree(name)
        yield Op("swept")

    # -- resume --------------------------------------------------------------------------------------------------

    def survey(self) -> Script:
        fence = yield from self.read_fence()
        sizes = {}
        for step in _steps((yield Op("list", value=_is_checkpoint))):
            sizes[step] = yield Op("list", f"checkpoint-{step}")
        steps = [*sizes] if self.rules.steps_with_their_sizes else _steps((yield Op("list", value=_is_checkpoint)))
        return fence, sizes, steps[::-1]

    def check(self, step: int, fence: Fence, present: Sequence[str]) -> Script:
        """The attempt of a checkpoint that counts, None of one that does not."""
        attempt = yield Op("read", f"checkpoint-{step}/{MANIFEST}")
        counts = attempt is not None and fence.admits(step, attempt) and set(self.files) <= set(present or ())
        return attempt if counts else None

    def choose(self) -> Script:
        """`auto`: the newest that counts, after its bytes were compared. A directory with the name of a checkpoint that
        is invalid is quarantined.
        """
        yield Op("read", ".fence.json", idle=True)
        fence, sizes, steps = yield from self.survey()
        for step in steps:
            attempt = yield from self.check(step, fence, sizes.get(step) or ())
            if attempt is not None:
                owners = []
                for name in self.files:
                    owners.append((yield Op("read", f"checkpoint-{step}/{name}")))
                whole = all(owner == attempt for owner in owners)
                if whole or not self.rules.digests_compared:
                    yield Op("chosen", value=(step, attempt, whole))
                    return step
            yield from self.quarantine(step)
        return 0

    def quarantine(self, step: int, label: str = "invalid") -> Script:
        name, number = f"checkpoint-{step}.{label}", 0
        while (yield Op("exists", name + (f"-{number}" if number else ""))):
            number += 1
        name += f"-{number}" if number else ""
        yield Op("rename", f"checkpoint-{step}", name, may_go_back=True)
        yield from self.fsync(".")

    def roll_back(self, step: int) -> Script:
        """`--resume STEP`, before the attempt begins."""
        steps = _steps((yield Op("list", value=_is_checkpoint)))
        yield Op("rolled back", value=step)
        for newer in steps:
            if newer > step:
                yield from self.quarantine(newer, "superseded")

    # -- one save ------------------------------------------------------------------------------------------------

    def save(self, step: int, attempt: int) -> Script:
        rules, target = self.rules, f"checkpoint-{step}"
        temporary = f".checkpoint-{step}.{attempt if rules.own_folder else 0}.tmp"
        folder = temporary if rules.writes_beside else target
        inode = (step, attempt)
        yield Op("capture", value=attempt)
        yield from self.remove_tree(folder)
        if not (yield Op("mkdir", folder, inode, points=("local.begun",))):
            return "failed"
        first = rules.fsyncs_before_rename
        written = [(name, "local.write", "local.written", rules.fsyncs_files) for name in self.files]
        manifest = (MANIFEST, "", "local.manifest", rules.fsyncs_manifest)
        for name, write, done, fsyncs in [*written, manifest] if rules.manifest_last else [manifest, *written]:
            if name == MANIFEST and rules.compares_memory and not (yield Op("compare", value=attempt)):
                return (yield from self.abort(folder, "damaged"))
            points = tuple(filter(None, (write,) if fsyncs and first else (write, done)))
            if not (yield Op("create", f"{folder}/{name}", attempt, points)):
                return (yield from self.abort(folder, "failed"))
            if fsyncs and first:
                yield from self.fsync(f"{folder}/{name}", inode, points=(done,))
        if rules.fsyncs_folder and first and not (yield Op("fsync", folder, points=("local.synced",))):
            return (yield from self.abort(folder, "failed"))
        if rules.looks_before and not (yield from self.look(step, attempt)):
            return (yield from self.abort(folder, "fenced"))
        if rules.writes_beside:
            if (yield Op("exists", target)) and not (yield from self.make_way(step, attempt)):
                return (yield from self.abort(folder, "fenced"))
            if (yield Op("exists", target)):
                # Whether an earlier try of this attempt has published it; the model does not try twice.
                yield from self.check(step, (yield from self.read_fence()), (yield Op("list", target)) or ())
                return (yield from self.abort(folder, "conflict"))
            if not (yield Op("rename", folder, target, ("local.renamed",) if rules.fsyncs_parent else ())):
                return (yield from self.abort(folder, "failed"))
        if not first:
            for name in (*self.files, MANIFEST):
                yield from self.fsync(f"{target}/{name}", inode)
            yield Op("fsync", target)
        if rules.fsyncs_parent:
            yield from self.fsync(".", points=("local.committed",))
        if rules.looks_after and not (yield from self.look(step, attempt)):
            return (yield from self.abort(folder, "fenced"))
        yield Op("acknowledged", value=step)
        return (yield from self.abort(folder, "committed"))

    def look(self, step: int, attempt: int) -> Script:
        return (yield Op("look", ".fence.json", (step, attempt)))

    def make_way(self, step: int, writer: int) -> Script:
        fence = yield from self.read_fence()
        present = yield Op("list", f"checkpoint-{step}")
        attempt = yield Op("read", f"checkpoint-{step}/{MANIFEST}")
        is_stale = attempt is not None and not fence.admits(step, attempt)
        if attempt is not None and not is_stale and set(self.files) <= set(present or ()):
            return True
        is_whole = False
        if not is_stale:
            # Read once more, past the page cache.
            yield from self.drop_cached(step)
            fence = yield from self.read_fence()
            present = yield Op("list", f"checkpoint-{step}")
            is_whole = (yield from self.check(step, fence, present or ())) is not None
        if self.rules.looks_before_quarantine and not (yield from self.look(step, writer)):
            return False
        if not is_whole:
            yield from self.quarantine(step)
        return True

    def abort(self, folder: str, outcome: str) -> Script:
        yield from self.remove_tree(folder)
        return outcome

    def remove_tree(self, name: str) -> Script:
        """shutil.rmtree: of an opened directory, whatever becomes of its name; in any order."""
        found = yield Op("open", name)
        if found is None:
            return
        inode, left = found
        yield from self.unlink_all(inode, left)
        yield Op("rmdir", name, inode)

    def unlink_all(self, inode: Inode, names: Iterable[str]) -> Script:
        left = tuple(names)
        while left:
            gone = yield Op("unlink one of", value=(inode, left if self._any_order else left[:1]))
            left = tuple(name for name in left if name != gone)

    # -- prune ---------------------------------------------------------------------------------------------------

    def prune(self, proven: int = 0) -> Script:
        """With `keep_last=1`; return the newest step that was read back, of those that this life has."""
        fence, sizes, steps = yield from self.survey()
        committed = []
        for step in steps:
            if (yield from self.check(step, fence, sizes.get(step) or ())) is not None:
                committed.append(step)
        doomed = sorted(committed)[:-1] if self.rules.keeps_newest else sorted(committed)
        newest = max(committed, default=0)
        if doomed:
            # What a user keeps; nothing, here.
            yield Op("list", ".records", idle=True)
        if doomed and self.rules.reads_back and proven != newest:
            if not (yield from self.read_back(newest)):
                return proven
            proven = newest
        for step in doomed:
            # Once more: reading back takes long.
            yield Op("list", ".records", idle=True)
            if not (yield from self.remove(step)):
                break
        return proven

    def read_back(self, step: int) -> Script:
        """Past the page cache."""
        folder = f"checkpoint-{step}"
        yield from self.drop_cached(step)
        fence = yield from self.read_fence()
        attempt = yield from self.check(step, fence, (yield Op("list", folder)) or ())
        if attempt is None:
            return False
        for name in self.files:
            if (yield Op("read", f"{folder}/{name}")) != attempt:
                return False
        return True

    def drop_cached(self, step: int) -> Script:
        """Each file is opened for it."""
        folder = f"checkpoint-{step}"
        for _ in (yield Op("list", folder)) or ():
            yield Op("read", f"{folder}/*", idle=True)

    def remove(self, step: int) -> Script:
        rules = self.rules
        doomed = f".checkpoint-{step}.removing" if rules.prune_renames else f"checkpoint-{step}"
        if rules.prune_renames:
            if (yield Op("exists", doomed)):
                if rules.prune_fsyncs:
                    yield from self.fsync(".")
                yield from self.remove_tree(doomed)
            if not (
                yield Op("rename", f"checkpoint-{step}", doomed, () if rules.prune_fsyncs else ("local.removing",))
            ):
                return False
            if rules.prune_fsyncs:
                yield from self.fsync(".", points=("local.removing",))
        if rules.prune_manifest_first:
            yield Op("unlink", f"{doomed}/{MANIFEST}", points=("local.unlisted",))
        yield from self.remove_tree(doomed)
        return True

    # -- lives ---------------------------------------------------------------------------------------------------

    def live(self, attempt: int, saves: int, since: str = "begin", roll_back_to: int = 0) -> Script:
        """Everything that an attempt does; `since` selects what it has not done yet."""
        step = 1
        if since == "prune":
            yield from self.prune()
            return
        if roll_back_to:
            yield from self.roll_back(roll_back_to)
        if since == "begin":
            if not (yield from self.begin(attempt)):
                return
            yield Op("then", value="sweep")
        if since in ("begin", "sweep"):
            yield from self.sweep(attempt)
            yield Op("then", value="choose")
        if since != "train":
            step = yield from self.choose()
            yield Op("then", value=("train", step))
        yield from self.train(attempt, step, saves)

    def train(self, attempt: int, step: int, saves: int) -> Script:
        proven = 0
        for number in range(saves):
            if not self.rules.prunes_after_commit:
                yield from self.remove(step + number)
            outcome = yield from self.save(step + number + 1, attempt)
            if outcome == "fenced":
                return
            yield Op("then", value=("saved", step, number, outcome, proven))
            if outcome == "committed" and self.rules.prunes_after_commit:
                proven = yield from self.prune(proven)
                yield Op("then", value=("pruned", step, number, proven))


class DiskModel(CommitModel):
    """Return the initial world: checkpoint 1 of attempt 1 exists."""

    def __init__(
        self,
        rules: DiskRules = CODED,
        *,
        files: Sequence[str] = ("model",),
        saves: Sequence[int] = (1, 1, 0),
        crashes: int = 1,
        power_cuts: bool = True,
        any_order: bool = False,
        first_mortal: int = 2,
        first: str = "train",
        roll_back_to: int = 0,
        damaged_step: int = 0,
        flips: int = 0,
        lies: int = 0,
    ) -> None:
        """
        Args:
            saves: how many each life tries.
            first: what the first life is about to do: `begin`, `sweep`, `resume`, `train`; or `prune`, of 1 by 2.
            roll_back_to: the second life is one with `--resume STEP`.
            damaged_step: is there, too, its bytes altered; a life that resumes finds that.
            flips: how often the memory of a writer changes.
            lies: how many files the disk has other bytes of than it says.
        """
        scripts = DiskScripts(rules, files, power_cuts=power_cuts, any_order=any_order)
        writer = 0 if first == "begin" else 1
        self.lives = tuple(
            Life(
                functools.partial(
                    scripts.live, number, saves_of, first if number == 1 else "begin", roll_back_to * (number == 2)
                )
            )
            for number, saves_of in enumerate(saves, 1)
        )
        self.first_mortal = first_mortal
        self._files, self._power_cuts = (*files, MANIFEST), power_cuts
        states = {1: WHOLE} | ({damaged_step: TORN} if damaged_step else {}) | ({2: WHOLE} if first == "prune" else {})
        names: dict[str, Inode] = {f"checkpoint-{step}": (step, writer) for step in states}
        if writer:
            names[".fence.json"] = Fence(1, (), 1)
        directories = tuple(
            (
                (step, writer),
                tuple(sorted({**dict.fromkeys(files, (state, writer)), MANIFEST: (WHOLE, writer)}.items())),
            )
            for step, state in states.items()
        )
        disk = Disk(tuple(sorted(names.items())), (), directories, flips=flips, lies=lies)
        newest = 2 if first == "prune" else 1
        super().__init__(disk, crashes, Judged(newest, (writer, newest, writer)))

    # -- what system calls do ------------------------------------------------------------------------------------

    def apply(self, world: Disk, op: Op) -> Iterable[tuple[Any, Disk]]:
        names = _names(world.durable, world.pending)
        match op.kind:
            case "read":
                return [(self._read(world, names, op.path), world)]
            case "look":
                return [((_fence(names) or Fence()).lets_publish(*op.value), world)]
            case "list" if not op.path:
                return [(tuple(sorted(name for name in names if op.value(name))), world)]
            case "list":
                return [(_present(world, names.get(op.path)), world)]
            case "open":
                inode = names.get(op.path)
                return [(None if inode is None else (inode, _present(world, inode)), world)]
            case "exists":
                return [(op.path in names, world)]
            case "mkdir":
                if op.path in names:
                    return [(False, world)]
                return [(True, _with_files(_changed(world, (op.path, op.value)), op.value, {}))]
            case "capture":
                return [(None, world._replace(spoilt=world.spoilt - {op.value}))]
            case "compare":
                return [(op.value not in world.spoilt, world)]
            case "create":
                return self._create(world, names, op)
            case "fsync":
                done = self._fsync(world, names, op)
                # A sweep may have taken the directory before it was opened, or after.
                return [done] if done[0] else [done, (True, world)]
            case "rename":
                return [self._rename(world, names, op)]
            case "unlink":
                folder, _, name = op.path.rpartition("/")
                if folder:
                    return [(None, _unlinked(world, names.get(folder), name))]
                return [(None, _changed(world, (name, None)) if name in names else world)]
            case "unlink one of":
                inode, left = op.value
                return [(name, _unlinked(world, inode, name)) for name in left]
            case "rmdir":
                gone = names.get(op.path) == op.value and not _present(world, op.value)
                return [(None, _changed(world, (op.path, None)) if gone else world)]
        raise ValueError(op)

    def _read(self, world: Disk, names: dict[str, Inode], path: str) -> Any:
        """A fence's content; the attempt that has written a file, None where it is torn or not there."""
        folder, _, name = path.rpartition("/")
        if not folder:
            return _fence(names)
        state, writer = _files(world, names.get(folder)).get(name, (ABSENT, 0))
        return writer if state in _READABLE else None

    def _create(self, world: Disk, names: dict[str, Inode], op: Op) -> list[tuple[bool, Disk]]:
        folder, _, name = op.path.rpartition("/")
        if not folder:
            world = _changed(world, (name, op.value))
            return [(True, world._replace(unsynced=world.unsynced | {op.value}))]
        inode = names.get(folder)
        files = _files(world, inode)
        if inode is None or files.get(name, (ABSENT, 0))[0] in _READABLE:
            return [(False, world)]
        good = _with_files(world, inode, {**files, name: ("written", op.value)})
        bad = _with_files(world, inode, {**files, name: (TORN, op.value)})
        if name == MANIFEST:
            return [(True, good)]
        outcomes = [(True, bad if op.value in world.spoilt else good)]
        if world.lies:
            outcomes.append((True, bad._replace(lies=world.lies - 1, lied=world.lied | {inode[0]})))
        return outcomes

    def _fsync(self, world: Disk, names: dict[str, Inode], op: Op) -> tuple[bool, Disk]:
        folder, _, name = op.path.rpartition("/")
        if op.path == ".":
            return True, _settled(world._replace(durable=tuple(sorted(names.items())), pending=()))
        if folder:
            # By its descriptor, so that a rename does not matter.
            files = _files(world, op.value)
            if name in files:
                state, writer = files[name]
                files = {**files, name: (_FSYNCED.get(state, state), writer)}
            return True, _with_files(world, op.value, files)
        if name.startswith(".fence"):
            return True, world._replace(unsynced=world.unsynced - {names.get(name)})
        if name not in names:
            return False, world
        files = {
            file: (_FOLDER_FSYNCED.get(state, state), writer)
            for file, (state, writer) in _files(world, names[name]).items()
            if not state.startswith("unlinked")
        }
        return True, _with_files(world, names[name], files)

    def _rename(self, world: Disk, names: dict[str, Inode], op: Op) -> tuple[bool, Disk]:
        source, target = op.path, op.value
        if source not in names or (not target.startswith(".fence") and target in names):
            return False, world
        return True, _changed(world, (source, None), (target, names[source]))

    # -- what is left of it --------------------------------------------------------------------------------------

    def stirs(self, world: Disk) -> Iterator[tuple[str, Disk]]:
        for attempt in range(1, len(self.lives) + 1) if world.flips else ():
            after = world._replace(flips=world.flips - 1, spoilt=world.spoilt | {attempt})
            yield f"the memory of {attempt} changes", after

    def _note(self, now: Situation, judged: Judged, index: int, op: Op, world: int, what: Any) -> Judged:
        # What the disk has lied about is nobody's to find; what was there before it is.
        if op.kind == "acknowledged" and op.value in self._worlds[world].lied:
            return judged
        return super()._note(now, judged, index, op, world, what)

    def crashes(self, world: Disk) -> Iterator[tuple[str, Disk]]:
        return iter(_power_cut(world) if self._power_cuts else ())

    def view(self, world: Disk) -> tuple[int, int]:
        return _view(world, self._files)

    def leftovers(self, world: Disk, attempt: int) -> list[str]:
        names = _names(world.durable, world.pending)
        left, newest = [name for name in names if _is_leftover(name) and _writer(name) <= attempt], self.view(world)[0]
        for name, inode in names.items():
            # A newer torn checkpoint was published half swept by a fenced writer; the next resume quarantines it.
            if _is_checkpoint(name) and inode[0] < newest:
                files = _files(world, inode)
                missing = [file for file in self._files if files.get(file, (ABSENT, 0))[0] not in (*_READABLE, TORN)]
                left += [f"{name} without {file}" for file in missing]
        return left


def _fence(names: dict[str, Inode]) -> Fence | None:
    found = names.get(".fence.json")
    if found == TORN:
        raise Fault("somebody reads the fence: the fence is torn")
    return found


def _is_checkpoint(name: str) -> bool:
    return name.startswith("checkpoint-") and name[11:].isdigit()


def _is_leftover(name: str) -> bool:
    return name.endswith((".tmp", ".removing"))


def _writer(name: str) -> int:
    """Return the attempt that a leftover belongs to; any attempt may remove what a pruner has renamed."""
    return int(name.split(".")[-2]) if name.endswith(".tmp") else 0


def _steps(names: Iterable[str]) -> list[int]:
    return sorted(int(name[11:]) for name in names if _is_checkpoint(name))


def _files(world: Disk, inode: Inode | None) -> dict[str, File]:
    for number, files in world.directories:
        if number == inode:
            return dict(files)
    return {}


def _present(world: Disk, inode: Inode | None) -> tuple[str, ...] | None:
    if inode is None:
        return None
    return tuple(name for name, (state, _) in _files(world, inode).items() if state in _READABLE or state == TORN)


def _with_files(world: Disk, inode: Inode, files: dict[str, File]) -> Disk:
    others = [item for item in world.directories if item[0] != inode]
    return world._replace(directories=tuple(sorted([*others, (inode, tuple(sorted(files.items())))])))


def _unlinked(world: Disk, inode: Inode | None, name: str) -> Disk:
    files = _files(world, inode)
    if inode is None or name not in files:
        return world
    state, writer = files[name]
    return _with_files(world, inode, {**files, name: (_UNLINKED.get(state, "unlinked unsynced"), writer)})


def _changed(world: Disk, *change: tuple[str, Inode | None]) -> Disk:
    return _settled(world._replace(pending=(*world.pending, change)))


def _settled(world: Disk) -> Disk:
    """Forget what cannot be reached any more."""
    known = {inode for _, inode in world.durable} | {inode for change in world.pending for _, inode in change}
    return world._replace(
        directories=tuple(item for item in world.directories if item[0] in known), unsynced=world.unsynced & known
    )


@functools.lru_cache(maxsize=1 << 16)
def _power_cut(world: Disk) -> list[tuple[str, Disk]]:
    found: dict[Disk, str] = {}
    for kept in itertools.product((True, False), repeat=len(world.pending)):
        changes = tuple(change for change, keeps in zip(world.pending, kept, strict=True) if keeps)
        names = _names(world.durable, changes)
        known = [(inode, files) for inode, files in world.directories if inode in names.values()]
        fates = [[_FATES[state] for _, (state, _) in files] for _, files in known]
        torn = [name for name, inode in names.items() if inode in world.unsynced]
        for are_torn in {False, bool(torn)}:
            root = {name: TORN if are_torn and name in torn else inode for name, inode in names.items()}
            for states in itertools.product(*(itertools.product(*one) for one in fates)):
                directories = tuple(
                    (
                        inode,
                        tuple(
                            (name, (fate, writer))
                            for (name, (_, writer)), fate in zip(files, fates_of, strict=True)
                            if fate != ABSENT
                        ),
                    )
                    for (inode, files), fates_of in zip(known, states, strict=True)
                )
                disk = world._replace(durable=tuple(sorted(root.items())), pending=(), directories=directories)
                disk = disk._replace(unsynced=frozenset(), spoilt=frozenset())
                found.setdefault(disk, f"power cut: {sum(kept)} of {len(kept)} changes of names kept")
    return [(what, disk) for disk, what in found.items()]


@functools.lru_cache(maxsize=1 << 18)
def _view(world: Disk, expected: tuple[str, ...]) -> tuple[int, int]:
    names = _names(world.durable, world.pending)
    fence = _fence(names) or Fence()
    for step in reversed(_steps(names)):
        files = _files(world, names[f"checkpoint-{step}"])
        state, writer = files.get(MANIFEST, (ABSENT, 0))
        if state not in _READABLE or not fence.admits(step, writer):
            continue
        if all(files.get(name, (ABSENT, 0))[0] in _READABLE and files[name][1] == writer for name in expected):
            return step, writer
    return 0, 0
