"""Private names of other libraries: what is used of them is in one table for each library, and checked before it is.

A new version of a library may change them. What does not find what it expects refuses by name, and
before anything is trained, instead of saving or restoring less than it should.
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version

from checkpointing.errors import CheckpointError


@dataclass(frozen=True)
class PrivateMethod:
    """A method that is overridden or called."""

    owner: str  # module:Class
    name: str
    arguments: tuple[str, ...] = ()  # the names of all, in order, without `self`

    def problem(self) -> str | None:
        """Return what has changed; None where nothing has."""
        method = getattr(_resolved(self.owner), self.name, None)
        if method is None:
            return f"has no {_shown(self)}"
        parameters = inspect.signature(method).parameters
        found = tuple(parameters)[1:]
        # Somebody's wrapper passes on whatever it is given.
        takes_all = {one.kind for one in parameters.values()} >= {
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        }
        if found != self.arguments and not takes_all:
            return f"has changed the arguments of {_shown(self)} to ({', '.join(found)})"
        return None


@dataclass(frozen=True)
class PrivateAttribute:
    """An attribute that is read or written: of a class or a module, or one that a method of the class sets or reads."""

    owner: str  # module:Class, or a module
    name: str

    def problem(self) -> str | None:
        """Return what has changed; None where nothing has."""
        owner = _resolved(self.owner)
        is_there = hasattr(owner, self.name) or (isinstance(owner, type) and self.name in _names_in(owner))
        return None if is_there else f"has no {_shown(self)}"


PrivateName = PrivateMethod | PrivateAttribute


@dataclass(frozen=True)
class Seam:
    """What is used of a library, by the name of its distribution, and with which versions all of it was tried."""

    library: str
    oldest: str
    newest: str
    names: tuple[PrivateName, ...]
    instead: str  # what to do where they have changed, besides installing another version

    def check(self, names: Iterable[PrivateName] | None = None) -> None:
        """Check that the installed version has these names (default: all).

        Raises:
            CheckpointError: It has not, or with other arguments.
        """
        for name in self.names if names is None else names:
            if (problem := name.problem()) is not None:
                tried = self.newest if self.oldest == self.newest else f"{self.oldest} to {self.newest}"
                raise CheckpointError(
                    f"{self.library} {version(self.library)} {problem}; this was tried with {tried}: install that, or "
                    f"{self.instead}"
                )


def _shown(name: PrivateName) -> str:
    return f"{name.owner.rpartition(':')[2]}.{name.name}"


def _resolved(owner: str) -> object:
    module, _, attribute = owner.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError:
        return None
    return getattr(found, attribute, None) if attribute else found


def _names_in(owner: type) -> set[str]:
    """Return the names that the methods of a class use."""
    found: set[str] = set()
    for kind in owner.__mro__:
        found |= set(inspect.get_annotations(kind))
        for value in vars(kind).values():
            for code in _codes(value):
                found |= set(code.co_names)
    return found


def _codes(value: object) -> Iterator[types.CodeType]:
    functions = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
    for function in functions:
        if (code := getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None) is not None:
            yield code
