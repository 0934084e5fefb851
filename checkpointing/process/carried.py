"""Which variables carry something from one iteration of a loop to the next, by bytecode."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Sequence
from typing import NamedTuple

# What only adds to a container; its contents may be a log that nothing reads.
_ADDING = {"append", "extend", "add"}
# After these, what follows in the code does not follow in the execution.
_ENDS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "RETURN", "RAISE", "RERAISE")
_LOADS, _STORES = ("LOAD_FAST", "LOAD_NAME", "LOAD_DEREF"), ("STORE_FAST", "STORE_NAME", "STORE_DEREF")


class LoopVariables(NamedTuple):
    """The variables of a loop that a frame executes; all empty outside of one.

    Attributes:
        carried: Those that an iteration reads before it sets them.
        used: Those of which an iteration uses more than `append` and the like.
        computed: Those that an iteration sets before it reads them.
        appended: Those of which an iteration uses nothing but `append` and the like.
    """

    carried: frozenset[str] = frozenset()
    used: frozenset[str] = frozenset()
    computed: frozenset[str] = frozenset()
    appended: frozenset[str] = frozenset()


def carried_by(frame: types.FrameType) -> LoopVariables:
    """Return the variables of the loop that a frame executes now."""
    return _of_loop(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=64)
def _of_loop(code: types.CodeType, at: int) -> LoopVariables:
    instructions = list(dis.get_instructions(code))
    jumps = [(one.argval, one.offset) for one in instructions if "JUMP" in one.opname and isinstance(one.argval, int)]
    around = [(target, offset) for target, offset in jumps if target <= at <= offset]
    if not around:
        return LoopVariables()
    begin, end = min(target for target, _ in around), max(offset for _, offset in around)
    return _variables([one for one in instructions if begin <= one.offset <= end], _LOADS)


def _variables(instructions: Sequence[dis.Instruction], loads: tuple[str, ...]) -> LoopVariables:
    stored, used, loaded, carried = set[str](), set[str](), set[str](), set[str]()
    certain = _certainly_set(instructions)
    for number, (one, following) in enumerate(zip(instructions, [*instructions[1:], None], strict=True)):
        if one.opname.startswith(loads):
            loaded.add(one.argval)
            if one.argval not in certain[number]:
                carried.add(one.argval)
            adds = following is not None and following.opname.startswith(("LOAD_METHOD", "LOAD_ATTR"))
            if not (adds and following is not None and following.argval in _ADDING):
                used.add(one.argval)
        elif one.opname.startswith(_STORES):
            stored.add(one.argval)
    return LoopVariables(
        frozenset(stored & carried),
        frozenset(used),
        frozenset(stored - carried),
        frozenset(loaded - used - stored),
    )


def _certainly_set(instructions: Sequence[dis.Instruction]) -> list[frozenset[str]]:
    """Return, for each instruction, the variables that every way to it from the first one has set."""
    places = {one.offset: number for number, one in enumerate(instructions)}
    found: list[frozenset[str] | None] = [None] * len(instructions)
    waiting: list[tuple[int, frozenset[str]]] = [(0, frozenset())] if instructions else []
    while waiting:
        number, before = waiting.pop()
        known = found[number]
        now = before if known is None else known & before
        if now == known:
            continue
        found[number] = now
        one = instructions[number]
        after = now | {one.argval} if one.opname.startswith(_STORES) else now
        if "JUMP" in one.opname or one.opname == "FOR_ITER":
            target = places.get(one.argval)
            waiting += [(target, after)] if target is not None else []
        if not one.opname.startswith(_ENDS) and number + 1 < len(instructions):
            waiting.append((number + 1, after))
    return [one if one is not None else frozenset() for one in found]


@functools.cache
def globals_of(code: types.CodeType) -> LoopVariables:
    """Return how a function, with those that it contains, uses global variables."""
    found = _variables(list(dis.get_instructions(code)), ("LOAD_GLOBAL", "LOAD_NAME"))
    written = {one.argval for one in dis.get_instructions(code) if one.opname == "STORE_GLOBAL"}
    used, appended = found.used | written, found.appended
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            inner = globals_of(part)
            used, appended = used | inner.used, appended | inner.appended
    return LoopVariables(used=used, appended=appended - used)


@functools.lru_cache(maxsize=64)
def named_in_call(code: types.CodeType, at: int) -> frozenset[str]:
    """Return the variables that stand in the call that a frame with this code executes at an instruction.

    Empty where the places in the source are not known (`python -X no_debug_ranges`).
    """
    instructions = list(dis.get_instructions(code))
    # While it is being executed, the place is that of the last of its caches.
    call = next((one for one in reversed(instructions) if one.offset <= at), None)
    if call is None or call.positions is None or call.positions.col_offset is None:
        return frozenset()
    inside = [
        one for one in instructions if one.opname.startswith(_LOADS) and _is_inside(one.positions, call.positions)
    ]
    return frozenset(one.argval for one in inside)


def _is_inside(part: dis.Positions | None, whole: dis.Positions) -> bool:
    if part is None or part.lineno is None or whole.lineno is None:
        return False
    begins = (part.lineno, part.col_offset or 0) >= (whole.lineno, whole.col_offset or 0)
    return begins and (part.end_lineno or 0, part.end_col_offset or 0) <= (
        whole.end_lineno or 0,
        whole.end_col_offset or 0,
    )
