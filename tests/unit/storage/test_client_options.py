"""Options of the environment reach the client of a bucket, and errors name the variables of their own cloud."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from helpers.messages import one_line

from ckpt.storage.base.errors import NotFound, StoreError
from ckpt.storage.remote import object_store
from ckpt.storage.remote.object_store import ObjectStore

pytest.importorskip("obstore")

URLS = {"gs": "gs://bucket/run", "az": "az://container/run", "s3": "s3://bucket/run"}
ENVIRONMENT = {
    "gs": {"GOOGLE_BASE_URL": "{server}", "GOOGLE_SKIP_SIGNATURE": "true"},
    "az": {"AZURE_STORAGE_ENDPOINT": "{server}", "AZURE_SKIP_SIGNATURE": "true", "AZURE_STORAGE_ACCOUNT_NAME": "account"},
    "s3": {"AWS_ENDPOINT_URL": "{server}", "AWS_SKIP_SIGNATURE": "true", "AWS_REGION": "us-east-1"},
}
CLOUDS = {"gs": "GOOGLE", "az": "AZURE", "s3": "AWS"}


@pytest.fixture
def empty_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Yield the URL of an HTTP server without objects, and the headers of the requests to it."""
    headers: list[dict[str, str]] = []

    class Nothing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers.append({**dict(self.headers), "path": self.path})
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setattr(object_store, "_RETRY_CONFIG", {"max_retries": 0, "retry_timeout": timedelta(seconds=5)})
    with ThreadingHTTPServer(("127.0.0.1", 0), Nothing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", headers
        server.shutdown()


def set_up(monkeypatch: pytest.MonkeyPatch, scheme: str, server: str) -> str:
    """Set the variables that direct the client of this cloud to the server, and return a URL of it."""
    for name, value in ENVIRONMENT[scheme].items():
        monkeypatch.setenv(name, value.format(server=server))
    return URLS[scheme]


@pytest.mark.parametrize("scheme", URLS)
def test_options_of_the_environment_are_kept(
    scheme: str, empty_server: tuple[str, list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, headers = empty_server
    url = set_up(monkeypatch, scheme, server)
    monkeypatch.setenv(f"{CLOUDS[scheme]}_ALLOW_HTTP", "true")
    monkeypatch.setenv(f"{CLOUDS[scheme]}_USER_AGENT", "somebody/1")
    with pytest.raises(NotFound):
        ObjectStore(url).get("a")
    assert [each.get("User-Agent", each.get("user-agent")) for each in headers] == ["somebody/1"]


def test_a_proxy_of_the_environment_is_used(
    empty_server: tuple[str, list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, headers = empty_server
    url = set_up(monkeypatch, "gs", "http://storage.invalid")
    monkeypatch.setenv("GOOGLE_ALLOW_HTTP", "true")
    monkeypatch.setenv("GOOGLE_PROXY_URL", server)
    with pytest.raises(NotFound):
        ObjectStore(url).get("a")
    assert headers[0]["path"].startswith("http://storage.invalid/")


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_plain_http_is_refused_with_the_variable_that_allows_it(
    scheme: str, empty_server: tuple[str, list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = set_up(monkeypatch, scheme, empty_server[0])
    with pytest.raises(StoreError) as raised:
        ObjectStore(url).get("a")
    text = one_line(raised, url, f"{CLOUDS[scheme]}_ALLOW_HTTP=true")
    assert "AWS" not in text


@pytest.mark.parametrize("scheme", URLS)
def test_errors_name_the_variables_of_their_cloud(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_RETRY_CONFIG", {"max_retries": 0, "retry_timeout": timedelta(seconds=5)})
    url = set_up(monkeypatch, scheme, "http://127.0.0.1:9")
    monkeypatch.setenv(f"{CLOUDS[scheme]}_ALLOW_HTTP", "true")
    with pytest.raises(StoreError) as raised:
        ObjectStore(url).get("a")
    text = one_line(raised, url, CLOUDS[scheme], "check the network and the endpoint")
    assert not [cloud for cloud in CLOUDS.values() if cloud != CLOUDS[scheme] and f"{cloud}_" in text]
    assert CLOUDS[scheme] in object_store._credentials_advice(url)
