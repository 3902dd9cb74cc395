"""`/metrics` for Prometheus and `/health` for whoever restarts shards, by a plain HTTP server in a thread."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from hotrow.errors import SettingsError
from hotrow.service.shard import Shard

_HELP = {
    "hellos": "Clients that said hello.",
    "refused": "Messages that were malformed or could not be answered.",
    "repeats": "Requests that came again and were not applied again.",
    "failed": "Messages at which the shard itself failed.",
    "answers_dropped": "Answers to clients that were gone or did not read.",
    "handshakes_failed": "Connections refused before a message: no key, a wrong key, or no ZeroMQ.",
    "bytes_sent": "Bytes of arrays sent.",
}


def metrics_text(shard: Shard) -> str:
    """All of a shard's metrics in the text format of Prometheus."""
    lines: list[str] = []

    def add(name: str, kind: str, help: str, values: list[tuple[str, float]]) -> None:
        lines.append(f"# HELP hotrow_shard_{name} {help}")
        lines.append(f"# TYPE hotrow_shard_{name} {kind}")
        lines.extend(f"hotrow_shard_{name}{labels} {value!r}" for labels, value in values)

    for name, help in _HELP.items():
        add(f"{name}_total", "counter", help, [("", shard.counters.of(name))])
    kinds = shard.counters.by_kind()
    for i, (name, help) in enumerate(
        (
            ("requests_total", "Requests handled."),
            ("request_seconds_total", "Time spent on requests."),
            ("received_bytes_total", "Bytes of arrays received."),
        )
    ):
        add(name, "counter", help, [(f'{{kind="{kind}"}}', of_kind[i]) for kind, of_kind in kinds.items()])
    tables = [(f'{{table="{_escaped(store.table.name)}"}}', store) for store in shard.holding.stores]
    add("rows", "gauge", "Rows held.", [(labels, len(store)) for labels, store in tables])
    add("bytes", "gauge", "Memory of rows.", [(labels, store.bytes) for labels, store in tables])
    add("held_pushes", "gauge", "Pushes that wait for those of other ranks.", [("", len(shard.answers.rounds))])
    return "\n".join(lines) + "\n"


def _escaped(name: str) -> str:
    """A label's value: Prometheus knows these three escapes and no other."""
    return name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def health(shard: Shard) -> dict[str, object]:
    """What a shard says of itself: it is healthy if it serves."""
    place = shard.holding.place
    return {
        "serving": shard.serving,
        "address": shard.address,
        "shard": None if place is None else place[0],
        "shards": None if place is None else place[1],
        "tables": [store.table.name for store in shard.holding.stores],
    }


class Metrics:
    """The HTTP server. Only this machine reaches it unless `host` says otherwise."""

    def __init__(self, shard: Shard, port: int, host: str = "127.0.0.1") -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._give(200, "text/plain; version=0.0.4; charset=utf-8", metrics_text(shard))
                elif self.path == "/health":
                    self._give(200 if shard.serving else 503, "application/json", json.dumps(health(shard)) + "\n")
                else:
                    self._give(404, "text/plain", "There are /metrics and /health here.\n")

            def _give(self, status: int, kind: str, text: str) -> None:
                body = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """A scrape is not worth a line."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise SettingsError(
                f"Metrics cannot be served at {host}:{port}: {error.strerror or error}. Choose another port."
            ) from None
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
