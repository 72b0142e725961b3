"""The page and its data over HTTP, for this machine alone."""

from __future__ import annotations

import json
import math
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from select import select
from socket import MSG_PEEK
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from opteq.errors import ConfigError, OpteqError
from opteq.show.settings import TRAINED, Settings
from opteq.show.viewer import MOST_BYTES, Viewer
from opteq.system.shortage import shortage

HOST = "127.0.0.1"
_PAGES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/script.js": ("script.js", "text/javascript; charset=utf-8"),
}
_HEADERS = {
    # Nothing is fetched from elsewhere, and nothing that was shown is kept.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}


class ShowServer(ThreadingHTTPServer):
    """Serves a viewer on 127.0.0.1.

    Args:
        viewer: what is shown.
        port: where; 0 for any that is free.

    Raises:
        ConfigError: if the port is not to be had.
    """

    daemon_threads = True
    # Else a second server could take the same port on some systems.
    allow_reuse_port = False

    def __init__(self, viewer: Viewer, port: int) -> None:
        self.viewer = viewer
        # Browsers ask for several things at once; the network answers one after the other, and beside it the
        # copy of which certificates are, which take longest.
        self.lock, self.certificate_lock = Lock(), Lock()
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(
                f"Port {port} cannot be used ({reason}); choose another with --port, or 0 for any free one."
            ) from error

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        """Answer until `shutdown`."""
        # The page says what did not converge, or is not certified. Here, once: what is in force for warnings
        # is so for all threads.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super().serve_forever(poll_interval)

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://{HOST}:{self.server_port}/"


class _Refusal(OpteqError):
    """A request that is answered by a status and a sentence."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: ShowServer  # pyright: ignore[reportIncompatibleVariableOverride]
    # A browser that says no more, as with a connection opened in advance, does not hold its thread for ever.
    timeout = 60

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path in _PAGES:
            name, kind = _PAGES[url.path]
            self._send(HTTPStatus.OK, kind, (files("opteq.show") / "page" / name).read_bytes())
            return
        server = self.server
        lock = server.certificate_lock if url.path == "/api/certificate" else server.lock
        self._answer(lock, lambda: self._look(url.path, parse_qs(url.query)))

    def do_POST(self) -> None:
        self._answer(self.server.lock, self._take)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal is for what its user has to know."""

    def _look(self, path: str, query: Mapping[str, list[str]]) -> Any:
        viewer = self.server.viewer
        if path == "/api/network":
            return viewer.describe()
        values = {name: texts[-1] for name, texts in query.items()}
        key, settings = values.get("image", ""), _settings(values)
        match path:
            case "/api/equilibrium":
                return viewer.equilibrium(key, settings)
            case "/api/certificate":
                return viewer.certificate(key, settings, values.get("statement", ""))
            case "/api/attention":
                return viewer.attention(key, settings)
            case "/api/attack":
                return viewer.attack(key, settings, _number(values, "epsilon") or 0.0)
        raise _Refusal(HTTPStatus.NOT_FOUND, f"There is nothing at {path}.")

    def _take(self) -> Any:
        if urlsplit(self.path).path != "/api/images":
            raise _Refusal(HTTPStatus.NOT_FOUND, f"There is nothing at {self.path}.")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise _Refusal(HTTPStatus.LENGTH_REQUIRED, "Expected the content of an image file.")
        name = unquote(self.headers.get("X-File-Name", ""))
        # Read to the end even if it is refused: else the browser sees a broken connection in place of why.
        left, content = int(length), b""
        while left > 0 and (part := self.rfile.read(min(left, 2**20))):
            left -= len(part)
            content += part if len(content) <= MOST_BYTES else b""
        return self.server.viewer.add(name, content)

    def _answer(self, lock: Lock, work: Callable[[], Any]) -> None:
        """Send what `work` gives as JSON, or the sentence that says why not; one at a time under a lock."""
        try:
            self._expect_own_host()
            with lock:
                if self._is_alone():
                    self.close_connection = True
                    return
                content, status = work(), HTTPStatus.OK
        except OpteqError as error:
            content, status = {"error": str(error)}, getattr(error, "status", HTTPStatus.BAD_REQUEST)
        except Exception as error:
            lack = shortage(error)
            if lack is None:
                traceback.print_exc(file=sys.stderr)
            reason = f"{lack}; choose a smaller image." if lack else "The terminal shows why this failed."
            content, status = {"error": reason}, HTTPStatus.INTERNAL_SERVER_ERROR
        body = json.dumps(content, allow_nan=False, ensure_ascii=False).encode()
        self._send(status, "application/json; charset=utf-8", body)

    def _is_alone(self) -> bool:
        """Whether the browser has gone meanwhile, as where the page has asked for something newer instead."""
        ready, _, _ = select([self.connection], [], [], 0)
        return bool(ready) and not self.connection.recv(1, MSG_PEEK)

    def _expect_own_host(self) -> None:
        # A page from elsewhere may have its own name point to this machine.
        name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        if name not in (HOST, "localhost"):
            raise _Refusal(HTTPStatus.FORBIDDEN, f"Open this page as {self.server.address}.")

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        try:
            self.send_response(status)
            for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
        except ConnectionError:
            # The reader has gone on to something else.
            self.close_connection = True


def _settings(values: Mapping[str, str]) -> Settings:
    return Settings(
        coupling=_number(values, "coupling"),
        width=_number(values, "width"),
        regulariser=values.get("regulariser", TRAINED),
        strength=_number(values, "strength"),
    )


def _number(values: Mapping[str, str], name: str) -> float | None:
    if name not in values:
        return None
    try:
        number = float(values[name])
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"Expected `{name}` to be a number, got {values[name]!r}.")
    return number
