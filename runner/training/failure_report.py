"""What a rank says of its own failure: the traceback for the user, the cause for the supervisor."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from checkpointing.errors import CheckpointError
from runner.errors import RunnerError

# Connections, time-outs and name look-ups, by the names of classes in requests, urllib3, httpx, aiohttp, botocore and
# huggingface_hub; importing those packages to ask would cost each rank more than a second.
_NETWORK_ERRORS = {
    "ConnectionError",
    "TimeoutError",
    "gaierror",
    "Timeout",
    "TransportError",
    "HTTPClientError",
    "IncompleteRead",
    "ProtocolError",
    "MaxRetryError",
    "ChunkedEncodingError",
    "ClientConnectionError",
    "ServerTimeoutError",
    "LocalEntryNotFoundError",
}
# HTTP: request time-out, too early, too many requests. Of the others below 500 the next try gets the same answer.
_TRANSIENT_STATUS = {408, 425, 429}
# A faulty handler of a network error fails again.
_PROGRAMMING_ERRORS = (NameError, SyntaxError, ImportError, AttributeError, TypeError)


_TRUE = {"1", "ON", "YES", "TRUE"}


def describe(error: BaseException) -> tuple[str, str | None]:
    """Type and message, and `file:line` of the innermost frame; as torchelastic's error file has them."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
    try:
        message = str(error)
    except Exception:  # its class's own; Python says as much in a traceback
        message = "<exception str() failed>"
    return f"{type(error).__name__}: {message}", frame


def is_transient(error: BaseException) -> bool:
    """Whether the network, or a server, has failed in a way that may have passed at the next try.

    The outermost exception that says anything about it decides.
    """
    chain = list(_chain(error))
    names = {base.__name__ for one in chain for base in type(one).__mro__}
    # Not in the cache: that is final where the user has asked for no network (huggingface_hub's own reading of it).
    offline = os.environ.get("HF_HUB_OFFLINE", os.environ.get("TRANSFORMERS_OFFLINE", "")).upper() in _TRUE
    if "OfflineModeIsEnabled" in names or (offline and "LocalEntryNotFoundError" in names):
        return False
    if isinstance(error, _PROGRAMMING_ERRORS):
        return False
    for one in chain:
        status = _http_status(one)
        if status is not None:
            return status >= 500 or status in _TRANSIENT_STATUS
        if _NETWORK_ERRORS & {base.__name__ for base in type(one).__mro__}:
            return True
    return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and those that it follows from, as a traceback shows them."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _http_status(error: BaseException) -> int | None:
    response: Any = getattr(error, "response", None)
    found: Any = getattr(response, "status_code", None)
    if isinstance(response, dict):
        # botocore's.
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if found is None and type(error).__name__ in ("HTTPError", "ClientResponseError"):
        # urllib's, and aiohttp's.
        found = getattr(error, "code", None) or getattr(error, "status", None)
    return found if isinstance(found, int) and 100 <= found < 600 else None


def print_traceback(error: BaseException, script: str | None) -> None:
    """On standard error, as Python itself would print it.

    Of our own errors, which say what is wrong and what to do, only the message.

    Args:
        script: the user's; frames before its first one are ours.
    """
    trace = _from_script(error.__traceback__, script) if script is not None else error.__traceback__
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        if isinstance(error, (CheckpointError, RunnerError)):
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        else:
            # A script may have a hook of its own (rich's, say).
            sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.stderr.flush()


def _from_script(trace: TracebackType | None, script: str) -> TracebackType | None:
    start = trace
    while start is not None:
        if Path(start.tb_frame.f_code.co_filename) == Path(script):
            return start
        start = start.tb_next
    # It cannot be compiled, say; then the error itself names the place.
    return None
