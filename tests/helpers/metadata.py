"""The clouds' metadata services on loopback. They are as strict as the real ones: what these refuse, they refuse."""

from __future__ import annotations

import contextlib
import json
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True)
class Request:
    """`headers` are by lower-case name; each parameter of the query occurs once."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]


@dataclass(frozen=True)
class Reply:
    status: int
    text: str = ""
    headers: dict[str, str] = field(default_factory=dict)


class MetadataService:
    """What the three have in common.

    Attributes:
        endpoint: http://127.0.0.1:PORT, for restart.metadata_endpoint.
        seen: requests and the status of their answers, in order.
        spoiled: replies by path that are given instead of the right ones, and how many times.
    """

    def __init__(self) -> None:
        self.endpoint = ""
        self.seen: list[tuple[Request, int]] = []
        self.spoiled: dict[str, tuple[Reply, float]] = {}
        self.changed = threading.Condition()
        self.closed = False

    def reply(self, request: Request) -> Reply:
        """Called with `changed` held."""
        raise NotImplementedError

    def respond(self, method: str, target: str, headers: dict[str, str]) -> Reply:
        parts = urlsplit(target)
        request = Request(method, parts.path, {k: v[-1] for k, v in parse_qs(parts.query).items()}, headers)
        with self.changed:
            if parts.netloc or "x-forwarded-for" in headers or "via" in headers:
                reply = Reply(403, "through a proxy")
            else:
                reply = self._spoiled_reply(parts.path) or self.reply(request)
            self.seen.append((request, reply.status))
            self.changed.notify_all()
        return reply

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 30) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout_s), [(r.method, r.path, s) for r, s in self.seen]

    def count(self, path: str, status: int | None = None) -> int:
        """How many requests for paths like that (a regular expression) were answered, with that status."""
        return sum(re.fullmatch(path, r.path) is not None and status in (None, s) for r, s in self.seen)

    def wait_for_requests(self, path: str, more: int = 1) -> None:
        """Until so many more have been answered."""
        target = self.count(path) + more
        self.wait_until(lambda: self.count(path) >= target)

    def spoil(
        self, path: str, text: str, status: int = 200, headers: dict[str, str] | None = None, times: float = math.inf
    ) -> None:
        with self.changed:
            self.spoiled[path] = Reply(status, text, headers or {}), times
            self.changed.notify_all()

    def _spoiled_reply(self, path: str) -> Reply | None:
        if path not in self.spoiled:
            return None
        reply, times = self.spoiled.pop(path)
        if times > 1:
            self.spoiled[path] = reply, times - 1
        return reply

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class Ec2Metadata(MetadataService):
    """EC2's, with version 1 switched off.

    Attributes:
        ttl_limit_s: tokens live no longer than this.
    """

    TOKEN = "/latest/api/token"
    SPOT = "/latest/meta-data/spot/instance-action"
    REBALANCE = "/latest/meta-data/events/recommendations/rebalance"

    def __init__(self) -> None:
        super().__init__()
        self.ttl_limit_s = 21600
        self._tokens: dict[str, float] = {}
        self._items: dict[str, str] = {"/latest/meta-data/instance-id": "i-0123456789abcdef0"}

    def interrupt(self, action: str = "terminate", in_s: float = 120) -> str:
        """The spot instance is taken back; returns the time that is announced."""
        at = (datetime.now(UTC) + timedelta(seconds=in_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._put(self.SPOT, {"action": action, "time": at})
        return at

    def recommend_rebalance(self, seconds_ago: float = 0) -> str:
        at = (datetime.now(UTC) - timedelta(seconds=seconds_ago)).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._put(self.REBALANCE, {"noticeTime": at})
        return at

    def expire_tokens(self) -> None:
        with self.changed:
            self._tokens.clear()

    def reply(self, request: Request) -> Reply:
        if request.path == self.TOKEN:
            return self._new_token(request)
        if request.method != "GET":
            return Reply(405)
        if self._tokens.get(request.headers.get("x-aws-ec2-metadata-token", ""), 0) <= time.monotonic():
            return Reply(401)
        return Reply(200, self._items[request.path]) if request.path in self._items else Reply(404, "Not Found")

    def _new_token(self, request: Request) -> Reply:
        if request.method != "PUT":
            return Reply(405)
        name = "x-aws-ec2-metadata-token-ttl-seconds"
        ttl = request.headers.get(name, "")
        if not re.fullmatch(r"[0-9]{1,5}", ttl) or not 1 <= int(ttl) <= 21600:
            return Reply(400)
        ttl_s, token = min(int(ttl), self.ttl_limit_s), secrets.token_urlsafe(41)
        self._tokens[token] = time.monotonic() + ttl_s
        return Reply(200, token, {name: str(ttl_s)})

    def _put(self, path: str, document: dict[str, str]) -> None:
        with self.changed:
            self._items[path] = json.dumps(document)


class GoogleMetadata(MetadataService):
    """Compute Engine's.

    Attributes:
        second_s: how long it waits for a second of `timeout_sec`.
    """

    ROOT = "/computeMetadata/v1/instance/"
    PREEMPTED = f"{ROOT}preempted"
    MAINTENANCE = f"{ROOT}maintenance-event"

    def __init__(self) -> None:
        super().__init__()
        self.waiting = 0
        self.second_s = 1.0
        self._values = {"preempted": "FALSE", "maintenance-event": "NONE", "name": "trainer-0"}

    def preempt(self) -> None:
        self._put("preempted", "TRUE")

    def maintain(self, event: str = "TERMINATE_ON_HOST_MAINTENANCE") -> None:
        self._put("maintenance-event", event)

    def reply(self, request: Request) -> Reply:
        name = request.path.removeprefix(self.ROOT)
        if request.headers.get("metadata-flavor") != "Google":
            return Reply(403, "Missing required header Metadata-Flavor")
        if request.method != "GET":
            return Reply(405)
        if name not in self._values:
            return self._reply(404, "not found")
        known = {"wait_for_change", "last_etag", "timeout_sec", "alt", "recursive"}
        timeout = request.query.get("timeout_sec", "0")
        if request.query.keys() - known or not re.fullmatch(r"[0-9]+", timeout):
            return self._reply(400, "bad parameter")
        if request.query.get("wait_for_change") == "true":
            self._wait_for_change(name, request.query.get("last_etag"), int(timeout))
            if spoiled := self._spoiled_reply(request.path):
                return spoiled
        return self._reply(200, self._values[name], self._etag(name))

    def _wait_for_change(self, name: str, last: str | None, timeout_s: int) -> None:
        last = self._etag(name) if last is None else last
        self.waiting += 1
        self.changed.notify_all()
        self.changed.wait_for(
            lambda: self.closed or f"{self.ROOT}{name}" in self.spoiled or self._etag(name) != last,
            timeout_s * self.second_s or None,
        )
        self.waiting -= 1

    def _reply(self, status: int, text: str, etag: str = "0") -> Reply:
        return Reply(status, text, {"Metadata-Flavor": "Google", "ETag": etag, "Content-Type": "application/text"})

    def _etag(self, name: str) -> str:
        return f"{hash((name, self._values[name])) & (1 << 64) - 1:016x}"

    def _put(self, name: str, value: str) -> None:
        with self.changed:
            self._values[name] = value
            self.changed.notify_all()


class AzureMetadata(MetadataService):
    """Azure's, on a machine of a scale set."""

    NAME = "trainers_0"
    EVENTS = "/metadata/scheduledevents"
    COMPUTE_NAME = "/metadata/instance/compute/name"

    def __init__(self) -> None:
        super().__init__()
        self._incarnation = 1
        self._events: list[dict[str, Any]] = []

    def schedule(
        self, kind: str = "Preempt", in_s: float | None = 30, resources: Sequence[str] = ("trainers_1", NAME)
    ) -> str:
        """An event of these machines; one that has begun without `in_s`. Returns its NotBefore."""
        not_before = ""
        if in_s is not None:
            not_before = format_datetime(datetime.now(UTC) + timedelta(seconds=in_s), usegmt=True)
        event = {
            "EventId": secrets.token_hex(16).upper(),
            "EventStatus": "Scheduled" if not_before else "Started",
            "EventType": kind,
            "ResourceType": "VirtualMachine",
            "Resources": list(resources),
            "NotBefore": not_before,
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }
        with self.changed:
            self._incarnation += 1
            self._events.append(event)
        return not_before

    def begin_events(self) -> None:
        with self.changed:
            self._incarnation += 1
            for event in self._events:
                event |= {"EventStatus": "Started", "NotBefore": ""}

    def reply(self, request: Request) -> Reply:
        versions = {self.EVENTS: "2020-07-01", self.COMPUTE_NAME: "2021-02-01"}
        if request.headers.get("metadata") != "true":
            return self._refuse("Bad request. Required metadata header not specified")
        if request.path not in versions:
            return Reply(404, json.dumps({"error": "Not found"}))
        if request.method != "GET":
            return Reply(405, json.dumps({"error": "Method not allowed"}))
        if request.query.get("api-version") != versions[request.path]:
            return self._refuse("Bad request. api-version was not specified in the request, or is unknown")
        if request.path == self.COMPUTE_NAME:
            # Leaves are only served as text.
            return (
                Reply(200, self.NAME) if request.query.get("format") == "text" else self._refuse("Bad request. format")
            )
        return Reply(200, json.dumps({"DocumentIncarnation": self._incarnation, "Events": self._events}))

    def _refuse(self, error: str) -> Reply:
        return Reply(400, json.dumps({"error": error}))


Service = TypeVar("Service", bound=MetadataService)


@contextlib.contextmanager
def serve(service: Service, port: int = 0) -> Iterator[Service]:
    """The service at `service.endpoint`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def handle_one(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            reply = service.respond(self.command, self.path, headers)
            body = reply.text.encode()
            # The client may have disconnected in the meantime.
            with contextlib.suppress(ConnectionError):
                self.send_response(reply.status)
                for name, value in {**reply.headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_one

    class Listener(ThreadingHTTPServer):
        block_on_close = False
        daemon_threads = True

    with Listener(("127.0.0.1", port), Handler) as listener:
        service.endpoint = f"http://127.0.0.1:{listener.server_port}"
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield service
        finally:
            service.close()
            listener.shutdown()
            thread.join()
