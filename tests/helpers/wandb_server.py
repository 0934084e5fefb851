"""What the client of W&B needs of its server to begin, to resume and to fill a run; by the queries of wandb 0.31."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer:
    """Attributes:
    rows: history of each run by id: row by line number, as the client has numbered it.
    """

    def __init__(self) -> None:
        self.rows: dict[str, dict[int, dict[str, Any]]] = {}
        self._summaries: dict[str, str] = {}
        self._configs: dict[str, str] = {}
        self.port = 0

    @property
    def environment(self) -> dict[str, str]:
        url = f"http://127.0.0.1:{self.port}"
        return {"WANDB_MODE": "online", "WANDB_BASE_URL": url, "WANDB_API_KEY": "a" * 40, "WANDB_ENTITY": "me"}

    def take_stream(self, run: str, files: dict[str, Any]) -> None:
        for name, part in files.items():
            if name == "wandb-history.jsonl":
                rows = {part["offset"] + number: json.loads(line) for number, line in enumerate(part["content"])}
                self.rows.setdefault(run, {}).update(rows)
            elif name == "wandb-summary.json":
                self._summaries[run] = part["content"][-1]

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        named = re.search(r"(?:query|mutation)\s+(\w+)", query)
        name = named[1] if named is not None else ""
        project = {"id": "p", "name": "mine", "entity": {"id": "e", "name": "me"}}
        if name == "Viewer":
            viewer = {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
            return {"viewer": viewer, "serverInfo": {"cliVersionInfo": {}, "latestLocalVersionInfo": None}}
        if name == "RunResumeStatus":
            return {"model": {**project, "bucket": self._resumed(variables["name"])}}
        if name == "UpsertBucket":
            run = variables["name"]
            self._configs[run] = variables.get("config") or self._configs.get(run, "{}")
            is_new = run not in self.rows
            self.rows.setdefault(run, {})
            return {"upsertBucket": {"bucket": {**self._bucket(run), "project": project}, "inserted": is_new}}
        if name == "CreateRunFiles":
            files = [{"name": one, "uploadUrl": f"http://127.0.0.1:{self.port}/up"} for one in variables["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        return {"serverInfo": {"features": []}}

    def _bucket(self, run: str) -> dict[str, Any]:
        num_rows = len(self.rows[run])
        named = {"id": f"b-{run}", "name": run, "displayName": run, "sweepName": None}
        return {**named, "config": self._configs.get(run, "{}"), "historyLineCount": num_rows}

    def _resumed(self, run: str) -> dict[str, Any] | None:
        if run not in self.rows:
            return None
        last = [json.dumps(self.rows[run][max(self.rows[run])])] if self.rows[run] else []
        return {
            **self._bucket(run),
            "summaryMetrics": self._summaries.get(run, "{}"),
            "logLineCount": 0,
            "eventsLineCount": 0,
            "historyTail": json.dumps(last),
            "eventsTail": "[]",
            "tags": [],
            "wandbConfig": '{"t": 1}',
        }


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """Serve on a port of this machine."""
    served = WandbServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self._read()
            if self.path.endswith("/file_stream"):
                served.take_stream(self.path.split("/")[-2], json.loads(body).get("files") or {})
                self._send({})
            elif self.path.endswith("/graphql"):
                asked = json.loads(body)
                self._send({"data": served.answer(asked["query"], asked.get("variables") or {})})
            else:
                self._send({})

        def do_PUT(self) -> None:
            self._read()
            self._send({})

        def do_GET(self) -> None:
            self._send({})

        def _read(self) -> bytes:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            return gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body

        def _send(self, answer: dict[str, Any]) -> None:
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        served.port = server.server_port
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield served
        finally:
            server.shutdown()
