"""The commit protocol in object storage, as in `checkpointing/storage/object_storage.py`.

What was stored stays; only processes die. But an answer may get lost: then the call was carried out, or was not, or
will be at any time later, even after one that was tried again has been answered. A server may ignore `If-None-Match`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from chaos.commit_model import CommitModel, Fence, Judged, Life, Op, Script

# The folder of a checkpoint's files: step, and the attempt that writes there.
Folder = tuple[int, int]
STORED, REFUSED, NO_ANSWER = "stored", "refused", "no answer"


class Store(NamedTuple):
    """Everything that is stored, and what is in flight.

    Attributes:
        data: the folder and name of each object, and the attempt that wrote it.
        manifests: for each step, the folder that its manifest names, and the attempt that wrote the manifest.
        asides: folders that the manifests of quarantined checkpoints name.
        uploads: uploads that were begun and not completed.
        late: manifests that were put without an answer and may yet arrive.
        answers_to_lose: the number of further answers that may be lost.
        flips: how often the memory of a writer may yet change.
        spoilt: attempts whose snapshot in memory has changed; what they upload has a negative number.
    """

    data: frozenset[tuple[Folder, str, int]]
    manifests: tuple[tuple[int, tuple[Folder, int]], ...]
    fences: tuple[tuple[int, Fence], ...]
    asides: frozenset[Folder] = frozenset()
    uploads: frozenset[tuple[Folder, str]] = frozenset()
    late: frozenset[tuple[int, tuple[Folder, int]]] = frozenset()
    answers_to_lose: int = 0
    flips: int = 0
    spoilt: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ObjectRules:
    """The rules that the code follows; a mutation breaks one of them."""

    manifest_last: bool = True
    puts_if_absent: bool = True
    own_folder: bool = True
    looks_before: bool = True
    looks_after: bool = True
    looks_before_quarantine: bool = True
    fence_excludes: bool = True
    fence_opened_first: bool = True
    reads_back: bool = True
    keeps_what_may_be_named: bool = True
    keeps_what_may_be_counted: bool = True
    sweeps: bool = True
    sweeps_only_older: bool = True
    sweep_spares_named: bool = True
    prune_manifest_first: bool = True
    prunes_after_commit: bool = True
    keeps_newest: bool = True
    compares_memory: bool = True


CODED = ObjectRules()


class ObjectScripts:
    """What a writer does, call by call."""

    def __init__(self, rules: ObjectRules, files: Sequence[str], *, honours: bool) -> None:
        self.rules, self.files, self.honours = rules, files, honours

    # -- an attempt begins ---------------------------------------------------------------------------------------

    def read_fence(self) -> Script:
        while True:
            newest = yield Op("newest", "fence/")
            if newest == 0:
                return Fence()
            fence = yield Op("get", f"fence/{newest}.json")
            if fence is not None:
                return fence

    def look(self, step: int, attempt: int) -> Script:
        while True:
            newest = yield Op("newest", "fence/")
            if newest == 0:
                return True
            answer = yield Op("look", f"fence/{newest}.json", (step, attempt))
            if answer is not None:
                return answer

    def begin(self, attempt: int) -> Script:
        rules = self.rules
        fence = yield from self.read_fence()
        if fence.attempt >= attempt:
            return False
        if rules.fence_opened_first:
            yield from self.put_fence(Fence(attempt, fence.accepted, fence.oldest), "put if absent")
            yield Op("at", "fence.opened", idle=True)
            yield Op("then", value="opened")
        counting = yield from self.counting()
        yield Op("then", value=tuple(sorted(counting)))
        oldest = attempt if rules.fence_excludes else 0
        yield from self.put_fence(Fence(attempt, tuple(sorted(counting)), oldest), "put")
        older = [number for number in (yield Op("list", "fence/")) if number < attempt]
        for number in older:
            yield Op("delete", f"fence/{number}.json")
        yield Op("at", "fence.published", idle=True)
        return True

    def put_fence(self, fence: Fence, how: str) -> Script:
        key = f"fence/{fence.attempt}.json"
        yield Op(how, key, fence, may_go_back=True)
        # No two lives begin the same attempt, so the fence is always this life's own.
        yield Op("get", key, idle=True)

    def counting(self) -> Script:
        fence = yield from self.read_fence()
        counting = set(fence.accepted)
        for step in (yield Op("list", "checkpoint-", "manifests")):
            named = yield Op("get", _manifest(step))
            if named and fence.admits(step, named[1]):
                counting.add((step, named[1]))
        return counting

    def sweep(self, attempt: int) -> Script:
        rules = self.rules
        manifests, asides, data = yield Op("list", "checkpoint-")
        yield Op("sweeping")
        named, unknown = set(asides), set()
        for step in manifests:
            found = yield Op("get", _manifest(step))
            if found is None:
                unknown.add(step)
            else:
                named.add(found[0])
        for folder, name in data:
            if rules.sweep_spares_named and (folder in named or folder[0] in unknown):
                continue
            if rules.sweeps_only_older and folder[1] > attempt:
                continue
            if rules.sweeps:
                yield Op("sweeps", _key(folder, name), folder[1])
                yield Op("delete", _key(folder, name), (folder, name))
        for folder, name in (yield Op("uploads")):
            if rules.sweeps_only_older and folder[1] > attempt:
                continue
            if rules.sweeps:
                yield Op("sweeps", _key(folder, name), folder[1])
                yield Op("end upload", _key(folder, name), (folder, name))
        yield Op("swept")

    # -- resume --------------------------------------------------------------------------------------------------

    def survey(self) -> Script:
        fence = yield from self.read_fence()
        manifests, _, data = yield Op("list", "checkpoint-")
        return fence, data, sorted(manifests, reverse=True)

    def check(self, step: int, fence: Fence, data: Sequence[tuple[Folder, str]]) -> Script:
        """Return the folder that the manifest names and its attempt, if the checkpoint counts."""
        named = yield Op("get", _manifest(step))
        whole = named and all((named[0], name) in data for name in self.files)
        return named if whole and fence.admits(step, named[1]) else None

    def choose(self) -> Script:
        yield Op("newest", "fence/", idle=True)
        yield Op("get", "fence/*", idle=True)
        fence, data, steps = yield from self.survey()
        for step in steps:
            named = yield from self.check(step, fence, data)
            if named:
                owners = []
                for name in self.files:
                    owners.append((yield Op("read", _key(named[0], name), (named[0], name))))
                if all(owner == named[1] for owner in owners):
                    yield Op("chosen", value=(step, named[1], True))
                    return step
            if not (yield from self.quarantine(step)):
                return None
        return 0

    def quarantine(self, step: int) -> Script:
        named = yield Op("get", _manifest(step))
        if named is None:
            return False
        yield Op("put", f"{_manifest(step)} aside", named[0], points=("aside.copied",))
        yield Op("delete", _manifest(step), may_go_back=True)
        return True

    def roll_back(self, step: int) -> Script:
        newer = [number for number in (yield Op("list", "checkpoint-", "manifests")) if number > step]
        yield Op("rolled back", value=step)
        for number in newer:
            yield from self.quarantine(number)

    # -- one save ------------------------------------------------------------------------------------------------

    def save(self, step: int, attempt: int) -> Script:
        rules = self.rules
        folder = (step, attempt if rules.own_folder else 0)
        yield Op("capture", value=attempt)
        if rules.manifest_last and not (yield from self.upload(folder, attempt)):
            return "failed"
        if rules.compares_memory and not (yield Op("compare", value=attempt)):
            return (yield from self.abort(folder, "damaged"))
        if rules.looks_before and not (yield from self.look(step, attempt)):
            return (yield from self.abort(folder, "fenced"))
        if rules.manifest_last:
            # Whether the store keeps what it has confirmed; a newer attempt may have swept it.
            _, _, data = yield Op("list", _key(folder, ""))
            if any((folder, name) not in data for name in self.files):
                seen = yield from self.look(step, attempt)
                return (yield from self.abort(folder, "failed" if seen else "fenced"))
        yield Op("at", "remote.publishing", idle=True)
        outcome = yield from self.publish(step, folder, attempt)
        if outcome == REFUSED:
            made = yield from self.make_way(step, attempt)
            if made is not True:
                return (yield from self.abort(folder, made))
            outcome = yield from self.publish(step, folder, attempt)
        if outcome == REFUSED:
            # Whether an earlier try of this attempt has published it; the model does not try twice.
            fence = yield from self.read_fence()
            _, _, data = yield Op("list", f"checkpoint-{step}/")
            yield from self.check(step, fence, data)
            return (yield from self.abort(folder, "conflict"))
        if outcome == NO_ANSWER:
            return "failed" if rules.keeps_what_may_be_named else (yield from self.abort(folder, "failed"))
        yield Op("at", "remote.published", idle=True)
        if not rules.manifest_last:
            yield from self.upload(folder, attempt)
        if rules.looks_after and not (yield from self.look(step, attempt)):
            fence = yield from self.read_fence()
            if rules.keeps_what_may_be_counted and fence.admits(step, attempt):
                return "fenced"
            return (yield from self.abort(folder, "fenced"))
        yield Op("at", "remote.committed", idle=True)
        yield Op("acknowledged", value=step)
        return "committed"

    def upload(self, folder: Folder, attempt: int) -> Script:
        for name in self.files:
            yield Op("part", _key(folder, name), (folder, name), points=("remote.part",))
            value = (folder, name, attempt)
            if not (yield Op("complete", _key(folder, name), value, points=("remote.uploaded",))):
                return (yield from self.abort(folder, False))
        return True

    def publish(self, step: int, folder: Folder, attempt: int) -> Script:
        """`stored` where it is there now, `refused` where another is, `no answer` where that is not known."""
        key, ours = _manifest(step), (folder, attempt)
        if not self.honours and (yield Op("get", key)) is not None:
            return REFUSED
        answer = yield Op("put if absent" if self.rules.puts_if_absent else "put", key, ours)
        if answer == NO_ANSWER:
            found = yield Op("get", key)
            if found is None:
                return NO_ANSWER
            answer = STORED if found == ours else REFUSED
        if self.rules.reads_back:
            found = yield Op("get", key)
            # One that was acknowledged, and is gone, a newer attempt has moved aside: the next look says so.
            if not (answer == STORED and found is None):
                answer = STORED if found == ours else REFUSED
        return answer

    def make_way(self, step: int, attempt: int) -> Script:
        fence = yield from self.read_fence()
        _, _, data = yield Op("list", f"checkpoint-{step}/")
        named = yield Op("get", _manifest(step))
        is_stale, is_whole = named and not fence.admits(step, named[1]), None
        if not is_stale:
            if named and all((named[0], name) in data for name in self.files):
                return True
            # Read once more: the way to it may have been at fault.
            fence = yield from self.read_fence()
            _, _, data = yield Op("list", f"checkpoint-{step}/")
            is_whole = yield from self.check(step, fence, data)
        if self.rules.looks_before_quarantine and not (yield from self.look(step, attempt)):
            return "fenced"
        if is_whole:
            return True
        return (yield from self.quarantine(step)) or "failed"

    def abort(self, folder: Folder, outcome: Any) -> Script:
        for name in self.files:
            yield Op("delete", _key(folder, name), (folder, name))
        return outcome

    # -- prune ---------------------------------------------------------------------------------------------------

    def prune(self) -> Script:
        """With `keep_last=1`."""
        fence, data, steps = yield from self.survey()
        committed = []
        for step in steps:
            if (yield from self.check(step, fence, data)):
                committed.append(step)
        doomed = sorted(committed)[:-1] if self.rules.keeps_newest else sorted(committed)
        if doomed:
            # What a user keeps; nothing, here.
            yield Op("list", "records/keep-", idle=True)
        for step in doomed:
            yield Op("list", "records/keep-", idle=True)
            yield from self.remove(step)

    def remove(self, step: int) -> Script:
        named = yield Op("get", _manifest(step))
        unlist = Op("delete", _manifest(step), points=("remote.unlisted",))
        if self.rules.prune_manifest_first:
            yield unlist
        if named:
            _, _, data = yield Op("list", f"checkpoint-{step}/")
            for folder, name in data:
                if folder == named[0]:
                    yield Op("delete", _key(folder, name), (folder, name))
        if not self.rules.prune_manifest_first:
            yield unlist

    # -- lives ---------------------------------------------------------------------------------------------------

    def live(self, attempt: int, saves: int, since: str = "begin", roll_back_to: int = 0) -> Script:
        """Everything that an attempt does; `since` selects what it has not done yet."""
        step = 1
        if since == "prune":
            return (yield from self.prune())
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
            if step is None:
                return
            yield Op("then", value=("train", step))
        yield from self.train(attempt, step, saves)

    def train(self, attempt: int, step: int, saves: int) -> Script:
        for number in range(saves):
            if not self.rules.prunes_after_commit:
                yield from self.remove(step + number)
            outcome = yield from self.save(step + number + 1, attempt)
            if outcome == "fenced":
                return
            yield Op("then", value=("saved", step, number, outcome))
            if outcome == "committed" and self.rules.prunes_after_commit:
                yield from self.prune()
                yield Op("then", value=("pruned", step, number))


class ObjectModel(CommitModel):
    """Return the initial world: checkpoint 1 of attempt 1 exists."""

    def __init__(
        self,
        rules: ObjectRules = CODED,
        *,
        honours: bool = True,
        files: Sequence[str] = ("model",),
        saves: Sequence[int] = (1, 1, 0),
        crashes: int = 1,
        answers_to_lose: int = 0,
        late: bool = True,
        first_mortal: int = 2,
        first: str = "train",
        roll_back_to: int = 0,
        damaged_step: int = 0,
        flips: int = 0,
    ) -> None:
        """
        Args:
            honours: the server decides about `If-None-Match`.
            saves: how many each life tries.
            late: a call without an answer may be carried out later.
            roll_back_to: the second life is one with `--resume STEP`.
            first: what the first life is about to do: `begin`, `sweep`, `resume`, `train`; or `prune`, of 1 by 2.
            damaged_step: is there, too, without its files; a life that resumes finds that.
            flips: how often the memory of a writer changes.
        """
        scripts = ObjectScripts(rules, files, honours=honours)
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
        self._files, self._honours, self._late = tuple(files), honours, late
        whole = (1, 2) if first == "prune" else (1,)
        data = frozenset(((step, writer), name, writer) for step in whole for name in files)
        steps = sorted({*whole, damaged_step} - {0})
        manifests = tuple((step, ((step, writer), writer)) for step in steps)
        fences = ((1, Fence(1, (), 1)),) if writer else ()
        store = Store(data, manifests, fences, answers_to_lose=answers_to_lose, flips=flips)
        super().__init__(store, crashes, Judged(whole[-1], (writer, whole[-1], writer)))

    # -- what the server does ------------------------------------------------------------------------------------

    def apply(self, world: Store, op: Op) -> Iterable[tuple[Any, Store]]:
        kind, path, value = op.kind, op.path, op.value
        match kind:
            case "newest":
                return [(max((number for number, _ in world.fences), default=0), world)]
            case "get" if path.startswith("fence/"):
                return [(_fences(world, path), world)]
            case "look":
                fence = _fences(world, path)
                return [(None if fence is None else fence.lets_publish(*value), world)]
            case "get":
                return [(dict(world.manifests).get(_step(path)), world)]
            case "read":
                return [(next((writer for *key, writer in world.data if tuple(key) == value), None), world)]
            case "list" if path == "fence/":
                return [(tuple(number for number, _ in world.fences), world)]
            case "list":
                return [(_listed(world, path, value), world)]
            case "uploads":
                return [(tuple(sorted(world.uploads)), world)]
            case "capture":
                return [(None, world._replace(spoilt=world.spoilt - {value}))]
            case "compare":
                return [(value not in world.spoilt, world)]
            case "part":
                return [(None, world._replace(uploads=world.uploads | {value}))]
            case "complete":
                upload = value[:2]
                if upload not in world.uploads:
                    return [(False, world)]
                others = frozenset(item for item in world.data if item[:2] != upload)
                stored = (*upload, -value[2]) if value[2] in world.spoilt else value
                done = world._replace(uploads=world.uploads - {upload}, data=others | {stored})
                return [(True, done)]
            case "end upload":
                return [(None, world._replace(uploads=world.uploads - {value}))]
            case "put" | "put if absent" if path.startswith("fence/"):
                fences = {**dict(world.fences), value.attempt: value}
                return [(None, world._replace(fences=tuple(sorted(fences.items()))))]
            case "put" if path.endswith(" aside"):
                return [(None, world._replace(asides=world.asides | {value}))]
            case "put" | "put if absent":
                return self._put(world, _step(path), value, if_absent=kind == "put if absent")
            case "delete" if path.startswith("fence/"):
                left = tuple(item for item in world.fences if f"fence/{item[0]}.json" != path)
                return [(None, world._replace(fences=left))]
            case "delete" if value is None:
                named = tuple(item for item in world.manifests if item[0] != _step(path))
                return [(None, world._replace(manifests=named))]
            case "delete":
                return [(None, world._replace(data=frozenset(item for item in world.data if item[:2] != value)))]
        raise ValueError(op)

    def _put(
        self, world: Store, step: int, named: tuple[Folder, int], *, if_absent: bool
    ) -> Iterator[tuple[str, Store]]:
        stored, after = self._carried_out(world, step, named, if_absent=if_absent)
        yield STORED if stored else REFUSED, after
        if after != world and if_absent and step in dict(world.manifests):
            # Some clients look before they put, if the server does not decide.
            yield REFUSED, world
        if not world.answers_to_lose:
            return
        world, after = (each._replace(answers_to_lose=each.answers_to_lose - 1) for each in (world, after))
        yield NO_ANSWER, after
        yield NO_ANSWER, world
        if stored and if_absent and self._honours:
            # The first try was carried out, so the second is refused.
            yield REFUSED, after
        if self._late:
            yield NO_ANSWER, world._replace(late=world.late | {(step, named)})
            # The first try is still in flight, the second was answered.
            yield STORED if stored else REFUSED, after._replace(late=after.late | {(step, named)})

    def _carried_out(
        self, world: Store, step: int, named: tuple[Folder, int], *, if_absent: bool = True
    ) -> tuple[bool, Store]:
        manifests = dict(world.manifests)
        if step in manifests and if_absent and self._honours:
            return False, world
        return True, world._replace(manifests=tuple(sorted({**manifests, step: named}.items())))

    def stirs(self, world: Store) -> Iterator[tuple[str, Store]]:
        for attempt in range(1, len(self.lives) + 1) if world.flips else ():
            after = world._replace(flips=world.flips - 1, spoilt=world.spoilt | {attempt})
            yield f"the memory of {attempt} changes", after
        for step, named in world.late:
            _, after = self._carried_out(world, step, named)
            what = f"the manifest of step {step} that {named[1]} has put arrives"
            yield what, after._replace(late=world.late - {(step, named)})

    # -- what is left of it --------------------------------------------------------------------------------------

    def view(self, world: Store) -> tuple[int, int]:
        fence = world.fences[-1][1] if world.fences else Fence()
        for step, (folder, attempt) in reversed(world.manifests):
            if fence.admits(step, attempt) and all((folder, name, attempt) in world.data for name in self._files):
                return step, attempt
        return 0, 0

    def leftovers(self, world: Store, attempt: int) -> list[str]:
        newest = self.view(world)[0]
        named = {folder for _, (folder, _) in world.manifests} | world.asides
        left = [
            _key(folder, name)
            for folder, name, writer in sorted(world.data)
            if folder not in named and abs(writer) <= attempt
        ]
        left += [f"an upload of {_key(*upload)}" for upload in sorted(world.uploads) if upload[0][1] <= attempt]
        present = {item[:2] for item in world.data}
        return left + [
            f"{_manifest(step)} without {name}"
            for step, (folder, _) in world.manifests
            for name in self._files
            if step < newest and (folder, name) not in present
        ]


def _manifest(step: int) -> str:
    return f"checkpoint-{step}/manifest.json"


def _key(folder: Folder, name: str) -> str:
    return f"checkpoint-{folder[0]}/{folder[1]}/{name}"


def _step(path: str) -> int:
    return int(path.partition("/")[0].partition("-")[2])


def _fences(world: Store, path: str) -> Fence | None:
    return next((fence for number, fence in world.fences if f"fence/{number}.json" == path), None)


def _listed(world: Store, path: str, what: str | None) -> Any:
    step = _step(path) if path.endswith("/") else None
    manifests = tuple(number for number, _ in world.manifests if step in (None, number))
    if what == "manifests":
        return manifests
    data = tuple(sorted(item[:2] for item in world.data if step in (None, item[0][0])))
    return manifests, tuple(sorted(world.asides)), data
