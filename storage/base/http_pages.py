"""A small HTTP server for pages such as health and metrics, each made by a function on request."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class HttpPage:
    """The content of one response."""

    body: bytes
    content_type: str = "text/plain"
    status: int = 200


class HttpPages:
    """Serves pages at a host and port until `close`.

    port: 0 chooses a free one; the attribute `port` has the number.
    pages: functions by path, called from other threads.
    """

    def __init__(self, host: str, port: int, pages: Mapping[str, Callable[[], HttpPage]], thread_name: str) -> None:
        # Imported here, because the import takes long and few commands serve pages.
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        not_found = HttpPage(f"there are {' and '.join(sorted(pages))}\n".encode(), status=404)

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                page = pages.get(self.path, lambda: not_found)()
                self.send_response(page.status)
                self.send_header("Content-Type", page.content_type)
                self.send_header("Content-Length", str(len(page.body)))
                self.end_headers()
                self.wfile.write(page.body)

            def log_message(self, *args: object) -> None:
                """Log nothing: requests of a scraper are not events."""

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

            def handle_error(self, request: object, client_address: tuple[object, ...]) -> None:
                log.info("%s: no answer to %s: %s", thread_name, client_address[0], sys.exc_info()[1])

        self._http = Server((host, port), Handler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, name=thread_name, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
