"""Connections of urllib to etcd that keep the addresses of its servers, so that no call waits for a slow name server."""

from __future__ import annotations

import http.client
import ssl
import urllib.request
from collections.abc import Callable
from typing import Any

from ckpt.storage.base.name_lookup import NameLookup


def connection_handlers(tls_context: ssl.SSLContext | None) -> list[urllib.request.BaseHandler]:
    """Return the handlers of http and https for `urllib.request.build_opener`. tls_context: that of https; None: only http."""
    names = NameLookup()
    plain = _PlainHandler(names)
    return [plain] if tls_context is None else [plain, _TlsHandler(names, tls_context)]


class _PlainHandler(urllib.request.HTTPHandler):
    def __init__(self, names: NameLookup) -> None:
        super().__init__()
        self._names = names

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_with_names(http.client.HTTPConnection, self._names), req)


class _TlsHandler(urllib.request.HTTPSHandler):
    def __init__(self, names: NameLookup, context: ssl.SSLContext) -> None:
        super().__init__(context=context)
        self._names, self._tls_context = names, context

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_with_names(http.client.HTTPSConnection, self._names), req, context=self._tls_context)


def _with_names(kind: type[http.client.HTTPConnection], names: NameLookup) -> Callable[..., http.client.HTTPConnection]:
    """Return a function that creates a connection of this kind. It connects by `names`, and not by getaddrinfo."""

    def create(host: str, **options: Any) -> http.client.HTTPConnection:
        connection = kind(host, **options)
        connection._create_connection = names.connect  # type: ignore[attr-defined]  # the hook of http.client for proxies and tests
        return connection

    return create
