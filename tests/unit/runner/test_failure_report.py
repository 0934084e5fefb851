from __future__ import annotations

import socket
import urllib.error
from email.message import Message
from typing import Any

import botocore.exceptions
import httpx2 as httpx
import pytest
import requests
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from runner.training.failure_report import describe, is_transient, print_traceback


def answer(status: int) -> requests.Response:
    response = requests.Response()
    response.status_code = status
    return response


def chained(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def boto(status: int) -> Any:
    body: Any = {"Error": {"Code": "SlowDown"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return botocore.exceptions.ClientError(body, "GetObject")


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (ConnectionError("Couldn't reach 'user/set' on the Hub (503)"), True),
        (requests.ConnectionError("Max retries exceeded"), True),
        (requests.ReadTimeout("timed out"), True),
        (httpx.ConnectError("no route"), True),
        (httpx.ReadTimeout("timed out"), True),
        (socket.gaierror(-3, "Temporary failure in name resolution"), True),
        (requests.HTTPError("too many", response=answer(429)), True),
        (requests.HTTPError("bad gateway", response=answer(502)), True),
        (urllib.error.HTTPError("http://x", 503, "unavailable", Message(), None), True),
        (boto(503), True),
        (botocore.exceptions.EndpointConnectionError(endpoint_url="http://s3"), True),
        # transformers' own error, from the hub's.
        (chained(OSError("We couldn't connect to 'https://huggingface.co'"), LocalEntryNotFoundError("no")), True),
        (requests.HTTPError("not found", response=answer(404)), False),
        (requests.HTTPError("gated", response=answer(401)), False),
        (urllib.error.HTTPError("http://x", 404, "missing", Message(), None), False),
        (boto(403), False),
        (OfflineModeIsEnabled("offline"), False),
        (chained(LocalEntryNotFoundError("not in the cache"), OfflineModeIsEnabled("offline")), False),
        (chained(OSError("is no repository"), requests.HTTPError("x", response=answer(404))), False),
        # An optional file that is missing, then the network went.
        (chained(ConnectionError("reset"), requests.HTTPError("x", response=answer(404))), True),
        # The handler of a network error is itself faulty.
        (chained(NameError("name 'x' is not defined"), ConnectionError("reset")), False),
        (ValueError("bad"), False),
        (FileNotFoundError(2, "No such file"), False),
        (PermissionError(13, "denied"), False),
    ],
)
def test_what_may_have_passed_at_the_next_try(error: BaseException, transient: bool) -> None:
    assert is_transient(error) is transient


def test_what_is_not_in_the_cache_is_final_where_there_is_to_be_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was retried twenty times."""
    error = chained(OSError("We couldn't connect to the Hub"), LocalEntryNotFoundError("not in the cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not is_transient(error)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert is_transient(error)


def test_an_exception_that_follows_from_itself_ends() -> None:
    one, other = ValueError("a"), ValueError("b")
    one.__context__, other.__context__ = other, one
    assert not is_transient(one)


def test_the_traceback_begins_in_the_users_script(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("def f():\n    raise ValueError('bad thing')\nf()\n")
    with pytest.raises(ValueError, match="bad thing") as caught:
        exec(compile(script.read_text(), str(script), "exec"), {})
    print_traceback(caught.value, str(script))
    told = capsys.readouterr().err
    assert told.startswith("Traceback (most recent call last):\n  File ") and told.endswith("ValueError: bad thing\n")
    assert "test_failure_report" not in told and 'train.py", line 3' in told and 'train.py", line 2' in told
    assert describe(caught.value)[0] == "ValueError: bad thing"
