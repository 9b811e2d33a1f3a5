"""A small real web API with a quota: it searches the standard library's module descriptions.

    python scripts/quota_server.py --port 8099 --limit 5 --period 1 --key sesame

``GET /search?q=words`` answers ``{"query", "results": [{"module", "summary", "score"}]}``; beyond ``limit`` answers
in any window of ``period`` seconds, or ``concurrency`` at once, it answers 429 with Retry-After and counts the
refusal. ``GET /stats`` says what it saw. With a key it wants ``Authorization: Bearer KEY``. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc
import sysconfig
import threading
import time
import tokenize
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit


class Quota:
    """At most ``limit`` admissions in any window of ``period_s``, and ``concurrency`` at once."""

    def __init__(self, limit: int, period_s: float, concurrency: int) -> None:
        self.limit = limit
        self.period_s = period_s
        self.concurrency = concurrency
        self._lock = threading.Lock()
        self._admitted: deque[float] = deque()
        self._counts = {"served": 0, "refused": 0, "running": 0, "running_max": 0}

    def admit(self) -> float | None:
        """None when admitted (then `leave` must follow), else the seconds after which to come again."""
        with self._lock:
            now = time.monotonic()
            while self._admitted and self._admitted[0] <= now - self.period_s:
                self._admitted.popleft()
            if len(self._admitted) < self.limit and self._counts["running"] < self.concurrency:
                self._admitted.append(now)
                self._counts["served"] += 1
                self._counts["running"] += 1
                self._counts["running_max"] = max(self._counts["running_max"], self._counts["running"])
                return None
            self._counts["refused"] += 1
            full = len(self._admitted) >= self.limit
            return self._admitted[0] + self.period_s - now if full else self.period_s / self.limit

    def leave(self) -> None:
        with self._lock:
            self._counts["running"] -= 1

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


@cache
def summaries() -> dict[str, str]:
    """Module name -> first line of its docstring, for the standard library's top level."""
    found = {}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            with tokenize.open(path) as lines:
                synopsis = pydoc.source_synopsis(lines)
        except (SyntaxError, ValueError):
            continue
        if synopsis:
            found[path.stem] = synopsis
    return found


def search(query: str, limit: int = 5) -> list[dict[str, object]]:
    """The modules whose name or summary hold most of the query's words, best first."""
    words = query.lower().split()
    scored = []
    for module, summary in summaries().items():
        text = f"{module} {summary}".lower()
        score = sum((word in text) + (word in module.lower()) for word in words)
        if score:
            scored.append((-score, module, summary))
    return [
        {"module": module, "summary": summary, "score": -score} for score, module, summary in sorted(scored)[:limit]
    ]


class QuotaServer(ThreadingHTTPServer):
    """The HTTP server; port 0 takes a free one. ``requests`` holds what came, oldest dropped."""

    daemon_threads = True

    def __init__(self, port: int, quota: Quota, *, host: str = "127.0.0.1", key: str = "") -> None:
        self.quota = quota
        self.key = key
        self.requests: deque[dict[str, object]] = deque(maxlen=10_000)
        summaries()  # read before the first question
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host if isinstance(host, str) else host.decode()}:{port}"

    @contextmanager
    def serving(self) -> Iterator[QuotaServer]:
        """Serve from a thread until the block ends."""
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()
            self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: QuotaServer

    def do_GET(self) -> None:
        self._respond(b"")

    def do_POST(self) -> None:
        self._respond(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _respond(self, body: bytes) -> None:
        self.server.requests.append(
            {"method": self.command, "target": self.path, "headers": dict(self.headers), "body": body.decode()}
        )
        target = urlsplit(self.path)
        if target.path == "/stats":
            return self._answer(200, self.server.quota.counts())
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            return self._answer(401, {"error": "wrong or no key"})
        if target.path != "/search":
            return self._answer(404, {"error": f"no such page: {target.path}"})
        wait_s = self.server.quota.admit()
        if wait_s is not None:
            return self._answer(429, {"error": "too many requests"}, retry_after_s=wait_s)
        try:
            query = json.loads(body)["q"] if body else " ".join(parse_qs(target.query).get("q", []))
            return self._answer(200, {"query": query, "results": search(str(query))})
        except (ValueError, KeyError, TypeError):
            return self._answer(400, {"error": 'the body must be {"q": "words"}'})
        finally:
            self.server.quota.leave()

    def _answer(self, status: int, value: object, *, retry_after_s: float | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if retry_after_s is not None:
            whole = self.server.quota.period_s >= 1  # the standard knows whole seconds only
            self.send_header("Retry-After", str(math.ceil(retry_after_s)) if whole else f"{retry_after_s:.3f}")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: what came is in ``requests`` and in /stats."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8099)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--limit", type=int, default=5)
    parser.add_argument("--period", type=float, default=1.0)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--key", default="")
    options = parser.parse_args()
    quota = Quota(options.limit, options.period, options.concurrency)
    server = QuotaServer(options.port, quota, host=options.host, key=options.key)
    print(f"search with a quota of {options.limit} in {options.period:g} s at {server.url}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main()
