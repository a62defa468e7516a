"""The dashboard's HTTP server: on loopback, for its own page, with nothing but Python's standard library.

A thread a connection is enough for one user's pages, and a page needs one for its events and one for each prompt.
"""

from __future__ import annotations

import secrets
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from socketserver import TCPServer
from string import ascii_uppercase
from typing import Any

from gptlab.config.errors import UserError, one_line
from gptlab.report.curves import buckets_for, chart_data
from gptlab.report.dashboard import guard
from gptlab.report.dashboard.index import RunIndex
from gptlab.report.dashboard.model_process import ModelProcess, checked_settings
from gptlab.report.dashboard.opened_run import OpenedRun
from gptlab.report.dashboard.watched_run import WatchedRun, default_fields
from gptlab.runtime.files.plain_file import parse_json, to_json

ADDRESS = "127.0.0.1"
KEEP_ALIVE_SECONDS = 10.0
"""Between two signs of life in a stream of events, which is how the server learns that a page was closed."""
BATCH_SECONDS = 0.2
"""Between two events: a thousand runs that are read one after the other are a few messages, not a thousand."""
MAX_CONNECTIONS = 64
MAX_CHOSEN = 50
"""Runs whose curves one request may ask for."""

_REPORT, _OWN = "gptlab.report", "gptlab.report.dashboard"
ASSETS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("uPlot.iife.min.js", "charts.js"), (_REPORT, "text/javascript")),
    **dict.fromkeys(("uPlot.min.css", "report.css"), (_REPORT, "text/css")),
    **{
        f"{name}.js": (_OWN, "text/javascript") for name in ("dash", "details", "dom", "filter", "labs", "list", "talk")
    },
    "dash.css": (_OWN, "text/css"),
}
"""{name: package that has it in its assets/, type}. No other file is ever sent."""


class Dashboard(ThreadingHTTPServer):
    """Serves the runs of one folder. `with Dashboard(...) as server: server.serve_forever()`."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        """Port 0: any free one. UserError where the port cannot be used."""
        self.token = secrets.token_urlsafe(32)
        self.index = RunIndex(folder)
        self.models = ModelProcess()
        self.stopping = threading.Event()
        self._opened: dict[str, OpenedRun] = {}
        self._opening = threading.Lock()
        self._connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise UserError(f"cannot listen on port {port}: {error.strerror or error}; choose another --port") from None
        threading.Thread(target=self.index.keep_fresh, args=(self.stopping,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"

    def server_bind(self) -> None:
        """Without the library's search for the machine's name, which asks a name server."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.socket.getsockname()[1]

    def server_close(self) -> None:
        self.stopping.set()
        self.index.wake()
        self.models.close()
        super().server_close()

    def opened(self, run: WatchedRun) -> OpenedRun:
        """The metrics of a run; those that were asked for last stay in memory."""
        with self._opening:
            found = self._opened.pop(run.id, None) or OpenedRun(run.path)
            self._opened[run.id] = found
            while len(self._opened) > MAX_CHOSEN:
                del self._opened[next(iter(self._opened))]
            return found

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A page that was closed is no error. Anything else is a defect, and one line."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, OSError):
            print(f"gptlab dash: {type(error).__name__}: {one_line(error)}", file=sys.stderr)


class _Handler(BaseHTTPRequestHandler):
    server: Dashboard
    protocol_version = "HTTP/1.1"
    timeout = 30.0
    """Seconds for which a connection may be silent."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not self._is_refused():
            if path == "/":
                page = _asset(_OWN, "dash.html").replace(b"TOKEN", self.server.token.encode())
                self._send(HTTPStatus.OK, "text/html", page)
            elif path[1:] in ASSETS:
                package, kind = ASSETS[path[1:]]
                self._send(HTTPStatus.OK, kind, _asset(package, path[1:]))
            elif path == "/events":
                self._events()
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        routes: dict[str, Callable[[dict[str, Any]], None]] = {
            "/curves": self._curves, "/run": self._details, "/prompt": self._prompt,
        }  # fmt: skip
        if self._is_refused():
            return
        length = guard.body_bytes(self.headers)
        if not isinstance(length, int):
            self.send_error(*length)
        elif self.path not in routes:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            try:
                asked = parse_json(self.rfile.read(length))
                if not isinstance(asked, dict):
                    raise ValueError("it should be one JSON object")
                routes[self.path](asked)
            except (UserError, ValueError) as error:
                self.send_error(HTTPStatus.BAD_REQUEST, one_line(error))

    def _is_refused(self) -> bool:
        server = self.server
        refused = guard.refusal(self.command, self.path, self.headers, port=server.server_port, token=server.token)
        if refused is not None:
            self.send_error(*refused)
        return refused is not None

    def _events(self) -> None:
        """Rows as they change, as server-sent events: one JSON object each, the first with all rows."""
        index, since = self.server.index, 0
        self._start_stream("text/event-stream")
        self._write_event({"folder": str(index.folder), "defaults": default_fields()})
        with index.watched():
            while not self.server.stopping.is_set():
                found = index.changes(since, wait_seconds=KEEP_ALIVE_SECONDS)
                if found is None:
                    self.wfile.write(b": nothing new\n\n")
                else:
                    since = found["version"]
                    self._write_event(found)
                    self.server.stopping.wait(BATCH_SECONDS)

    def _write_event(self, value: object) -> None:
        self.wfile.write(b"data: %s\n\n" % to_json(value).encode())

    def _curves(self, asked: dict[str, Any]) -> None:
        """The chosen runs as charts.js draws them, and one line for each that cannot be read."""
        wanted = asked.get("runs")
        if not isinstance(wanted, list) or len(wanted) > MAX_CHOSEN:
            raise UserError(f"runs must be a list of at most {MAX_CHOSEN}")
        index = self.server.index
        runs = [run for run_id in wanted if (run := index.run(run_id)) is not None]
        groups, charts, problems = self._groups(runs), list[dict[str, Any]](), dict[str, str]()
        for run in runs:
            try:
                opened = self.server.opened(run)
                charts.append(opened.chart(run.row, group=groups[run.id], buckets=buckets_for(len(runs))))
            except UserError as error:
                problems[run.id] = one_line(error)
        self._send_json({**chart_data(charts), "problems": problems})

    @staticmethod
    def _groups(runs: Sequence[WatchedRun]) -> dict[str, str | None]:
        """{id: A, B, ... for runs that differ by seed alone; None where a run is alone}."""
        members = Counter(run.row.get("group") for run in runs)
        shared = [group for group, count in members.items() if count > 1 and group is not None]
        names = dict(zip(shared, ascii_uppercase, strict=False))
        return {run.id: names.get(run.row.get("group")) for run in runs}

    def _details(self, asked: dict[str, Any]) -> None:
        self._send_json(self.server.opened(self._run(asked.get("run"))).details())

    def _prompt(self, asked: dict[str, Any]) -> None:
        """A line of JSON for each token, as soon as it is drawn. A page that was closed ends the answer."""
        run, settings = self._run(asked.get("run")), checked_settings(asked)
        self._start_stream("application/x-ndjson")
        try:
            with closing(self.server.models.answer(run.path, settings)) as answers:
                for answer in answers:
                    self._write_line(answer)
            self._write_line({"end": True})
        except UserError as error:
            self._write_line({"error": one_line(error)})

    def _write_line(self, value: object) -> None:
        self.wfile.write(to_json(value).encode() + b"\n")

    def _run(self, run_id: object) -> WatchedRun:
        run = self.server.index.run(run_id)
        if run is None:
            raise UserError("there is no such run: its folder may have been moved")
        return run

    def _start_stream(self, kind: str) -> None:
        """An answer that ends with the connection."""
        self._head(HTTPStatus.OK, kind)
        self.send_header("Connection", "close")
        self.end_headers()

    def _send_json(self, value: object) -> None:
        self._send(HTTPStatus.OK, "application/json", to_json(value).encode())

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self._head(status, kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _head(self, status: HTTPStatus, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        for name, value in guard.PAGE_HEADERS.items():
            self.send_header(name, value)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """One line of JSON; the connection ends, since the rest of the request was not read."""
        status = HTTPStatus(code)
        self.close_connection = True
        self._send(status, "application/json", to_json({"error": message or status.phrase}).encode())

    def version_string(self) -> str:
        return "gptlab"

    def log_message(self, format: str, *args: object) -> None: ...


@cache
def _asset(package: str, name: str) -> bytes:
    return resources.files(package).joinpath("assets", name).read_bytes()
