"""A Hugging Face hub on the loopback: as much of its HTTP interface as fetching a model takes."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SHA = "0123456789abcdef0123456789abcdef01234567"
OLD_SHA = "fedcba9876543210fedcba9876543210fedcba98"


class FakeHub:
    """Serves ``files`` as the repository ``org/name``; ``requests`` are the paths asked for."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self.requests: list[str] = []
        self.failure: tuple[int, dict[str, str]] | None = None
        """Status and headers of every answer, when it is to fail."""
        self.endpoint = ""
        self.stall: Callable[[], None] | None = None
        """Called in the middle of a file of weights, the rest of which then never comes."""
        self.closing = threading.Event()

    def downloads(self) -> list[str]:
        """Files that were sent, by name."""
        marks = (f"GET /org/name/resolve/{SHA}/", f"GET /org/name/resolve/{OLD_SHA}/")
        return sorted(
            request.removeprefix(mark)
            for request in self.requests
            for mark in marks
            if request.startswith(mark)
        )

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a path."""
        if self.failure is not None:
            return (*self.failure, b"")
        path = path.partition("?")[0]
        if not path.startswith(("/api/models/org/name", "/org/name/")):
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if path.startswith("/org/name/resolve/"):
            _, _, _, _, sha, name = path.split("/", 5)
            if name not in self.files:
                return 404, {"X-Error-Code": "EntryNotFound"}, b""
            content = self.files[name]
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            return 200, {"ETag": etag, "X-Repo-Commit": sha}, content
        revision = path.removeprefix("/api/models/org/name").removeprefix("/revision/") or "main"
        if revision.startswith("/tree/"):
            entries = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(content),
                    "oid": hashlib.sha1(content).hexdigest(),
                }
                for name, content in self.files.items()
            ]
            return 200, {}, json.dumps(entries).encode()
        commits = {"main": SHA, SHA: SHA, "v1": OLD_SHA}
        if revision not in commits:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        siblings = [{"rfilename": n, "size": len(c)} for n, c in self.files.items()]
        info = {"id": "org/name", "sha": commits[revision], "siblings": siblings}
        return 200, {}, json.dumps(info).encode()


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve on a free port while the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def _answer(self, *, body: bool) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            status, headers, content = hub.answer(self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body and hub.stall is not None and "safetensors" in self.path:
                self.wfile.write(content[: len(content) // 2])
                self.wfile.flush()
                hub.stall()
                hub.closing.wait()
                self.close_connection = True
            elif body:
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            hub.closing.set()
            server.shutdown()
            thread.join()
