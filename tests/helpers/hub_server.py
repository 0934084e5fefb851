"""A Hub on loopback: the part of huggingface.co's HTTP interface that pushes use, over memory.

Files above a few bytes go by Git LFS (https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md), as there.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

WRITER, READER = "hf_writer", "hf_reader"
_LFS_BYTES = 64


@dataclass
class Repository:
    """Files by name, and commits, newest first."""

    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[dict[str, Any]] = field(default_factory=list)

    def commit(self, title: str, message: str) -> str:
        number = hashlib.sha1(f"{len(self.commits)} {title}".encode()).hexdigest()
        date = "2026-01-01T00:00:00.000Z"
        self.commits.insert(0, {"id": number, "title": title, "message": message, "authors": [], "date": date})
        return number


class HubServer:
    """What the server holds, and how it misbehaves.

    Attributes:
        repositories: By name; branches other than `main` do not exist.
        objects: Contents of LFS objects by their sha256.
        received: The sha256 of each object in the order in which they arrived.
        accepts: Number of objects that are stored at once; the others wait until `go_on` is set.
        held: Set when an object waits.
        fails: Status with which commits are answered; None to make them.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.received: list[str] = []
        self.accepts = 1 << 30
        self.held, self.go_on = threading.Event(), threading.Event()
        self.fails: int | None = None
        self.url = ""
        self.lock = threading.Lock()

    def add(self, name: str) -> Repository:
        self.repositories[name] = Repository()
        self.repositories[name].commit("initial commit", "")
        return self.repositories[name]


@contextmanager
def hub_server() -> Iterator[HubServer]:
    hub = HubServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Refused(Exception):
    def __init__(self, status: int, code: str = "", message: str = "refused", **further: str) -> None:
        self.status, self.code, self.message, self.further = status, code, message, further


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        try:
            body = self._body()
            for method, pattern, function in _ROUTES:
                match = re.fullmatch(pattern, path)
                if match is not None and method == self.command:
                    self._send(200, function(self, body, *match.groups()))
                    return
            raise _Refused(404, "EntryNotFound", f"{self.command} {path}")
        except _Refused as refused:
            self._send(refused.status, {"error": refused.message, **refused.further}, refused)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _send(self, status: int, value: Any, refused: _Refused | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        if refused is not None:
            self.send_header("X-Error-Message", refused.message)
            if refused.code:
                self.send_header("X-Error-Code", refused.code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _repository(self, name: str, revision: str = "main", *, writes: bool = True) -> Repository:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in (WRITER, READER):
            raise _Refused(401, "", "Invalid credentials in Authorization header")
        if name not in self.hub.repositories:
            raise _Refused(404, "RepoNotFound", "Repository not found")
        if revision != "main":
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if writes and token == READER:
            raise _Refused(403, "", "you must use a write token")
        return self.hub.repositories[name]

    def create(self, body: bytes) -> Any:
        wanted = json.loads(body)
        name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        if name in self.hub.repositories:
            raise _Refused(409, "", "You already created this model repo", url=f"{self.hub.url}/{name}")
        self.hub.add(name).private = wanted.get("private") or wanted.get("visibility") == "private"
        return {"url": f"{self.hub.url}/{name}"}

    def commits(self, body: bytes, name: str, revision: str) -> Any:
        return self._repository(name, revision, writes=False).commits

    def preupload(self, body: bytes, name: str, revision: str) -> Any:
        self._repository(name, revision)
        files = json.loads(body)["files"]
        modes = {file["path"]: "lfs" if file["size"] > _LFS_BYTES else "regular" for file in files}
        return {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]}

    def batch(self, body: bytes, name: str) -> Any:
        self._repository(name)
        objects = []
        for wanted in json.loads(body)["objects"]:
            upload = {"href": f"{self.hub.url}/lfs/{wanted['oid']}", "header": {}}
            actions = {} if wanted["oid"] in self.hub.objects else {"actions": {"upload": upload}}
            objects.append({**wanted, **actions})
        return {"transfer": "basic", "objects": objects}

    def put(self, body: bytes, oid: str) -> Any:
        if hashlib.sha256(body).hexdigest() != oid:
            raise _Refused(400, "", "another digest")
        with self.hub.lock:
            waits = len(self.hub.received) >= self.hub.accepts
            if not waits:
                self.hub.received.append(oid)
                self.hub.objects[oid] = body
        if waits:
            self.hub.held.set()
            self.hub.go_on.wait()
            raise _Refused(400, "", "too late")
        return {}

    def commit(self, body: bytes, name: str, revision: str) -> Any:
        repository = self._repository(name, revision)
        if self.hub.fails is not None:
            raise _Refused(self.hub.fails, "", "not now")
        lines = [json.loads(line) for line in body.splitlines()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        if header.get("parentCommit") not in (None, repository.commits[0]["id"]):
            raise _Refused(412, "", "A commit has happened since")
        files = {}
        for value in (line["value"] for line in lines if line["key"] == "file"):
            files[value["path"]] = base64.b64decode(value["content"])
        for value in (line["value"] for line in lines if line["key"] == "lfsFile"):
            if value["oid"] not in self.hub.objects:
                raise _Refused(400, "", f"{value['path']} was not uploaded")
            files[value["path"]] = self.hub.objects[value["oid"]]
        repository.files |= files
        number = repository.commit(header["summary"], header.get("description", ""))
        return {"commitUrl": f"{self.hub.url}/{name}/commit/{number}", "commitOid": number, "success": True}


_REPO = r"([\w.-]+/[\w.-]+)"
_ROUTES: list[tuple[str, str, Any]] = [
    ("POST", "/api/repos/create", _Handler.create),
    ("GET", f"/api/models/{_REPO}/commits/(.+)", _Handler.commits),
    ("POST", f"/api/models/{_REPO}/preupload/(.+)", _Handler.preupload),
    ("POST", f"/{_REPO}.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", "/lfs/([0-9a-f]{64})", _Handler.put),
    ("POST", f"/api/models/{_REPO}/commit/(.+)", _Handler.commit),
]
