"""The report of a run that goes on: a small server on this machine, whose page asks for what is new.

It listens on 127.0.0.1 alone and answers two paths, the page and its data; requests under another host's name are
refused, so no web site can read it through a browser. Metrics are read again only when their files changed.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hotrow.errors import SettingsError
from hotrow.report.page import Page
from hotrow.report.report import of_rows, page_of
from hotrow.report.runs import read_runs
from hotrow.report.section import Section

EVERY = 2.0
"""Seconds between two looks."""


class LivePages:
    """The page on some runs as it is now."""

    def __init__(self, paths: Sequence[Path], every: float = EVERY) -> None:
        self._paths, self._every = list(paths), every
        self._rows: list[Section] | None = None
        self._seen: list[tuple[int, int]] = []
        self._page: Page | None = None
        self._reading = threading.Lock()

    def __call__(self) -> Page:
        with self._reading:
            seen = [_state(path / "metrics.jsonl") for path in self._paths]
            if self._page is None or seen != self._seen:
                runs = read_runs(self._paths)
                if self._rows is None:
                    self._rows = of_rows(runs)
                self._page, self._seen = page_of(runs, self._rows, self._every), seen
            return self._page


class LiveServer(ThreadingHTTPServer):
    """Serves what `page` gives; `url` says where."""

    daemon_threads = True

    def __init__(self, page: Callable[[], Page], port: int = 0) -> None:
        self.page = page
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            said = error.strerror or error
            raise SettingsError(f"Port {port} cannot be listened on: {said}. Give another --port.") from None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        port = self.server.server_port
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            self._answer(403, "text/plain", b"This page is for this machine only.\n")
            return
        asked = urlsplit(self.path)
        if asked.path == "/":
            self._answer(200, "text/html; charset=utf-8", self.server.page().html().encode())
        elif asked.path == "/data.json":
            news = self.server.page().news()
            known = parse_qs(asked.query).get("version", [""])[0]
            if known == news["version"]:
                self._answer(204, "application/json", b"")
            else:
                self._answer(200, "application/json", json.dumps(news).encode())
        else:
            self._answer(404, "text/plain", b"There is nothing here.\n")

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        with contextlib.suppress(ConnectionError):  # the page was left while it was loading
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: a line a look would be noise."""


def _state(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_size, found.st_mtime_ns
