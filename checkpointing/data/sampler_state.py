"""What a sampler, and the samplers inside it, keep between epochs: random generators and counters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from checkpointing.data.generators import generator_state, generators_of, new_generator, set_generator_state

# Packages whose samplers draw all they need when an epoch begins, or draw from generators of their own.
_KNOWN_PACKAGES = ("torch.", "accelerate.", "transformers.", "trl.", "sentence_transformers.", "checkpointing.")


class SamplerState:
    """The state of a chain of samplers, to be saved with a position and restored before the order is replayed."""

    def __init__(self, sampler: Any) -> None:
        """Look for the samplers inside `sampler`; the counters' values now are those of a fresh process."""
        self._samplers = list(_chain(sampler))
        self._baseline = _counters(self._samplers)

    @property
    def name(self) -> str:
        """Class name of the innermost sampler, which determines the order."""
        return type(self._samplers[-1][1]).__name__

    @property
    def may_draw_globally(self) -> bool:
        """Whether a sampler of an unknown package takes part, which may use the host's generators in mid-epoch."""
        modules = [type(sampler).__module__ + "." for _, sampler in self._samplers]
        return not all(module.startswith(_KNOWN_PACKAGES) for module in modules)

    def generators(self) -> dict[str, Any]:
        """Return the states of the samplers' own generators, by path."""
        return {path: generator_state(generator) for path, generator in self._generators()}

    def counters(self) -> dict[str, Any]:
        """Return the samplers' simple attributes that have changed since this process made them, by path."""
        now = _counters(self._samplers)
        return {path: value for path, value in now.items() if self._baseline.get(path, value) != value}

    def restore(self, generators: Mapping[str, Any], counters: Mapping[str, Any]) -> None:
        """Put generators and counters back to what `generators` and `counters` returned."""
        missing = dict(generators)
        for path, generator in self._generators():
            if path in missing:
                set_generator_state(generator, missing.pop(path))
        for path, state in missing.items():
            self._create_generator(path, state)
        samplers = dict(self._samplers)
        for path, value in counters.items():
            name, _, attribute = path.rpartition(".")
            if name in samplers:
                setattr(samplers[name], attribute, value)

    def _generators(self) -> Iterator[tuple[str, Any]]:
        return generators_of(*[sampler for _, sampler in self._samplers])

    def _create_generator(self, path: str, state: Any) -> None:
        """Create a generator that a sampler makes when its first epoch begins; in this process none has begun."""
        number, *names = path.split(".")
        owner: Any = self._samplers[int(number)][1] if int(number) < len(self._samplers) else None
        for name in names[:-1]:
            owner = getattr(owner, "__dict__", {}).get(name)
        if names and hasattr(owner, "__dict__") and owner.__dict__.get(names[-1]) is None:
            setattr(owner, names[-1], new_generator(state))


def _chain(sampler: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over a sampler and those inside it, by path, the outermost first."""
    path, seen = "order", set()
    while sampler is not None and id(sampler) not in seen:
        seen.add(id(sampler))
        yield path, sampler
        name = next((n for n in ("batch_sampler", "sampler") if getattr(sampler, n, None) is not None), None)
        path, sampler = (f"{path}.{name}", getattr(sampler, name)) if name else (path, None)


def _counters(samplers: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, sampler in samplers:
        attributes = getattr(sampler, "__dict__", {})
        found |= {f"{path}.{name}": value for name, value in attributes.items() if type(value) in (int, float, bool)}
    return found
