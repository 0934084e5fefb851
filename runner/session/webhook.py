"""Posts notifications to a webhook, in a thread: whatever the receiver does, the run neither fails nor waits.

A message is tried several times and then given up, with one line on the console until one arrives again. Messages that
wait are few; a newer one replaces the oldest.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import queue
import threading
import time
from collections.abc import Callable, Mapping

from runner import __version__
from runner.config.schema import NotifyConfig
from runner.errors import UsageError
from runner.session.notifications import Notification

# Seconds for each step of a request: to connect, and until something of the answer has come.
_TIMEOUT_S = 10.0
# Seconds before each further try.
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
_MOST_WAITING = 32
# As the specification recommends; a shorter key can be guessed.
_LEAST_KEY_BYTES = 24
_KEY_PREFIX = "whsec_"
# Answers after which another try may succeed.
_MAY_PASS = (408, 425, 429)


def signing_key(config: NotifyConfig, environment: Mapping[str, str]) -> bytes | None:
    """Return the key that signs messages; None if they are not signed.

    Raises:
        UsageError: The variable is not set, or has no such key.
    """
    name = config.secret_env
    if name is None or config.url is None:
        return None
    text = environment.get(name, "").strip().removeprefix(_KEY_PREFIX)
    try:
        key = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) < _LEAST_KEY_BYTES:
        problem = "is not set" if not text else f"has no key of at least {_LEAST_KEY_BYTES} bytes in base64"
        raise UsageError(f"notify.secret_env: the variable {name} {problem}; make one with: openssl rand -base64 32")
    return key


def signature(key: bytes, message_id: str, timestamp: int, body: bytes) -> str:
    """Return the header that proves who sent a message, and when.

    HMAC-SHA256 over id, time and body, as
    https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md says.
    """
    signed = f"{message_id}.{timestamp}.".encode() + body
    return f"v1,{base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()}"


def post(config: NotifyConfig, key: bytes | None, notification: Notification) -> tuple[str, bool]:
    """Post a notification once.

    Returns:
        What went wrong, empty if nothing did, and whether another try may succeed. Neither has the address, or what
        was answered.
    """
    # Imported late: they take 50 ms that a run without notifications does not need.
    import urllib.error
    import urllib.request

    opener = urllib.request.OpenerDirector()
    # Nothing follows redirects: who answers must not choose where the next request goes.
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.HTTPDefaultErrorHandler,
    ):
        opener.add_handler(handler())
    assert config.url is not None
    body, now = notification.body(config.format), int(time.time())
    headers = {
        "content-type": "application/json",
        "user-agent": f"resilient-training/{__version__}",
        "webhook-id": notification.id,
        "webhook-timestamp": str(now),
    }
    if key is not None:
        headers["webhook-signature"] = signature(key, notification.id, now, body)
    try:
        request = urllib.request.Request(config.url.get_secret_value(), body, headers, method="POST")
        # Nothing of the answer's body is read: it may have no end.
        opener.open(request, timeout=_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        error.close()
        return f"HTTP status {error.code}", error.code >= 500 or error.code in _MAY_PASS
    except urllib.error.URLError as error:
        return _named(error.reason), True
    # Among others what http.client makes of answers that are not HTTP.
    except Exception as error:
        return _named(error), True
    return "", False


def _named(problem: object) -> str:
    """Return the kind of a problem: its text may repeat the address, or be whatever the receiver has sent."""
    if isinstance(problem, OSError) and problem.strerror:
        return problem.strerror
    return type(problem).__name__


class Webhook:
    """Delivers notifications in their order."""

    def __init__(
        self,
        post_once: Callable[[Notification], tuple[str, bool]],
        say: Callable[[str], None],
        *,
        pauses_s: tuple[float, ...] = _PAUSES_S,
    ) -> None:
        """Prepare; the thread starts with the first notification.

        Args:
            post_once: As `post`, for a given address.
            say: Shows a line to the user; called in the thread.
            pauses_s: Seconds before each further try.
        """
        self._post, self._say, self._pauses_s = post_once, say, pauses_s
        self._waiting: queue.Queue[Notification | None] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._closing, self._deadline = threading.Event(), 0.0
        self._is_silent = False

    def put(self, notification: Notification) -> None:
        """Have a notification delivered; returns at once."""
        self._enqueue(notification)
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="notifications", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                # A limit of threads; the next notification tries again.
                self._complain(notification, str(error))
            else:
                self._thread = thread

    def close(self, patience_s: float) -> None:
        """Wait until everything is delivered or given up, for `patience_s` seconds at most."""
        if self._thread is None:
            return
        self._deadline = time.monotonic() + patience_s
        self._closing.set()
        self._enqueue(None)
        self._thread.join(patience_s)
        if self._thread.is_alive():
            self._say(f"notifications: the webhook has not answered within {patience_s:.0f} s; the last may be lost")

    def _enqueue(self, item: Notification | None) -> None:
        while True:
            try:
                self._waiting.put_nowait(item)
                return
            except queue.Full:
                # The newest ones say most.
                self._take(block=False)

    def _take(self, *, block: bool) -> Notification | None:
        try:
            return self._waiting.get(block=block)
        except queue.Empty:
            return None

    def _work(self) -> None:
        while (notification := self._take(block=True)) is not None:
            self._deliver(notification)

    def _deliver(self, notification: Notification) -> None:
        for pause_s in (0.0, *self._pauses_s):
            is_last = self._pause(pause_s)
            problem, may_pass = self._post(notification)
            if not problem:
                self._is_silent = False
                return
            if is_last or not may_pass:
                break
        self._complain(notification, problem)

    def _pause(self, pause_s: float) -> bool:
        """Wait; return whether the run ends before another try could be made."""
        until = time.monotonic() + pause_s
        if not self._closing.wait(pause_s):
            return False
        if until > self._deadline:
            return True
        time.sleep(max(until - time.monotonic(), 0.0))
        return False

    def _complain(self, notification: Notification, problem: str) -> None:
        if not self._is_silent:
            self._is_silent = True
            self._say(f"notification not delivered ({notification.kind}): {problem}; check notify.url")
