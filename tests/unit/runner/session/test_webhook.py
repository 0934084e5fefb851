"""Delivery to receivers that are well, slow, broken, hostile or gone, over real connections."""

from __future__ import annotations

import base64
import functools
import socket
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from helpers.receiver import answer, receiver

from runner.config.schema import NotifyConfig
from runner.errors import UsageError
from runner.session import webhook
from runner.session.notifications import Notification
from runner.session.webhook import Webhook, post, signature, signing_key

KEY = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def config(url: str, **more: object) -> NotifyConfig:
    return NotifyConfig.model_validate({"url": url, **more})


def notification(kind: str = "failed") -> Notification:
    return Notification(kind, "text", {}, 1.0)


def send(url: str, patience_s: float = 5.0, count: int = 1) -> tuple[list[str], float]:
    """What is said of `count` notifications, and how many seconds the run was held up."""
    said: list[str] = []
    hook = Webhook(functools.partial(post, config(url), None), said.append, pauses_s=(0.01, 0.01))
    began = time.monotonic()
    for _ in range(count):
        hook.put(notification())
    hook.close(patience_s)
    return said, time.monotonic() - began


def test_a_signature_is_that_of_the_specification() -> None:
    """Made by the libraries of https://github.com/standard-webhooks/standard-webhooks (Python, 1.1.0)."""
    key = signing_key(config("https://host/", secret_env="SECRET"), {"SECRET": KEY})
    assert key is not None
    made = signature(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert made == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@pytest.mark.parametrize(
    ("value", "problem"),
    [("", "is not set"), ("whsec_short", "no key of at least 24"), (base64.b64encode(b"2" * 23).decode(), "no key of")],
)
def test_a_key_that_is_none_is_refused_and_not_repeated(value: str, problem: str) -> None:
    with pytest.raises(UsageError, match=f"the variable SECRET .*{problem}.*openssl rand") as raised:
        signing_key(config("https://host/", secret_env="SECRET"), {"SECRET": value})
    assert not value or value not in str(raised.value)


def test_a_message_is_signed_and_named() -> None:
    with receiver() as served:
        wanted, one = config(served.url, secret_env="SECRET"), notification()
        key = signing_key(wanted, {"SECRET": KEY})
        assert key is not None and post(wanted, key, one) == ("", False)
    [(headers, body)] = served.requests
    assert headers["webhook-id"] == one.id and headers["content-type"] == "application/json"
    assert headers["webhook-signature"] == signature(key, one.id, int(headers["webhook-timestamp"]), body)
    assert abs(int(headers["webhook-timestamp"]) - time.time()) < 60 and body == one.body("json")


def test_what_fails_for_now_is_tried_again_as_the_same_message() -> None:
    def respond(handler: BaseHTTPRequestHandler, number: int) -> None:
        answer([500, 429, 204][number])(handler, number)

    with receiver(respond) as served:
        assert send(served.url)[0] == []
    assert len({headers["webhook-id"] for headers, _ in served.requests}) == 1 and len(served.requests) == 3


def test_a_wrong_address_is_not_tried_again_and_said_once() -> None:
    with receiver(answer(404)) as served:
        said, _ = send(served.url, count=3)
    assert said == ["notification not delivered (failed): HTTP status 404; check notify.url"]
    assert len(served.requests) == 3


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(status: int) -> None:
    def respond(handler: BaseHTTPRequestHandler, number: int) -> None:
        handler.send_response(status)
        handler.send_header("location", locations[number])
        handler.end_headers()

    with receiver() as other, receiver(respond) as served:
        locations = [other.url, "file:///etc/passwd"]
        assert f"HTTP status {status}" in send(served.url, count=2)[0][0] and len(served.requests) == 2
    assert not other.requests


def test_an_answer_without_an_end_is_not_read() -> None:
    ended = threading.Event()

    def respond(handler: BaseHTTPRequestHandler, _: int) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(b"x" * 65536)
        except OSError:
            ended.set()

    with receiver(respond) as served:
        said, took_s = send(served.url)
    assert said == [] and took_s < 4 and ended.wait(10) and len(served.requests) == 1


def serve_raw(data: bytes, *, pause_s: float = 0.0) -> tuple[socket.socket, str]:
    """A port that sends bytes on each connection, again and again if there is a pause."""
    listening = socket.create_server(("127.0.0.1", 0))

    def work() -> None:
        while True:
            try:
                connection, _ = listening.accept()
                connection.recv(65536)
                connection.sendall(data)
                while pause_s:
                    time.sleep(pause_s)
                    connection.sendall(data)
                connection.close()
            except OSError:
                return

    threading.Thread(target=work, daemon=True).start()
    return listening, f"http://127.0.0.1:{listening.getsockname()[1]}/"


@pytest.mark.parametrize(
    ("data", "problem"),
    [(b"\x1b[2Jgarbage\r\n\r\n", "BadStatusLine"), (b"", "RemoteDisconnected"), (b"HTTP/1.1 " * 9999, "LineTooLong")],
)
def test_an_answer_that_is_not_http(data: bytes, problem: str) -> None:
    listening, url = serve_raw(data)
    with listening:
        said, _ = send(url)
    assert len(said) == 1 and (problem in said[0] or "reset" in said[0]) and "\x1b" not in said[0], said


def test_a_receiver_that_drips_costs_the_end_of_a_run_its_patience_only() -> None:
    listening, url = serve_raw(b"H", pause_s=0.05)
    with listening:
        said, took_s = send(url, patience_s=0.3, count=100)
    assert len(said) == 1 and "has not answered within" in said[0] and took_s < 3


def test_nobody_listens_and_nobody_is_held_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    said, took_s = send(f"http://127.0.0.1:{port}/t0ken")
    assert said == ["notification not delivered (failed): Connection refused; check notify.url"] and took_s < 4


def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path) -> None:
    import subprocess

    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "1"]
    subprocess.run([*made, "-keyout", "key", "-out", "certificate"], cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
    heard: list[bytes] = []

    def work() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            try:
                with context.wrap_socket(connection, server_side=True) as secured:
                    heard.append(secured.recv(100))
            except OSError:
                continue

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=work, daemon=True).start()
        said, _ = send(f"https://localhost:{listening.getsockname()[1]}/")
    assert len(said) == 1 and "certificate verify failed" in said[0].lower() and not any(heard), said


def test_an_end_of_a_run_uses_its_patience_for_further_tries() -> None:
    tries: list[float] = []
    began = time.monotonic()

    def fail(_: Notification) -> tuple[str, bool]:
        tries.append(time.monotonic() - began)
        return "down", True

    said: list[str] = []
    hook = Webhook(fail, said.append, pauses_s=(0.2, 60.0, 60.0))
    hook.put(notification())
    hook.close(5.0)
    # At once, after the pause that fits, and a last time in place of the pause that does not.
    assert len(tries) == 3 and 0.2 <= tries[1] < 2.0 and tries[2] - tries[1] < 1.0 and len(said) == 1, tries


def test_a_backlog_is_bounded_and_keeps_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "_MOST_WAITING", 4)
    begun, go_on, sent = threading.Event(), threading.Event(), list[str]()

    def deliver(one: Notification) -> tuple[str, bool]:
        begun.set()
        go_on.wait(10)
        sent.append(one.kind)
        return "", False

    hook = Webhook(deliver, pytest.fail)
    hook.put(notification("first"))
    assert begun.wait(10)
    for number in range(50):
        hook.put(notification(str(number)))
    go_on.set()
    hook.close(5.0)
    # The note that the run ends takes a place, too.
    assert sent[0] == "first" and sent[-3:] == ["47", "48", "49"] and len(sent) <= 6


def test_without_a_thread_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    said: list[str] = []
    hook = Webhook(lambda one: ("", False), said.append)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    hook.put(notification())
    hook.put(notification())
    hook.close(5.0)
    assert said == ["notification not delivered (failed): can't start new thread; check notify.url"]
