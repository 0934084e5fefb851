"""Preemption notices of cloud providers: watching for one that will end this instance."""

from __future__ import annotations

import threading
from collections.abc import Callable

from runner.preemption.clouds import CLOUDS, Notice
from runner.preemption.metadata import MetadataClient, Unavailable, Unexpected

__all__ = ["Notice", "NoticeWatcher"]

CLOSE_TIMEOUT_S = 1.0
BACKOFF_INITIAL_S = 0.5
# A notice may be only 30 s ahead, so a service that recovers must be asked soon.
BACKOFF_MAX_S = 8.0
# Failures in a row before one is reported. GCP's service fails briefly whenever the instance is migrated.
PATIENCE = 3


class NoticeWatcher:
    """Polls the cloud's metadata service for notices, in its own thread."""

    def __init__(
        self,
        provider: str,
        endpoint: str | None,
        notify: Callable[[Notice], None],
        report: Callable[[str], None],
        *,
        lead_s: float = 300.0,
        pace: float = 1.0,
    ) -> None:
        """Prepare the watcher without starting it.

        Args:
            provider: aws, gcp or azure.
            endpoint: http://host:port of the service; None for the cloud's own.
            notify: Called in the thread with each notice, once.
            report: Called in the thread with a line that says why no notices arrive, at most once for each of two
                reasons: the service cannot be reached, or the answers are not those of this cloud.
            lead_s: Notices of an end that is further away than this, in seconds, are held back until then.
            pace: Factor of all waits, for tests.
        """
        kind = CLOUDS[provider]
        self._endpoint = endpoint or kind.endpoint
        self._client = MetadataClient(self._endpoint)
        self._cloud = kind(self._client, lead_s, pace)
        self._notify, self._report, self._pace = notify, report, pace
        self._notified: set[str] = set()
        self._reported: set[type[Exception]] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="preemption notices", daemon=True)

    def start(self) -> None:
        """Start polling."""
        self._thread.start()

    def close(self) -> None:
        """Stop polling. Afterwards no callback is started; one that runs already may continue."""
        self._closing.set()
        self._client.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            # A name lookup cannot be interrupted, so the thread may outlive the time-out.
            self._thread.join(CLOSE_TIMEOUT_S)

    def _watch(self) -> None:
        num_failures = 0
        while not self._closing.is_set():
            error = self._ask()
            num_failures = num_failures + 1 if error else 0
            if error and num_failures == PATIENCE:
                self._report_once(error)
            backoff_s = min(BACKOFF_MAX_S, BACKOFF_INITIAL_S * 2 ** min(num_failures, 10))
            self._closing.wait((backoff_s if error else self._cloud.pause_s) * self._pace)

    def _ask(self) -> Exception | None:
        """Run all checks once, whether or not some of them fail; return an error only if all failed."""
        failures: list[Exception] = []
        for check in self._cloud.checks:
            if self._closing.is_set():
                return None
            try:
                for key, notice in check():
                    self._notify_once(key, notice)
            except Unavailable as error:
                failures.append(error)
            except Unexpected as error:
                failures.append(error)
                self._report_once(error)
        return failures[-1] if len(failures) == len(self._cloud.checks) else None

    def _notify_once(self, key: str, notice: Notice) -> None:
        if key not in self._notified and not self._closing.is_set():
            self._notified.add(key)
            self._notify(notice)

    def _report_once(self, error: Exception) -> None:
        if type(error) in self._reported or self._closing.is_set():
            return
        self._reported.add(type(error))
        title, hint = self._cloud.title, self._cloud.hint
        if isinstance(error, Unavailable):
            problem = f"{title}'s metadata service at {self._endpoint} cannot be reached ({error}); still trying"
            hint = f" ({hint})" if hint else ""
        else:
            problem = f"the answer of {self._endpoint} is not from {title}'s metadata service ({error}); ignored"
            hint = ""
        self._report(
            f"preemption notices: {problem}. Is this instance on {title}?{hint} "
            f"If not, set restart.preemption_notices to its cloud, or to off"
        )
