"""Which variables of a loop carry something from one iteration to the next, by its bytecode."""

from __future__ import annotations

import dis
import functools
import types

# What only adds to a container; its contents may be a log that nothing reads.
_ADDING = {"append", "extend", "add"}
_LOADS, _STORES = ("LOAD_FAST", "LOAD_NAME", "LOAD_DEREF"), ("STORE_FAST", "STORE_NAME", "STORE_DEREF")


def carried_by(frame: types.FrameType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the variables of the loop that a frame executes now.

    Returns:
        The names that an iteration reads before it sets them; and those of which it uses more than `append` and the
        like. Both are empty outside of a loop.
    """
    return _of_loop(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=64)
def _of_loop(code: types.CodeType, at: int) -> tuple[frozenset[str], frozenset[str]]:
    instructions = list(dis.get_instructions(code))
    jumps = [(one.argval, one.offset) for one in instructions if "JUMP" in one.opname and isinstance(one.argval, int)]
    around = [(target, offset) for target, offset in jumps if target <= at <= offset]
    if not around:
        return frozenset(), frozenset()
    begin, end = min(target for target, _ in around), max(offset for _, offset in around)
    loop = [one for one in instructions if begin <= one.offset <= end]
    first: dict[str, bool] = {}
    stored, used = set[str](), set[str]()
    for one, following in zip(loop, [*loop[1:], None], strict=True):
        if one.opname.startswith(_LOADS):
            first.setdefault(one.argval, True)
            adds = following is not None and following.opname.startswith(("LOAD_METHOD", "LOAD_ATTR"))
            if not (adds and following is not None and following.argval in _ADDING):
                used.add(one.argval)
        elif one.opname.startswith(_STORES):
            first.setdefault(one.argval, False)
            stored.add(one.argval)
    return frozenset(name for name in stored if first[name]), frozenset(used)
