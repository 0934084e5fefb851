"""The report of a rank's failure: the traceback for the user, the cause for the supervisor."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from checkpointing.errors import CheckpointError
from runner.errors import RunnerError
from runner.recovery.classify import of_its_origin

# Connection errors, time-outs and failed name lookups, by their class names in requests, urllib3, httpx, aiohttp,
# botocore and huggingface_hub. Importing those packages for isinstance would cost each rank more than a second.
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
# HTTP statuses below 500 that a retry can change: request time-out, too early, too many requests.
_TRANSIENT_STATUS = {408, 425, 429}
# Of a shared volume that fails over. Others are a script's own, or of the machine.
_PASSING = {
    errno.EIO,
    errno.EREMOTEIO,
    errno.ESTALE,
    errno.ENOLCK,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.ESHUTDOWN,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
}
# A bug in a handler of network errors fails again.
_PROGRAMMING_ERRORS = (NameError, SyntaxError, ImportError, AttributeError, TypeError)

_TRUE = {"1", "ON", "YES", "TRUE"}


def describe(error: BaseException) -> tuple[str, str | None]:
    """Describe an exception as torchelastic's error file does.

    Returns:
        Type and message, and `file:line` of the innermost frame, if there is one.
    """
    frames = traceback.extract_tb(error.__traceback__)
    frame = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
    try:
        message = str(error)
    except Exception:  # A broken __str__; Python's own traceback prints the same text.
        message = "<exception str() failed>"
    return of_its_origin(f"{type(error).__name__}: {message}", frame)


def is_transient(error: BaseException) -> bool:
    """Return whether a failure of a network, a server or a volume caused the error, that a retry may not meet again.

    The outermost exception of the chain that is about one of these decides.
    """
    chain = list(_chain(error))
    names = {base.__name__ for one in chain for base in type(one).__mro__}
    # A file missing from the cache is permanent in offline mode, which is read as huggingface_hub does.
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
        if isinstance(one, OSError) and one.errno in _PASSING:
            return True
    return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes, as a traceback shows them."""
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
        # botocore stores the status in a dict.
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if found is None and type(error).__name__ in ("HTTPError", "ClientResponseError"):
        # urllib and aiohttp store it in the exception.
        found = getattr(error, "code", None) or getattr(error, "status", None)
    return found if isinstance(found, int) and 100 <= found < 600 else None


def print_traceback(error: BaseException, script: str | None) -> None:
    """Print a traceback on standard error, as Python itself would.

    Errors of the runner and of checkpointing explain themselves, so only their message is printed. Frames before the
    first one of the user's script belong to the runner and are left out.
    """
    trace = _from_script(error.__traceback__, script) if script is not None else error.__traceback__
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        if isinstance(error, (CheckpointError, RunnerError)):
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        else:
            # A script may have installed its own hook, such as rich's.
            sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.stderr.flush()


def _from_script(trace: TracebackType | None, script: str) -> TracebackType | None:
    start = trace
    while start is not None:
        if Path(start.tb_frame.f_code.co_filename) == Path(script):
            return start
        start = start.tb_next
    # Without a frame of the script it could not be compiled, and the error names the place.
    return None
