"""What a script keeps besides model, optimizer and data: its generators are saved, and what else changes is named."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from checkpointing.data.cursor import LoaderCursor
from checkpointing.data.generators import GENERATORS, generator_state, generators_of, set_generator_state
from checkpointing.files.loaded_checkpoint import LoadedCheckpoint
from checkpointing.files.torch_files import torch_bytes
from checkpointing.format.layout import script_state_name
from checkpointing.manager.tracked import Tracked
from checkpointing.process import device
from checkpointing.process.ranks import Ranks
from checkpointing.process.reachable import attributes_of, is_own_module, reachable, settings_of, stored_by
from checkpointing.proof.coverage import Clocks, Coverage, held_by, listed, script_variables, suspended
from checkpointing.snapshot.request import SmallFile

logger = logging.getLogger("checkpointing")

# How loaders are called; of more than these the last ones share a name.
_LOADERS = ("loader", *(f"loader {number}" for number in range(2, 9)))
# Where samplers and data sets have others, and how many are looked at.
_INNER, _MOST_PARTS = ("_inner", "sampler", "batch_sampler", "dataset"), 16
# What libraries themselves count in samplers and data sets; it follows from the position in the data.
_COUNTED = ("epoch", "seed", "_num_yielded", "start_index")


class ScriptState:
    """What can be reached from a training, and nobody has declared.

    Args:
        ranks: This rank.
        tracked: What is saved.
        cursors: Returns the loaders that are followed: what their samplers draw from is a part of the position.

    Attributes:
        roots: Returns further objects to search, by name.
        saved: Returns further objects that are saved, or that do not matter: the search leaves them out.
        exported: Returns further objects of which a part is saved, each with that part.
        is_in_trainer: Whether a library's trainer runs the loop, and draws the batches.
    """

    def __init__(self, ranks: Ranks, tracked: Tracked, cursors: Callable[[], Collection[LoaderCursor]]) -> None:
        self._ranks, self._tracked, self._cursors = ranks, tracked, cursors
        self.roots: Callable[[], Mapping[str, object]] = dict
        self.saved: Callable[[], Collection[object]] = list
        self.exported: Callable[[], Collection[tuple[object, Any]]] = list
        self.is_in_trainer = False
        self._coverage = Coverage(self._compared, self._covered, self._without, self._partly, late=_LOADERS)
        self._looked = Clocks.now()
        self._generators: dict[str, Any] = {}
        self._num_snapshots = 0
        # What training began with, by name.
        self._begun: dict[str, object] = {}

    def begin(self) -> None:
        """Note how everything is before the first step."""
        self._num_snapshots = 0
        state = self._tracked.state
        self._begun = {"optimizer": state.torch_optimizer, "scheduler": state.scheduler}
        self._coverage.begin()
        self._looked = Clocks.now()

    def look(self, step: int) -> None:
        """At a save: warn of what training has changed and no checkpoint holds; all ranks call this together."""
        found = self._coverage.at_save(step)
        if found is None:
            return
        self._looked = Clocks.now()
        # A rank may keep something that the others do not.
        everyone = self._ranks.gather(found)
        names = list(dict.fromkeys(name for found in everyone for name in found))
        if names and self._ranks.is_first:
            logger.warning(
                "training has changed what no checkpoint holds: %s. A resumed run begins with the values that the "
                "script sets. If that matters, pass objects with state_dict and load_state_dict in `states`, or derive "
                "a callback from transformers' ExportableState",
                listed(names),
            )

    def changed(self, step: int) -> list[str]:
        """Return the names of what training has changed so far on this rank and no checkpoint holds."""
        return self._coverage.changed(step)

    def files(self) -> dict[str, SmallFile]:
        """Return this rank's file of a checkpoint; none where no generator was found."""
        self._num_snapshots += 1
        # Generators that are made later are found at the next of these.
        if self._num_snapshots & (self._num_snapshots - 1) == 0:
            self._generators = self._found()
        if not self._generators:
            return {}
        states = {path: generator_state(generator) for path, generator in self._generators.items()}
        return {script_state_name(self._ranks.rank): functools.partial(torch_bytes, {"generators": states})}

    def restore(self, point: LoadedCheckpoint) -> None:
        """Set the script's generators to where the checkpoint has them."""
        name = next(filter(point.has, (script_state_name(self._ranks.rank), script_state_name(0))), None)
        if name is None:
            return
        with point.reading(name):
            states = point.torch_object(name)["generators"]
            if not isinstance(states, dict) or not all(isinstance(path, str) for path in states):
                raise ValueError("not the states of generators by their paths")
            generators = self._found()
            for path, state in states.items():
                if path in generators:
                    set_generator_state(generators[path], state)
        if missing := sorted(states.keys() - generators.keys()):
            logger.warning(
                "%s has the states of generators that the script has not made yet: %s. They begin from their seeds "
                "again: make them before training resumes",
                point.label,
                listed(missing),
            )

    def _compared(self, step: int | None) -> tuple[dict[str, object], set[str]]:
        """Return what is compared: also what a search for generators cannot use."""
        found, own = self._roots(step)
        more = {**self._replaced(), **self._settings_of_data(), **self._suspended()}
        return {**found, **more}, own | set(more)

    def _roots(self, step: int | None) -> tuple[dict[str, object], set[str]]:
        model = {"model": self._tracked.state.model} if self._tracked.has_training else {}
        variables, kept = script_variables(step, self._looked), self._kept_besides()
        found, own = {**self.roots(), **model, **kept}, set(kept)
        for name, value in variables.found.items():
            # A variable may have the name of something else.
            path = name if found.get(name, value) is value else f"{name} (variable)"
            found[path] = value
            if name in variables.own:
                own.add(path)
        return found, own

    def _kept_besides(self) -> dict[str, object]:
        """Return what the script's classes keep in optimizer and scheduler besides what their state dicts hold."""
        state, found = self._tracked.state, dict[str, object]()
        for name, one in (("optimizer", state.torch_optimizer), ("scheduler", state.scheduler)):
            kind: Any = type(one)
            stored, all_own = stored_by(kind)
            if not stored and not all_own:
                continue
            saved = one.state_dict().keys()
            inner = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.nn.Module)
            for key, value in attributes_of(one).items():
                if (all_own or key in stored) and key not in saved and not isinstance(value, inner):
                    found[f"{name}.{key}"] = value
        # Functions are in no state dict, nor what they are made of.
        for number, function in enumerate(getattr(state.scheduler, "lr_lambdas", ())):
            inner = getattr(function, "func", getattr(function, "__func__", function))
            # The state dict has the attributes of an object.
            if isinstance(inner, types.FunctionType) and is_own_module(inner.__module__):
                found[f"scheduler.lr_lambdas[{number}]"] = function
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            for number, hook in enumerate(getattr(state.torch_optimizer, name, {}).values()):
                if is_own_module(getattr(hook, "__module__", "") or ""):
                    found[f"optimizer.{name.removeprefix('_optimizer_')}[{number}]"] = hook
        return found

    def _replaced(self) -> dict[str, object]:
        """Return whether optimizer and scheduler are others than those that training began with."""
        state = self._tracked.state
        now = {"optimizer": state.torch_optimizer, "scheduler": state.scheduler}
        return {f"{name} (replaced)": now[name] is not one for name, one in self._begun.items()}

    def _suspended(self) -> dict[str, object]:
        """Return what a loop of the script draws from and nothing shows, in a loop that no trainer runs."""
        if self.is_in_trainer:
            return {}
        return suspended({id(part) for cursor in self._cursors() for part in cursor.drawn_from})

    def _settings_of_data(self) -> dict[str, object]:
        """Return what a script may change in the samplers and collators of libraries, and in data sets in memory."""
        found: dict[str, object] = {}
        for number, cursor in enumerate(self._cursors()):
            place = _LOADERS[min(number, len(_LOADERS) - 1)]
            waiting: list[Any] = list(cursor.drawn_from)
            seen = set[int]()
            while waiting and len(seen) < _MOST_PARTS:
                part = waiting.pop(0)
                if part is None or id(part) in seen:
                    continue
                seen.add(id(part))
                name = f"{place}.{type(part).__name__}"
                if isinstance(part, (list, dict, tuple)):
                    found[name] = part
                elif not type(part).__module__.startswith("checkpointing."):
                    found[name] = settings_of(part, _COUNTED)
                waiting += [vars(part).get(key) for key in _INNER] if hasattr(part, "__dict__") else []
        return found

    def _found(self) -> dict[str, Any]:
        known = {id(generator) for generator in self._known_generators()}
        found = [one for one in reachable(self._roots(None)[0], self._without()) if isinstance(one.value, GENERATORS)]
        return {one.path: one.value for one in found if id(one.value) not in known}

    def _known_generators(self) -> Iterator[Any]:
        """Yield the process's own, and those that loaders draw from, which are a part of the position."""
        yield from device.default_generators()
        for cursor in self._cursors():
            yield from (generator for _, generator in generators_of(*cursor.drawn_from))

    def _without(self) -> set[int]:
        state = self._tracked.state
        parts = [state.optimizer, state.torch_optimizer, state.scheduler, state.scaler, state.held_as]
        others = [one for one in state.states.values() if not isinstance(one, torch.nn.Module) and not _is_own(one)]
        return {id(one) for one in [*parts, *others, *self.saved()] if one is not None}

    def _partly(self) -> dict[int, set[str]]:
        """Return, by the ids of objects of the script's classes, the attributes that their states hold."""
        own = [one for one in self._tracked.state.states.values() if _is_own(one)]
        states = [(one, one.state_dict()) for one in own if not isinstance(one, torch.nn.Module)]
        return {id(one): held_by(one, state) for one, state in [*states, *self.exported()]}

    def _covered(self) -> set[int]:
        state = self._tracked.state
        saved = [state.model, *(one for one in state.states.values() if isinstance(one, torch.nn.Module))]
        found = set[int]()
        for model in filter(None, saved):
            found |= {id(module) for module in model.modules()}
            found |= {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        # Those of a loss, say, are saved by the optimizer's order.
        groups = getattr(state.torch_optimizer, "param_groups", None) or ()
        return found | {id(tensor) for group in groups for tensor in group["params"]}


def _is_own(value: object) -> bool:
    return is_own_module(type(value).__module__)
