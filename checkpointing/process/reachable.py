"""Objects that can be reached from others: by attributes, items, closures, and globals that functions name.

A search finds what nobody has declared: generators that a data set draws from, counters that a loss keeps. It is
bounded, since what can be reached may be the whole process.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import contextvars
import dis
import enum
import functools
import gc
import inspect
import itertools
import queue
import sys
import sysconfig
import threading
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from multiprocessing.sharedctypes import SynchronizedBase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

# Objects of one search; a composition of transforms has dozens, a model's modules some thousand.
MAX_OBJECTS = 10_000
# Longer containers are data.
MAX_ITEMS = 64
SIMPLE = (int, float, complex, str, bytes, bool, type(None), torch.Tensor, np.ndarray, np.generic, torch.dtype)
_OURS = ("checkpointing", "runner")
# Of modules within modules.
_LEVELS = 4
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
# What `vars` of every module has; its tensors are looked at as those of the module.
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_HOOKS = tuple(name for name in sorted(_OF_EVERY_MODULE) if name.endswith("_hooks"))
_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
# Python's own, of which scripts make places to keep things in.
NAMESPACES = (argparse.Namespace, types.SimpleNamespace, threading.local)


class Reached(NamedTuple):
    """An object that a search has reached.

    Attributes:
        path: How, from one of the roots.
        value: The object; also what is simple (numbers, text, tensors), into which a search does not go.
        is_own: Whether code of the script keeps it: as an attribute of one of its classes, or in a closure.
    """

    path: str
    value: Any
    is_own: bool = False


def reachable(
    roots: Mapping[str, object],
    without: Collection[int] = (),
    limit: int = MAX_OBJECTS,
    own_roots: Collection[str] = (),
    partly: Mapping[int, Collection[str]] = types.MappingProxyType({}),
) -> Iterator[Reached]:
    """Iterate over the objects that roots hold, the nearest first, each one once.

    Args:
        roots: Where the search begins, by the names that paths begin with.
        without: Ids of objects that are left out, with what only they hold.
        limit: Number of objects after which it ends.
        own_roots: Names of the roots that code of the script keeps.
        partly: By the id of an object, names of its attributes that are left out.
    """
    waiting = deque(Reached(name, value, name in own_roots) for name, value in roots.items())
    seen = set(without)
    # Objects that are made on the way, such as bound methods, must keep their ids.
    kept: list[object] = []
    while waiting and len(kept) < limit:
        reached = waiting.popleft()
        if not isinstance(reached.value, SIMPLE):
            if id(reached.value) in seen:
                if isinstance(reached.value, (types.FunctionType, enum.Enum)):
                    # Another one may be in its place later, which is also found elsewhere.
                    yield reached
                continue
            seen.add(id(reached.value))
            kept.append(reached.value)
            hidden = partly.get(id(reached.value), ())
            # An object of the script may raise anything when it is looked at.
            with contextlib.suppress(Exception):
                waiting.extend(part for part in _parts_of(reached) if _attribute(reached, part) not in hidden)
        yield reached


def _attribute(owner: Reached, part: Reached) -> str:
    return part.path[len(owner.path) + 1 :]


def _parts_of(reached: Reached) -> Iterator[Reached]:  # noqa: C901 - A table of kinds.
    """Yield what an object holds itself."""
    path, owner, is_own = reached
    if isinstance(owner, functools.partial):
        for number, value in enumerate([owner.func, *owner.args, *owner.keywords.values()]):
            yield Reached(f"{path}({number})", value, is_own)
    elif isinstance(owner, types.MethodType):
        yield Reached(f"{path}.__self__", owner.__self__)
        yield from _parts_of(Reached(path, owner.__func__))
    elif isinstance(owner, types.FunctionType):
        own = is_own_module(owner.__module__)
        yield from (Reached(path + name, value, own) for name, value in _parts_of_function(owner))
    elif isinstance(owner, _CONTAINERS):
        if len(owner) <= MAX_ITEMS:
            items = owner.values() if isinstance(owner, Mapping) else owner
            yield from (Reached(f"{path}[{number}]", value, is_own) for number, value in enumerate(items))
        if is_own_module(type(owner).__module__):
            yield from (Reached(f"{path}.{name}", value, True) for name, value in attributes_of(owner).items())
    elif isinstance(owner, type):
        # One that serves as a namespace.
        members = vars(owner).items() if is_own_module(owner.__module__) else ()
        yield from (Reached(f"{path}.{name}", value, True) for name, value in members if is_data(name, value))
        if is_own_module(type(owner).__module__):
            kept = vars(type(owner)).items()
            yield from (Reached(f"{path}.{name}", value, True) for name, value in kept if is_data(name, value))
    elif isinstance(owner, NAMESPACES):
        yield from (Reached(f"{path}.{name}", value, True) for name, value in vars(owner).items())
    elif isinstance(owner, SynchronizedBase):
        yield Reached(f"{path}.value", bytes(owner.get_obj()), is_own)
    elif isinstance(owner, np.random.SeedSequence):
        yield Reached(f"{path}.n_children_spawned", owner.n_children_spawned, True)
    elif isinstance(owner, np.random.Generator):
        # Its state does not say how many were made of it.
        sequence: Any = owner.bit_generator.seed_seq
        yield Reached(f"{path}.spawn", getattr(sequence, "n_children_spawned", 0), True)
    elif isinstance(owner, types.GeneratorType):
        frame = owner.gi_frame
        if frame is not None and is_own_module(frame.f_globals.get("__name__", "")):
            # Its numbers count with how far it is.
            inside = [(name, value) for name, value in locals_of(frame) if not isinstance(value, (int, float, str))]
            yield from (Reached(f"{path}.{name}", value, is_own) for name, value in inside)
    elif isinstance(owner, (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)):
        values = list(owner) if isinstance(owner, weakref.WeakSet) else list(owner.values())
        yield from (Reached(f"{path}[{number}]", value, is_own) for number, value in enumerate(values[:MAX_ITEMS]))
    elif isinstance(owner, weakref.ReferenceType):
        yield Reached(f"{path}()", owner(), is_own)
    elif isinstance(owner, queue.Queue):
        yield Reached(f"{path}.queue", owner.queue, is_own)
    elif isinstance(owner, collections.UserDict):
        yield Reached(f"{path}.data", owner.data, is_own)
    elif isinstance(owner, contextvars.ContextVar):
        yield Reached(f"{path}.get()", owner.get(None), is_own)
    elif isinstance(owner, functools._lru_cache_wrapper):
        yield Reached(f"{path}.__wrapped__", owner.__wrapped__)
        yield from (Reached(f"{path}({number})", value) for number, value in enumerate(_cached_by(owner)))
    elif not isinstance(owner, types.ModuleType) and not _is_left_out(type(owner)):
        yield from _parts_of_object(path, owner)


def _parts_of_object(path: str, owner: Any) -> Iterator[Reached]:
    kind: Any = type(owner)
    stored, all_own = stored_by(kind)
    attributes = attributes_of(owner)
    # What no class of a library sets was set by the script, from wherever: by `setattr`, say.
    theirs = set_by_libraries(kind) if stored else None
    for name, value in attributes.items():
        is_own = all_own or name in stored or (theirs is not None and name not in theirs and not name.startswith("_"))
        yield Reached(f"{path}.{name}", value, is_own)
    if isinstance(owner, torch.nn.Module):
        yield from _hooks_of(path, owner)
    yield from (Reached(path + name, value, True) for name, value in _parts_of_class(kind, attributes))


def _cached_by(function: Any) -> Iterator[Any]:
    """Yield the results that `functools.lru_cache` holds, which only the garbage collector can reach."""
    for cache in gc.get_referents(function):
        if isinstance(cache, dict) and cache is not vars(function):
            for value in itertools.islice(cache.values(), MAX_ITEMS):
                # In a bounded cache a link, which refers to the key and the result.
                yield from gc.get_referents(value) if type(value).__module__ == "functools" else (value,)


def attributes_of(owner: Any) -> dict[str, Any]:
    """Return an object's own attributes, by name, without asking its properties.

    Of a module these are its submodules, and what it has besides what every module has.
    """
    found = dict(getattr(owner, "__dict__", {}))
    if isinstance(owner, torch.nn.Module):
        found = {**owner._modules, **{name: value for name, value in found.items() if name not in _OF_EVERY_MODULE}}
    for base in type(owner).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = vars(base).get(name)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    found[name] = member.__get__(owner)
                except AttributeError:
                    continue
    return found


_DATA = (*SIMPLE, *_CONTAINERS)


def settings_of(owner: Any, without: Collection[str] = ()) -> types.SimpleNamespace:
    """Return what a library's object holds under public names that is data, and no code: what a script may change.

    Args:
        owner: The object; one of a script's classes is searched anyway, and gives nothing here.
        without: Names that are left out: what the library itself changes.
    """
    if is_own_module(type(owner).__module__):
        return types.SimpleNamespace()
    return types.SimpleNamespace(
        **{
            name: value
            for name, value in attributes_of(owner).items()
            if not name.startswith("_") and name not in without and isinstance(value, _DATA)
        }
    )


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:
            continue  # It is empty.
    yield from ((f".{name}", value) for name, value in named_globals(function).items())
    for number, value in enumerate(function.__defaults__ or ()):
        yield f"({number})", value
    yield from ((f".{name}", value) for name, value in (function.__kwdefaults__ or {}).items())
    yield from ((f".{name}", value) for name, value in vars(function).items())


def _hooks_of(path: str, module: torch.nn.Module) -> Iterator[Reached]:
    """Yield the script's functions that a module and its own parameters call."""
    places = [(f"{path}.{name}", vars(module).get(name)) for name in _HOOKS]
    for key, parameter in module._parameters.items():
        places += [(f"{path}.{key}.{name}", getattr(parameter, name, None)) for name in _HOOKS_OF_TENSORS]
    for place, hooks in places:
        for number, hook in enumerate((hooks or {}).values()):
            inner: Any = getattr(hook, "__func__", getattr(hook, "func", hook))
            if is_own_module(getattr(inner, "__module__", None) or type(hook).__module__):
                yield Reached(f"{place}[{number}]", hook)


def num_hooks(module: torch.nn.Module) -> int:
    """Return how many functions of the script a module and its own parameters call."""
    return sum(1 for _ in _hooks_of("", module))


_CODE = (
    *(types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type),
    *(classmethod, staticmethod, property, types.MemberDescriptorType),
)


def is_data(name: str, value: object) -> bool:
    """Return whether what a class or a module has is no code."""
    return not name.startswith("__") and not isinstance(value, _CODE)


def _parts_of_class(kind: type, hidden: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield what a script's classes hold, except where an object hides it, and the globals that their methods name."""
    for base in kind.__mro__:
        if is_own_module(base.__module__):
            for name, value in vars(base).items():
                function = getattr(value, "__func__", getattr(value, "fget", value))
                if isinstance(function, types.FunctionType):
                    yield from ((f".{name}.{key}", found) for key, found in named_globals(function).items())
                elif not name.startswith("__") and name not in hidden:
                    yield f".{name}", value


def named_globals(function: types.FunctionType) -> dict[str, Any]:
    """Return the globals of its module that a function of a script names, and those that it names of other such."""
    if not is_own_module(function.__module__):
        return {}
    found: dict[str, Any] = {}
    names = names_in(function.__code__)
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType):
            found |= _named_in_module(name, value, names, _LEVELS)
        elif not isinstance(value, type) or is_own_module(value.__module__):
            found[name] = value
    for name in imports_in(function.__code__):
        if (module := sys.modules.get(name)) is not None and name not in found:
            found |= _named_in_module(name, module, names, _LEVELS)
    return found


def _named_in_module(path: str, module: types.ModuleType, names: Collection[str], levels: int) -> dict[str, Any]:
    """Return what is named of a script's module, and of those below it."""
    if not levels or not is_own_module(module.__name__):
        return {}
    found: dict[str, Any] = {}
    for other in sorted(vars(module).keys() & names):
        value = vars(module)[other]
        if isinstance(value, types.ModuleType):
            found |= _named_in_module(f"{path}.{other}", value, names, levels - 1)
        else:
            found[f"{path}.{other}"] = value
    return found


@functools.cache
def imports_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of the modules that a function imports when it is called."""
    found = {one.argval for one in dis.get_instructions(code) if one.opname == "IMPORT_NAME"}
    inner = [imports_in(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return frozenset(found).union(*inner)


@functools.cache
def names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in a function, and in those that it contains."""
    inner = [names_in(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


@functools.cache
def stored_by(kind: type) -> tuple[frozenset[str], bool]:
    """Return the attributes that a script's methods of a class set, and whether all of the class is the script's."""
    own = [base for base in kind.__mro__ if is_own_module(base.__module__)]
    names = set[str]()
    for base in own:
        for name, value in vars(base).items():
            functions = list(_functions_of(value))
            for function in functions:
                names |= _stored_in(function.__code__)
            if not functions and not name.startswith("__"):
                names.add(name)
    return frozenset(names), len(own) == len(kind.__mro__) - 1


def _functions_of(member: Any) -> Iterator[types.FunctionType]:
    """Yield the functions of a member of a class: a method, decorated or not, or those of a property."""
    if isinstance(member, property):
        parts = [member.fget, member.fset, member.fdel]
    elif isinstance(member, functools.cached_property):
        parts = [member.func]
    else:
        parts = [getattr(member, "__func__", member)]
    for part in parts:
        function = inspect.unwrap(part) if callable(part) else part
        if isinstance(function, types.FunctionType):
            yield function


@functools.cache
def set_by_libraries(kind: type) -> frozenset[str]:
    """Return the attributes that the classes of libraries set, from which a class of a script is derived."""
    names = set[str]()
    for base in kind.__mro__[:-1]:
        if not is_own_module(base.__module__):
            names |= set(inspect.get_annotations(base)) | set(vars(base))
            for value in vars(base).values():
                for function in _functions_of(value):
                    names |= _stored_in(function.__code__)
    return frozenset(names)


def _stored_in(code: types.CodeType) -> set[str]:
    found = {one.argval for one in dis.get_instructions(code) if one.opname in ("STORE_ATTR", "DELETE_ATTR")}
    return found.union(*(_stored_in(part) for part in code.co_consts if isinstance(part, types.CodeType)))


@functools.cache
def is_own_module(name: str) -> bool:
    """Return whether a module belongs to the script, instead of Python, or of an installed package."""
    module = sys.modules.get(name)
    if name in ("__main__", "__mp_main__"):
        return True
    path = getattr(module, "__file__", None)
    if path is None or name.partition(".")[0] in _OURS or name in sys.stdlib_module_names:
        return False
    installed = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders = [Path(folder) for folder in installed if folder]
    return not any(folder in Path(path).parents for folder in folders) and "site-packages" not in Path(path).parts


def _is_left_out(kind: type) -> bool:
    """Return whether an object is of Python's own (a logger, say, by which all others can be reached), or of ours."""
    # A class of the script may have one of ours in front: a trainer that is resilient.
    roots = (base.__module__.partition(".")[0] for base in kind.__mro__)
    root = next(root for root in roots if root not in _OURS)
    return root in sys.stdlib_module_names and root not in ("__main__", "types", "collections")


def locals_of(frame: types.FrameType) -> list[tuple[str, object]]:
    """Return a frame's variables, without keeping them alive.

    Before Python 3.13 (PEP 667) a function's frame keeps the dict that it was asked for: the logits of a step would
    stay in memory until the next save.
    """
    variables = frame.f_locals
    found = list(variables.items())
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        variables.clear()
    return found
