"""Whether the cloud is about to take this machine away."""

from __future__ import annotations

import threading
from collections.abc import Callable

from runner.preemption.clouds import CLOUDS, Notice
from runner.preemption.metadata import MetadataClient, Unavailable, Unexpected

__all__ = ["Notice", "NoticeWatcher"]

CLOSE_TIMEOUT_S = 1.0
BACKOFF_INITIAL_S = 0.5
# A service that comes back with a notice of 30 s must not be asked too late.
BACKOFF_MAX_S = 8.0
# A service that is away for less is not worth a line: GCP's is, whenever the machine is migrated.
PATIENCE = 3


class NoticeWatcher:
    """Asks the cloud's metadata service, in a thread of its own, whether this machine is about to go."""

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
        """
        Args:
            provider: aws, gcp or azure.
            endpoint: http://host:port; None: the cloud's own.
            notify: told each notice once, from the thread.
            report: told in a line, from the thread, why notices do not arrive; at most once for each of two reasons:
                the service cannot be reached, and what answers does not answer as this cloud does.
            lead_s: notices that say that the machine goes later than so are told when it is time.
            pace: factor of all pauses, for tests.
        """
        kind = CLOUDS[provider]
        self._endpoint = endpoint or kind.endpoint
        self._client = MetadataClient(self._endpoint)
        self._cloud = kind(self._client, lead_s, pace)
        self._notify, self._report, self._pace = notify, report, pace
        self._told: set[str] = set()
        self._reported: set[type[Exception]] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="preemption notices", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Nothing is told any more when this returns, unless it is being told just now."""
        self._closing.set()
        self._client.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            # Only a host name that is being looked up cannot be interrupted.
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
        """One round of questions. One that fails does not keep the others from being asked; the last one's failure is
        returned where all have failed."""
        failures: list[Exception] = []
        for check in self._cloud.checks:
            if self._closing.is_set():
                return None
            try:
                for key, notice in check():
                    self._tell(key, notice)
            except Unavailable as error:
                failures.append(error)
            except Unexpected as error:
                failures.append(error)
                self._report_once(error)
        return failures[-1] if len(failures) == len(self._cloud.checks) else None

    def _tell(self, key: str, notice: Notice) -> None:
        if key not in self._told and not self._closing.is_set():
            self._told.add(key)
            self._notify(notice)

    def _report_once(self, error: Exception) -> None:
        if type(error) in self._reported or self._closing.is_set():
            return
        self._reported.add(type(error))
        title, mend = self._cloud.title, self._cloud.mend
        if isinstance(error, Unavailable):
            problem = (
                f"{title}'s metadata service at {self._endpoint} cannot be reached ({error}); asking on until it can"
            )
            mend = f" ({mend})" if mend else ""
        else:
            problem = f"what {self._endpoint} answers is not {title}'s metadata ({error}); ignored"
            mend = ""
        self._report(
            f"preemption notices: {problem}. Is this machine on {title}?{mend} "
            f"Else set restart.preemption_notices to its cloud, or to off"
        )
