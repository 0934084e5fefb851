"""The protocols by which the metadata services of clouds announce the end of an instance."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar
from urllib.parse import quote

from runner.preemption.metadata import REQUEST_TIMEOUT_S, Answer, MetadataClient, Unexpected


@dataclass(frozen=True)
class Notice:
    """An announcement that this instance will end."""

    source: str  # aws, gcp or azure.
    what: str  # What was announced, in words.
    seconds_left: float | None  # Seconds until the instance ends, if the cloud says so.
    # Whether it is a recommendation from before this runner started. It stays posted for hours, and a scheduler
    # that restarts the run on this instance wants the run to continue.
    is_old: bool = False


Finding = tuple[str, Notice]
"""A notice, and the key by which a repeated one is recognised."""


class Cloud:
    """The protocol of one cloud."""

    title: ClassVar[str]  # Name of the cloud.
    endpoint: ClassVar[str] = "http://169.254.169.254"  # URL of its metadata service.
    pause_s: ClassVar[float]  # Seconds between two rounds of checks.
    hint: ClassVar[str] = ""  # What else to check if the service cannot be reached.

    def __init__(self, client: MetadataClient, lead_s: float, pace: float) -> None:
        """Prepare the checks; see `NoticeWatcher`."""
        self.client, self.lead_s, self.pace = client, lead_s, pace
        # Whole seconds, as in the clouds' notices.
        self.started_at = int(time.time())

    @property
    def checks(self) -> tuple[Callable[[], Iterator[Finding]], ...]:
        """The checks of one round. Each sends one request and raises as `MetadataClient.ask` does."""
        raise NotImplementedError


class AmazonWebServices(Cloud):
    """EC2's instance metadata service, version 2, whose requests carry a session token."""

    title = "AWS"
    # Recommended for both checks: docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    pause_s = 5.0
    hint = "in a container, the instance's metadata options must allow 2 hops"
    TOKEN_TTL_S = 21600

    _token = ""
    _token_until = 0.0

    @property
    def checks(self) -> tuple[Callable[[], Iterator[Finding]], ...]:
        """The interruption notice and the rebalance recommendation."""
        return self._spot, self._rebalance

    def _spot(self) -> Iterator[Finding]:
        answer = self._get("/latest/meta-data/spot/instance-action")
        if answer.status != 404:
            document = _mapping(answer)
            action, written = document.get("action"), document.get("time")
            if not isinstance(action, str) or not isinstance(written, str):
                raise answer.malformed()
            seconds_left = _seconds_until(answer, datetime.fromisoformat, written)
            what = f"spot instance-action {action} at {written}"
            yield what, Notice("aws", what, seconds_left)

    def _rebalance(self) -> Iterator[Finding]:
        answer = self._get("/latest/meta-data/events/recommendations/rebalance")
        if answer.status != 404:
            written = _mapping(answer).get("noticeTime")
            if not isinstance(written, str):
                raise answer.malformed()
            # noticeTime is when the risk was seen, not when the instance ends.
            what = f"rebalance recommendation of {written}"
            posted_at = _moment(answer, datetime.fromisoformat, written)
            yield what, Notice("aws", what, None, is_old=posted_at < self.started_at)

    def _get(self, path: str) -> Answer:
        """Return an answer with status 200 or 404; renew a token that is rejected."""
        if time.monotonic() >= self._token_until:
            self._renew_token()
        answer = self.client.get(path, {"X-aws-ec2-metadata-token": self._token})
        if answer.status == 401:
            self._renew_token()
            answer = self.client.get(path, {"X-aws-ec2-metadata-token": self._token})
        return answer if answer.status == 404 else answer.require_ok()

    def _renew_token(self) -> None:
        name = "X-aws-ec2-metadata-token-ttl-seconds"
        asked = time.monotonic()
        answer = self.client.ask("PUT", "/latest/api/token", {name: str(self.TOKEN_TTL_S)}).require_ok()
        if not answer.text or not answer.text.isascii() or not answer.text.isprintable():
            raise answer.malformed()
        try:
            ttl_s = float(answer.headers.get(name.lower(), self.TOKEN_TTL_S))
        except ValueError:
            raise answer.malformed() from None
        self._token, self._token_until = answer.text, asked + ttl_s / 2


class GoogleCloud(Cloud):
    """Compute Engine's metadata server, whose long polls return when the value changes."""

    title = "Google Cloud"
    pause_s = 0.5
    LONG_POLL_S = 10
    # Seconds from the soft to the hard power-off of a spot instance: cloud.google.com/compute/docs/instances/spot
    PREEMPTION_S = 30.0

    _etag = "0"
    # None before the first request.
    _maintenance: str | None = None
    _num_maintenances = 0

    @property
    def checks(self) -> tuple[Callable[[], Iterator[Finding]], ...]:
        """The maintenance event and the preemption."""
        return self._maintenance_event, self._preempted

    def _preempted(self) -> Iterator[Finding]:
        wait_s = max(1, round(self.LONG_POLL_S * self.pace))
        query = f"wait_for_change=true&last_etag={quote(self._etag, safe='')}&timeout_sec={wait_s}"
        answer = self._get(f"preempted?{query}", wait_s + REQUEST_TIMEOUT_S)
        if answer.text not in ("TRUE", "FALSE"):
            self._etag = "0"
            raise answer.malformed()
        # Only after the answer was understood, because the next poll waits for a different one.
        self._etag = answer.headers.get("etag", "0")
        if answer.text == "TRUE":
            yield "preempted", Notice("gcp", "instance preempted", self.PREEMPTION_S)

    def _maintenance_event(self) -> Iterator[Finding]:
        answer = self._get("maintenance-event")
        if answer.text not in ("NONE", "MIGRATE_ON_HOST_MAINTENANCE", "TERMINATE_ON_HOST_MAINTENANCE"):
            raise answer.malformed()
        is_old = self._maintenance is None
        if answer.text != self._maintenance:
            self._maintenance, self._num_maintenances = answer.text, self._num_maintenances + 1
        if answer.text.startswith("TERMINATE"):
            # The warning is a minute ahead, or an hour with GPUs; the answer does not say which.
            what = f"maintenance-event {answer.text}"
            yield f"{what} {self._num_maintenances}", Notice("gcp", what, None, is_old)

    def _get(self, name: str, timeout_s: float | None = None) -> Answer:
        flavor = {"Metadata-Flavor": "Google"}
        answer = self.client.get(f"/computeMetadata/v1/instance/{name}", flavor, timeout_s).require_ok()
        if answer.headers.get("metadata-flavor") != "Google":
            raise Unexpected(f"no Metadata-Flavor: Google for {answer.request}")
        return answer


class Azure(Cloud):
    """Azure's scheduled events.

    They are not acknowledged, because that would start the event sooner and the last snapshot needs the time.
    """

    title = "Azure"
    # learn.microsoft.com/azure/virtual-machines/linux/scheduled-events: a preempted instance has 30 s.
    pause_s = 1.0
    # The first request enables the service, which may take two minutes.
    TIMEOUT_S = 130.0
    # Freeze is not among them: it preserves memory and connections.
    ENDS = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"})

    _name = ""

    @property
    def checks(self) -> tuple[Callable[[], Iterator[Finding]], ...]:
        """The scheduled events."""
        return (self._scheduled_events,)

    def _scheduled_events(self) -> Iterator[Finding]:
        if not self._name:
            self._name = self._instance_name()
        answer = self._get("scheduledevents?api-version=2020-07-01", self.TIMEOUT_S)
        events = _mapping(answer).get("Events")
        if not isinstance(events, list):
            raise answer.malformed()
        num_malformed = 0
        for event in events:
            try:
                yield from self._event(answer, event)
            except (Unexpected, KeyError, TypeError, AttributeError):
                num_malformed += 1
        if num_malformed:
            raise answer.malformed()

    def _event(self, answer: Answer, event: Any) -> Iterator[Finding]:
        """Select events of this instance; each instance of a scale set sees the events of all."""
        kind, resources = event["EventType"], [name.casefold() for name in event["Resources"]]
        if kind not in self.ENDS or self._name.casefold() not in resources:
            return
        # Imported late because it is slow, like http.client.
        from email.utils import parsedate_to_datetime

        not_before = event.get("NotBefore") or ""
        # An event that has begun has no NotBefore.
        seconds_left = _seconds_until(answer, parsedate_to_datetime, not_before) if not_before else 0.0
        # The replacement of a failing host is announced days ahead. A run that left at once would be restarted on the
        # same instance, with the same notice.
        if seconds_left <= self.lead_s:
            what = f"{kind} scheduled not before {not_before}" if not_before else f"{kind} started"
            yield str(event["EventId"]), Notice("azure", what, seconds_left)

    def _instance_name(self) -> str:
        answer = self._get("instance/compute/name?api-version=2021-02-01&format=text").require_ok()
        if not answer.text:
            raise answer.malformed()
        return answer.text

    def _get(self, path: str, timeout_s: float | None = None) -> Answer:
        return self.client.get(f"/metadata/{path}", {"Metadata": "true"}, timeout_s).require_ok()


CLOUDS: Mapping[str, type[Cloud]] = {"aws": AmazonWebServices, "gcp": GoogleCloud, "azure": Azure}


def _mapping(answer: Answer) -> dict[str, Any]:
    try:
        document = json.loads(answer.text)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise answer.malformed()
    return document


def _moment(answer: Answer, parse: Callable[[str], datetime], written: str) -> float:
    """Return seconds since the epoch."""
    try:
        moment = parse(written)
    except ValueError:
        raise answer.malformed() from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def _seconds_until(answer: Answer, parse: Callable[[str], datetime], written: str) -> float:
    return max(0.0, _moment(answer, parse, written) - time.time())
