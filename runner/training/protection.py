"""Makes trainers resilient in a rank that runs a user's program, and finds out if nothing of it is saved."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from checkpointing.agent.events import Event
from checkpointing.commit.tiers import STAGES
from checkpointing.errors import CheckpointError
from checkpointing.host.environment import rank_settings
from checkpointing.manager.tracker_runs import CONTINUED, ProgramRuns
from runner.errors import ExitCode, RunnerError

# Optimizer steps, and seconds since the first of them, after which a program that saves has begun to.
_STEPS, _PATIENCE_S = 3, 30.0
_NOTHING_SEEN = "no Trainer and no CheckpointManager seen"


class Unprotected(RunnerError):
    """Nothing of this training is saved, and `--resilient require` was given."""

    exit_code = ExitCode.DETERMINISTIC


class Protection:
    """What is done for a user's program in one rank.

    Args:
        mode: `auto`; `require`, with which a program that cannot be protected ends; or `off`, with which trainers stay
            what they are.
        report: Takes the reason why nothing is saved, once.
        stepped: Called with the first step of an optimizer.
        saved: Takes what `torch.distributed.checkpoint` has saved, loaded or found damaged.
        tracks: Whether runs of experiment trackers that the program opens are continued by the next attempt.
    """

    def __init__(
        self,
        mode: str,
        report: Callable[[str], None],
        stepped: Callable[[], None] = lambda: None,
        saved: Callable[[Event], None] = lambda event: None,
        *,
        tracks: bool = False,
    ) -> None:
        self._tracks = tracks
        self._mode, self._report, self._report_step, self._report_saved = mode, report, stepped, saved
        # Whether the program has checkpoints of torch's kind.
        self._has_own = self._is_over = self._is_decided = False
        self._loaded_before = frozenset(sys.modules)
        self._has_reported, self._num_steps = False, 0
        self._lock = threading.Lock()
        self._timer = threading.Timer(_PATIENCE_S, self._look)
        self._timer.daemon = True

    def begin(self) -> None:
        """Protect trainers from now on, and count the steps of optimizers."""
        if self._mode != "off":
            when_imported("transformers.trainer", self._protect_transformers)
            when_imported("lightning.pytorch", self._protect_lightning)
            when_imported("torch.distributed.checkpoint", self._protect_dcp)
            if self._tracks:
                self._continue_trackers()
        when_imported("torch.optim.optimizer", self._watch_optimizers)

    def _continue_trackers(self) -> None:
        runs = ProgramRuns(rank_settings().lineage)
        for name, have_continued in CONTINUED.items():
            when_imported(name, functools.partial(have_continued, runs))

    def _protect_transformers(self, module: ModuleType) -> None:
        from checkpointing.transformers.every_trainer import protect_trainers

        protect_trainers(self._refuse)

    def _protect_lightning(self, module: ModuleType) -> None:
        from checkpointing.lightning.every_fit import protect_trainers

        protect_trainers()

    def _protect_dcp(self, module: ModuleType) -> None:
        # Libraries import it, too: a program that does not use it must not fail.
        try:
            from checkpointing.dcp import protect

            protect(self._saved)
        except (CheckpointError, ImportError) as error:
            print(f"checkpointing: torch.distributed.checkpoint is left as it is: {error}", file=sys.stderr, flush=True)

    def _saved(self, event: Event) -> None:
        self._has_own = True
        self._report_saved(event)

    @property
    def _is_saved(self) -> bool:
        return self._has_own or STAGES.were_entered

    def _watch_optimizers(self, module: Any) -> None:
        module.register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        # Not removed: torch walks through the hooks, and others may come after this one.
        if self._is_decided:
            return
        self._num_steps += 1
        if self._num_steps == 1:
            self._timer.start()
            self._report_step()
        if self._is_saved or self._is_over or (self._num_steps == _STEPS and not self._has_own_calls()):
            self._is_decided = True
            self._timer.cancel()
            self._look()
            if self._mode == "require" and not self._is_saved:
                raise Unprotected(self._text(_NOTHING_SEEN))

    def _has_own_calls(self) -> bool:
        """Return whether a module of the program can call `torch.distributed.checkpoint`: its saves may be rare."""
        dcp: Any = sys.modules.get("torch.distributed.checkpoint")
        if dcp is None or self._mode == "off":
            return False
        calls = {id(dcp), *(id(getattr(dcp, name)) for name in ("save", "async_save", "load"))}
        return any(
            not calls.isdisjoint(map(id, vars(module).values()))
            for name, module in list(sys.modules.items())
            if (name not in self._loaded_before or name == "__main__") and not name.startswith("torch.")
        )

    def _look(self) -> None:
        self._is_over = True
        if not self._is_saved:
            self._say(_NOTHING_SEEN)

    def _refuse(self, reason: str) -> None:
        """Take the reason why a trainer is not protected.

        Raises:
            Unprotected: With `require`.
        """
        self._say(reason)
        if self._mode == "require":
            raise Unprotected(self._text(reason))

    def _say(self, reason: str) -> None:
        with self._lock:
            has_reported, self._has_reported = self._has_reported, True
        if not has_reported:
            self._report(reason)

    @staticmethod
    def _text(reason: str) -> str:
        return f"nothing is saved: {reason}; pass --resilient auto to train all the same"


class _ImportHook(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Calls a function once a module has been imported.

    Args:
        name: The module.
        call: Takes it.
    """

    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self._name, self._call = name, call
        self._loader: Any = None
        self._is_looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as it would be found without this, and stand before its loader."""
        if fullname != self._name or self._is_looking:
            return None
        # Packages look whether others are there long before they are imported.
        self._is_looking = True
        try:
            found = importlib.util.find_spec(fullname)
        finally:
            self._is_looking = False
        if found is not None and found.loader is not None:
            self._loader, found.loader = found.loader, self
        return found

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as its loader does."""
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module as its loader does, then call the function."""
        assert module.__spec__ is not None
        sys.meta_path.remove(self)
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._call(module)


def when_imported(name: str, call: Callable[[ModuleType], None]) -> None:
    """Call a function with a module: now if it has been imported, or else once it is."""
    module = sys.modules.get(name)
    if module is not None:
        call(module)
    else:
        sys.meta_path.insert(0, _ImportHook(name, call))
