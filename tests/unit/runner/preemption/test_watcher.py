"""Each cloud's notices, from servers on loopback that speak its protocol."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from email.utils import parsedate_to_datetime
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import metadata as services
from helpers.metadata import AzureMetadata, Ec2Metadata, GoogleMetadata, MetadataService, serve
from infra.ports import free_port

from runner.preemption import Notice, NoticeWatcher, clouds, metadata
from runner.preemption.metadata import MetadataClient, Unavailable
from runner.session.session import Session
from runner.system.event_loop import StopRequest

# Longer than any wait of these tests: what waits for an answer waits for that alone.
REQUEST_TIMEOUT_S = 60.0


class Told:
    """What a watcher has told."""

    def __init__(self) -> None:
        self.notices: list[Notice] = []
        self.reports: list[str] = []
        self._changed = threading.Condition()

    def notify(self, notice: Notice) -> None:
        with self._changed:
            self.notices.append(notice)
            self._changed.notify_all()

    def report(self, line: str) -> None:
        with self._changed:
            self.reports.append(line)
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool], timeout_s: float = 30) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, timeout_s), (self.notices, self.reports)

    def next_notice(self) -> Notice:
        """The only one so far, and no line."""
        self.wait(lambda: bool(self.notices))
        assert self.reports == []
        (notice,) = self.notices
        return notice


@contextlib.contextmanager
def watching(provider: str, endpoint: str, pace: float = 0.01, lead_s: float = 300) -> Iterator[Told]:
    told = Told()
    watcher = NoticeWatcher(provider, endpoint, told.notify, told.report, lead_s=lead_s, pace=pace)
    watcher.start()
    try:
        yield told
    finally:
        end(watcher)


def end(watcher: NoticeWatcher) -> None:
    """Whatever it does just now, of its own accord it would do that for longer."""
    watcher.close()
    watcher._thread.join(30)
    assert not watcher._thread.is_alive()


class Clock:
    """Of the watcher and of the service alike; stands still where it is not set."""

    def __init__(self) -> None:
        self.now = time.time()

    def time(self) -> float:
        return self.now

    monotonic = time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(clouds, "time", clock)
    monkeypatch.setattr(services, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (clouds, metadata):
        monkeypatch.setattr(module, "REQUEST_TIMEOUT_S", REQUEST_TIMEOUT_S)


@pytest.fixture
def ec2() -> Iterator[Ec2Metadata]:
    with serve(Ec2Metadata()) as service:
        yield service


@pytest.fixture
def google() -> Iterator[GoogleMetadata]:
    with serve(hasty_google()) as service:
        yield service


@pytest.fixture
def azure() -> Iterator[AzureMetadata]:
    with serve(AzureMetadata()) as service:
        yield service


def test_aws_spot_interruption_is_told_once_with_its_time(ec2: Ec2Metadata, clock: Clock) -> None:
    with watching("aws", ec2.endpoint) as told:
        ec2.wait_for_requests(ec2.REBALANCE, 3)
        assert told.notices == []
        at = ec2.interrupt("terminate", in_s=3600)
        notice = told.next_notice()
        assert (notice.source, notice.what) == ("aws", f"spot instance-action terminate at {at}")
        assert notice.seconds_left == datetime.fromisoformat(at).timestamp() - clock.now
        ec2.wait_for_requests(ec2.SPOT, 3)
        told.next_notice()
    assert ec2.count(ec2.TOKEN) == 1
    assert {status for _, status in ec2.seen} == {200, 404}


def test_aws_rebalance_recommendation_says_no_time(ec2: Ec2Metadata) -> None:
    with watching("aws", ec2.endpoint) as told:
        at = ec2.recommend_rebalance()
        assert told.next_notice() == Notice("aws", f"rebalance recommendation of {at}", None)
        ec2.interrupt("stop")
        told.wait(lambda: len(told.notices) == 2)
        assert told.notices[1].what.startswith("spot instance-action stop at ")


def test_aws_rebalance_recommendation_from_before_the_start(ec2: Ec2Metadata) -> None:
    at = ec2.recommend_rebalance(seconds_ago=2)
    with watching("aws", ec2.endpoint) as told:
        assert told.next_notice() == Notice("aws", f"rebalance recommendation of {at}", None, is_old=True)


@pytest.mark.parametrize("is_old", [False, True])
def test_a_recommendation_from_before_the_start_stops_nothing(is_old: bool) -> None:
    """In each new container of AWS Batch the journal is empty: one notice spent all attempts of the job."""
    messages: list[str] = []
    session: Any = object.__new__(Session)
    session.stop, session.display = StopRequest(), SimpleNamespace(message=messages.append)
    session.record = lambda event: None
    session._on_notice(Notice("aws", "rebalance recommendation", None, is_old))
    assert bool(session.stop) is not is_old
    expected = ["aws: rebalance recommendation: posted before this runner started; continuing"]
    assert messages == (expected if is_old else [])


def test_aws_token_is_renewed_before_it_expires(ec2: Ec2Metadata, clock: Clock) -> None:
    ec2.ttl_limit_s = 2
    with watching("aws", ec2.endpoint) as told:
        for number in (1, 2, 3):
            ec2.wait_for_requests(ec2.REBALANCE, 3)
            assert ec2.count(ec2.TOKEN) == number
            clock.now += 1
        ec2.interrupt()
        told.next_notice()
    assert ec2.count(".*", status=401) == 0


def test_aws_token_that_is_refused_is_replaced_at_once(ec2: Ec2Metadata) -> None:
    with watching("aws", ec2.endpoint) as told:
        ec2.wait_for_requests(ec2.REBALANCE)
        ec2.expire_tokens()
        ec2.interrupt()
        told.next_notice()
    assert ec2.count(".*", status=401) == 1
    assert ec2.count(ec2.TOKEN, status=200) == 2


def test_gcp_preemption_ends_the_long_poll(google: GoogleMetadata, monkeypatch: pytest.MonkeyPatch) -> None:
    # Longer than the notice is waited for.
    google.second_s = 1.0
    monkeypatch.setattr(clouds.GoogleCloud, "LONG_POLL_S", 6000)
    with watching("gcp", google.endpoint) as told:
        google.wait_until(lambda: google.waiting == 1)
        assert told.notices == []
        google.preempt()
        assert told.next_notice() == Notice("gcp", "instance preempted", 30.0)
        google.wait_until(lambda: google.waiting == 1)
        told.next_notice()
    assert {status for _, status in google.seen} == {200}


def test_gcp_polls_on_when_nothing_changes(google: GoogleMetadata) -> None:
    with watching("gcp", google.endpoint) as told:
        google.wait_for_requests(google.PREEMPTED, 2)
        assert (told.notices, told.reports) == ([], [])
        # Unanswered for the time that it asks for, each time.
        queries = [request.query for request, _ in google.seen if request.path == google.PREEMPTED]
        assert {(query["wait_for_change"], query["timeout_sec"]) for query in queries} == {("true", "1")}
        google.preempt()
        told.next_notice()


def test_gcp_maintenance_from_before_the_start(google: GoogleMetadata) -> None:
    google.maintain()
    with watching("gcp", google.endpoint) as told:
        assert told.next_notice().is_old


def test_gcp_each_maintenance_that_terminates_is_told(google: GoogleMetadata) -> None:
    with watching("gcp", google.endpoint) as told:
        google.maintain("MIGRATE_ON_HOST_MAINTENANCE")
        google.wait_for_requests(google.MAINTENANCE, 2)
        assert told.notices == []
        google.maintain()
        notice = Notice("gcp", "maintenance-event TERMINATE_ON_HOST_MAINTENANCE", None)
        assert told.next_notice() == notice
        google.wait_for_requests(google.MAINTENANCE, 2)
        told.next_notice()
        google.maintain("NONE")
        google.wait_for_requests(google.MAINTENANCE, 2)
        google.maintain()
        told.wait(lambda: len(told.notices) == 2)
        assert told.notices == [notice, notice]


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_azure_event_is_told_once_with_its_time(kind: str, azure: AzureMetadata, clock: Clock) -> None:
    with watching("azure", azure.endpoint) as told:
        azure.wait_for_requests(azure.EVENTS, 2)
        not_before = azure.schedule(kind, in_s=250)
        notice = told.next_notice()
        assert (notice.source, notice.what) == ("azure", f"{kind} scheduled not before {not_before}")
        assert notice.seconds_left == parsedate_to_datetime(not_before).timestamp() - clock.now
        azure.begin_events()
        azure.wait_for_requests(azure.EVENTS, 3)
        told.next_notice()
    # Acknowledged, it would begin at once.
    assert {(request.method, status) for request, status in azure.seen} == {("GET", 200)}


def test_azure_events_that_do_not_end_this_machine_are_not_told(azure: AzureMetadata) -> None:
    with watching("azure", azure.endpoint) as told:
        azure.schedule("Preempt", resources=["trainers_1", "trainers_00"])
        azure.schedule("Freeze")
        azure.wait_for_requests(azure.EVENTS, 3)
        assert (told.notices, told.reports) == ([], [])
        azure.schedule("Preempt", in_s=None)
        assert told.next_notice() == Notice("azure", "Preempt started", 0.0)


def test_azure_event_of_a_later_day_is_told_when_it_is_time(azure: AzureMetadata, clock: Clock) -> None:
    with watching("azure", azure.endpoint, lead_s=60) as told:
        at = parsedate_to_datetime(azure.schedule("Redeploy", in_s=3600)).timestamp()
        for left in (3600, 61):
            clock.now = at - left
            azure.wait_for_requests(azure.EVENTS, 3)
            assert told.notices == []
        clock.now = at - 60
        assert told.next_notice().seconds_left == 60


def hasty_google() -> GoogleMetadata:
    """Whose seconds are short: a client cannot ask for less than one."""
    service = GoogleMetadata()
    service.second_s = 0.05
    return service


def service_of(provider: str) -> MetadataService:
    services: dict[str, Callable[[], MetadataService]] = {
        "aws": Ec2Metadata,
        "gcp": hasty_google,
        "azure": AzureMetadata,
    }
    return services[provider]()


def announce(service: MetadataService) -> None:
    if isinstance(service, Ec2Metadata):
        service.interrupt()
    elif isinstance(service, GoogleMetadata):
        service.preempt()
    elif isinstance(service, AzureMetadata):
        service.schedule()


every_cloud = pytest.mark.parametrize("provider", ["aws", "gcp", "azure"])


@every_cloud
def test_service_that_is_down_is_reported_once_and_asked_until_it_is_up(provider: str) -> None:
    port = free_port()
    with watching(provider, f"http://127.0.0.1:{port}") as told:
        told.wait(lambda: bool(told.reports))
        line = told.reports[0]
        assert f"metadata service at http://127.0.0.1:{port} cannot be reached (Connection refused" in line
        assert "restart.preemption_notices" in line and "\n" not in line
        with serve(service_of(provider), port) as service:
            announce(service)
            told.wait(lambda: bool(told.notices))
        # And down again.
        with socket.create_server(("127.0.0.1", port)) as listener:
            for _ in range(5):
                listener.accept()[0].close()
        assert len(told.reports) == len(told.notices) == 1


@every_cloud
def test_moment_of_trouble_is_not_reported(provider: str) -> None:
    with serve(service_of(provider)) as service:
        paths = [Ec2Metadata.TOKEN, GoogleMetadata.PREEMPTED, GoogleMetadata.MAINTENANCE, AzureMetadata.EVENTS]
        for path in paths:
            # In two rounds of checks, of which each of EC2's two asks for a token.
            service.spoil(path, "", status=503, times=4 if path == Ec2Metadata.TOKEN else 2)
        announce(service)
        with watching(provider, service.endpoint) as told:
            told.next_notice()
        assert service.count(".*", status=503) == {"aws": 4, "gcp": 4, "azure": 2}[provider]


@every_cloud
def test_another_clouds_service_is_reported_once(provider: str) -> None:
    other = {"aws": "azure", "gcp": "aws", "azure": "gcp"}[provider]
    with serve(service_of(other)) as service, watching(provider, service.endpoint) as told:
        told.wait(lambda: bool(told.reports))
        service.wait_until(lambda: len(service.seen) > 5)
        (line,) = told.reports
        assert f"the answer of {service.endpoint} is not from " in line and "Is this instance on " in line
        assert told.notices == []


@pytest.mark.parametrize(
    ("provider", "path", "text"),
    [
        ("aws", Ec2Metadata.SPOT, "<html>terminate</html>"),
        ("aws", Ec2Metadata.SPOT, '{"action": "terminate", "time": "soon"}'),
        ("aws", Ec2Metadata.SPOT, '{"action": "terminate"}'),
        ("aws", Ec2Metadata.SPOT, '["terminate"]'),
        ("aws", Ec2Metadata.REBALANCE, '{"noticeTime": 3}'),
        ("aws", Ec2Metadata.TOKEN, ""),
        ("aws", Ec2Metadata.TOKEN, "two\nlines"),
        ("gcp", GoogleMetadata.PREEMPTED, "TRUE-ish"),
        ("gcp", GoogleMetadata.MAINTENANCE, ""),
        ("azure", AzureMetadata.EVENTS, "{"),
        ("azure", AzureMetadata.EVENTS, '{"Events": {}}'),
        ("azure", AzureMetadata.EVENTS, '{"Events": [7, {"EventType": "Preempt", "Resources": null}]}'),
        (
            "azure",
            AzureMetadata.EVENTS,
            '{"Events": [{"EventId": "1", "EventType": "Preempt", "Resources": ["trainers_0"], "NotBefore": "soon"}]}',
        ),
        ("azure", AzureMetadata.COMPUTE_NAME, ""),
    ],
)
def test_malformed_answer_is_reported_once_and_ignored(provider: str, path: str, text: str) -> None:
    with serve(service_of(provider)) as service:
        service.spoil(path, text, headers={"Metadata-Flavor": "Google"})
        with watching(provider, service.endpoint) as told:
            told.wait(lambda: bool(told.reports))
            service.wait_for_requests(path, 2)
            assert told.notices == []
            service.spoiled.clear()
            announce(service)
            told.wait(lambda: bool(told.notices))
        (line,) = told.reports
        assert path in line and "ignored" in line


@pytest.mark.parametrize(("text", "status"), [("?", 200), ("", 403), ("", 500)])
def test_question_that_fails_does_not_hide_the_other(text: str, status: int, ec2: Ec2Metadata) -> None:
    ec2.spoil(ec2.SPOT, text, status)
    with watching("aws", ec2.endpoint) as told:
        ec2.recommend_rebalance()
        told.wait(lambda: bool(told.notices))


def test_malformed_event_does_not_hide_the_others(azure: AzureMetadata) -> None:
    azure._events.append({"EventType": "Preempt"})
    with watching("azure", azure.endpoint) as told:
        azure.schedule()
        told.wait(lambda: bool(told.notices and told.reports))
        assert told.notices[0].what.startswith("Preempt scheduled")


def test_google_must_say_that_it_is_google(google: GoogleMetadata) -> None:
    google.spoil(google.PREEMPTED, "TRUE")
    with watching("gcp", google.endpoint) as told:
        told.wait(lambda: bool(told.reports))
        assert "no Metadata-Flavor: Google" in told.reports[0]
        assert told.notices == []


@every_cloud
def test_proxies_of_the_environment_are_not_used(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("no_proxy", "")
    with serve(service_of(provider)) as service, watching(provider, service.endpoint) as told:
        announce(service)
        told.next_notice()
        assert all(status != 403 for _, status in service.seen)


def test_close_during_a_long_poll_is_prompt_and_silent(google: GoogleMetadata, monkeypatch: pytest.MonkeyPatch) -> None:
    google.second_s = 1.0
    monkeypatch.setattr(clouds.GoogleCloud, "LONG_POLL_S", 60)
    told = Told()
    watcher = NoticeWatcher("gcp", google.endpoint, told.notify, told.report)
    watcher.start()
    google.wait_until(lambda: google.waiting == 1)
    end(watcher)
    assert (told.notices, told.reports) == ([], [])


@every_cloud
def test_close_is_prompt_when_nothing_is_answered(provider: str) -> None:
    told = Told()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        watcher = NoticeWatcher(provider, f"http://127.0.0.1:{listener.getsockname()[1]}", told.notify, told.report)
        watcher.start()
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(1)
            end(watcher)
    assert (told.notices, told.reports) == ([], [])


def test_answer_that_closing_cut_short_is_not_reported() -> None:
    told = Told()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        watcher = NoticeWatcher("gcp", f"http://127.0.0.1:{listener.getsockname()[1]}", told.notify, told.report)
        watcher.start()
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(1)
            connection.sendall(b"HTTP/1.1 200 OK\r\nMetadata-Flavor: Google\r\nContent-Length: 4\r\n\r\nNO")
            end(watcher)
    assert (told.notices, told.reports) == ([], [])


def test_close_is_prompt_when_nobody_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "CONNECT_TIMEOUT_S", 0.1)
    told = Told()
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as stack:
        # A full backlog: the next to connect waits as for a machine that is not there.
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        watcher = NoticeWatcher("aws", endpoint, told.notify, told.report, pace=0.01)
        watcher.start()
        told.wait(lambda: bool(told.reports))
        assert "timed out" in told.reports[0]
        end(watcher)
        assert len(told.reports) == 1


def test_once_closed_no_connection_is_begun() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        client = MetadataClient(f"http://127.0.0.1:{listener.getsockname()[1]}")
        client.close()
        with pytest.raises(Unavailable, match="closed"):
            client.get("/", {})
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_close_during_a_pause_and_without_a_start(ec2: Ec2Metadata) -> None:
    told = Told()
    watcher = NoticeWatcher("aws", ec2.endpoint, told.notify, told.report, pace=20)
    watcher.start()
    # It may have been answered by now.
    ec2.wait_until(lambda: ec2.count(ec2.REBALANCE) >= 1)
    end(watcher)
    NoticeWatcher("aws", ec2.endpoint, told.notify, told.report).close()


def test_the_notice_may_close_the_watcher(ec2: Ec2Metadata) -> None:
    closed = threading.Event()

    def notify(_: Notice) -> None:
        watcher.close()
        closed.set()

    ec2.interrupt()
    ec2.recommend_rebalance()
    watcher = NoticeWatcher("aws", ec2.endpoint, notify, lambda line: None)
    watcher.start()
    assert closed.wait(30)
    watcher._thread.join(30)
    assert not watcher._thread.is_alive()


TTL, TOKEN = "X-aws-ec2-metadata-token-ttl-seconds", "X-aws-ec2-metadata-token"
FLAVOR, METADATA = {"Metadata-Flavor": "Google"}, {"Metadata": "true"}
EVENTS = AzureMetadata.EVENTS


@pytest.mark.parametrize(
    ("provider", "method", "target", "headers", "status"),
    [
        ("aws", "PUT", Ec2Metadata.TOKEN, {TTL: "21600"}, 200),
        ("aws", "PUT", Ec2Metadata.TOKEN, {TTL: "21601"}, 400),
        ("aws", "PUT", Ec2Metadata.TOKEN, {TTL: "0"}, 400),
        ("aws", "PUT", Ec2Metadata.TOKEN, {}, 400),
        ("aws", "PUT", Ec2Metadata.TOKEN, {TTL: "60", "X-Forwarded-For": "10.0.0.1"}, 403),
        ("aws", "GET", Ec2Metadata.TOKEN, {TTL: "60"}, 405),
        # Version 1.
        ("aws", "GET", Ec2Metadata.SPOT, {}, 401),
        ("aws", "GET", Ec2Metadata.SPOT, {TOKEN: "made-up"}, 401),
        ("gcp", "GET", GoogleMetadata.PREEMPTED, FLAVOR, 200),
        ("gcp", "GET", GoogleMetadata.PREEMPTED, {}, 403),
        ("gcp", "GET", GoogleMetadata.PREEMPTED, {**FLAVOR, "X-Forwarded-For": "10.0.0.1"}, 403),
        ("gcp", "GET", f"{GoogleMetadata.PREEMPTED}?wait_for_change=true&timeout_sec=1.5", FLAVOR, 400),
        ("gcp", "GET", f"http://metadata.google.internal{GoogleMetadata.PREEMPTED}", FLAVOR, 403),
        ("azure", "GET", f"{EVENTS}?api-version=2020-07-01", METADATA, 200),
        ("azure", "GET", f"{EVENTS}?api-version=2020-07-02", METADATA, 400),
        ("azure", "GET", EVENTS, METADATA, 400),
        ("azure", "GET", f"{EVENTS}?api-version=2020-07-01", {}, 400),
        ("azure", "GET", f"{EVENTS}?api-version=2020-07-01", {**METADATA, "X-Forwarded-For": "10.0.0.1"}, 403),
        ("azure", "GET", f"{AzureMetadata.COMPUTE_NAME}?api-version=2021-02-01", METADATA, 400),
    ],
)
def test_servers_of_these_tests_are_strict(
    provider: str, method: str, target: str, headers: dict[str, str], status: int
) -> None:
    with serve(service_of(provider)) as service:
        connection = http.client.HTTPConnection(service.endpoint.removeprefix("http://"), timeout=120)
        with contextlib.closing(connection):
            connection.request(method, target, headers=headers)
            assert connection.getresponse().status == status
