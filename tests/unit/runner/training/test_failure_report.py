from __future__ import annotations

import errno
import socket
import sys
import urllib.error
from email.message import Message
from typing import Any

import botocore.exceptions
import pytest
import requests
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from torch.utils.data import DataLoader, Dataset

from runner.program.program import Program
from runner.training.rank import describe, is_transient, print_traceback
from runner.training.user_program import run_program

try:
    import httpx2 as httpx
except ImportError:
    # What huggingface_hub 1 uses.
    import httpx  # type: ignore[no-redef]


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
        # A volume that fails over.
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (OSError(errno.EIO, "Input/output error"), True),
        (chained(RuntimeError("cannot load weights"), OSError(errno.ENOTCONN, "not connected")), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (OSError(errno.ENXIO, "No such device or address: '/dev/tty'"), False),
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


def test_the_traceback_begins_in_the_users_script(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch replaces the hook when a process group is initialized, also by another test of this process: each line then
    # begins with "[rank0]: ".
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    script = tmp_path / "train.py"
    script.write_text("def f():\n    raise ValueError('bad thing')\nf()\n")
    with pytest.raises(ValueError, match="bad thing") as caught:
        run_program(Program("script", str(script)))
    # The first frame is this test's.
    assert caught.value.__traceback__ is not None
    print_traceback(caught.value.with_traceback(caught.value.__traceback__.tb_next), is_own=True)
    told = capsys.readouterr().err
    assert told.startswith("Traceback (most recent call last):\n  File ") and told.endswith("ValueError: bad thing\n")
    assert "test_failure_report" not in told and 'train.py", line 3' in told and 'train.py", line 2' in told
    assert describe(caught.value)[0] == "ValueError: bad thing"


WORKER = """
import os, torch
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): os.kill(os.getpid(), 9)
list(torch.utils.data.DataLoader(Rows(), num_workers=1))
"""
# Besides those of tests/integration/test_script_faults.py.
FAULTS = {
    "exception": ("raise ValueError('bad value')", "ValueError: bad value"),
    "import": ("import nosuchpackage", "No module named 'nosuchpackage'"),
    "missing file": ("open('rows.jsonl')", "FileNotFoundError: [Errno 2] No such file or directory: 'rows.jsonl'"),
    "a folder": ("open('/', 'w')", "IsADirectoryError: [Errno 21] Is a directory: '/'"),
    "host memory": ("bytearray(1 << 60)", "MemoryError"),
    "GPU memory": ("import torch\nraise torch.OutOfMemoryError('CUDA out of memory. Tried')", "CUDA out of memory"),
    "recursion": ("def f(): return f()\nf()", "RecursionError: maximum recursion depth exceeded"),
    "assertion": ("assert 1 == 2", "AssertionError"),
    "encoding": ("b'\\xff'.decode()", "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff"),
    "missing column": ("{}['text']", "KeyError: 'text'"),
    "chained": (
        "try: {}['a']\nexcept KeyError as e: raise RuntimeError('no column') from e",
        "RuntimeError: no column",
    ),
    "group": ("raise ExceptionGroup('two', [ValueError('a'), TypeError('b')])", "ExceptionGroup: two"),
    "subprocess": (
        "import subprocess\nsubprocess.run(['false'], check=True)",
        "CalledProcessError: Command '['false']'",
    ),
    "JSON": ("import json\njson.loads('{')", "JSONDecodeError: Expecting property name"),
    "shapes": ("import torch\ntorch.ones(2, 3) @ torch.ones(2, 3)", "mat1 and mat2 shapes cannot be multiplied"),
    "worker killed": (WORKER, "RuntimeError: DataLoader worker"),
    "many lines": ("raise ValueError('first line\\n' * 50)", "ValueError: first line"),
    "own class": ("class Stop(BaseException): pass\nraise Stop('own')", "Stop: own"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_cause_of_what_a_script_raises(name: str) -> None:
    text, cause = FAULTS[name]
    with pytest.raises(BaseException) as raised:
        exec(compile(text, "train.py", "exec"), {})
    said, _ = describe(raised.value)
    assert said.startswith(cause) or cause in said.splitlines()[0]


class Broken(Dataset[int]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> int:
        raise ValueError(f"row is broken: {number}\nin two lines")


def test_the_error_of_a_worker_is_described_by_its_own_words() -> None:
    with pytest.raises(ValueError) as caught:
        next(iter(DataLoader(Broken(), num_workers=1)))
    text, frame = describe(caught.value)
    assert text == "ValueError: row is broken: 0\nin two lines (in DataLoader worker process 0)"
    assert frame is not None and frame.startswith(f"{__file__}:")
    # Others that look alike are left as they are.
    assert describe(ValueError("Caught X in y.\nOriginal Traceback (most recent call last):\n")) == (
        "ValueError: Caught X in y.\nOriginal Traceback (most recent call last):\n",
        None,
    )
