"""An S3 server (moto) in a process of its own, for the test session; the environment names it and its credentials.

Use it with `pytest_plugins = ["helpers.moto_server"]` and the fixture `bucket`. Run as a program, it serves until stdin closes,
so that it ends with the test run, however that ends.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """Yield the URL of a running server."""
    for package in ("moto.server", "boto3", "obstore"):
        pytest.importorskip(package)
    with serving() as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.delenv("AWS_PROFILE", raising=False)
        patch.delenv("AWS_SESSION_TOKEN", raising=False)
        yield endpoint


@contextmanager
def serving(*options: str) -> Iterator[str]:
    """Yield the URL of a new server. options: "--ignore" and the names, in WSGI form, of headers that it does not support."""
    with subprocess.Popen(
        [sys.executable, "-P", __file__, *options],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as server:  # fmt: skip
        assert server.stdin
        assert server.stdout
        endpoint = server.stdout.readline().strip()
        assert endpoint, "moto did not start: run this file as a program to see why"
        try:
            yield endpoint
        finally:
            server.kill()  # a forked child of the test may have a copy of the pipe, which then is not closed


@pytest.fixture(scope="session")
def s3_client(s3_endpoint: str) -> Any:
    """Return a boto3 client, to inspect the server directly."""
    import boto3

    return boto3.client("s3", endpoint_url=s3_endpoint)


@pytest.fixture
def bucket(s3_client: Any) -> str:
    """Return the URL of a new, empty bucket."""
    name = f"bucket-{os.getpid()}-{next(_numbers)}"
    s3_client.create_bucket(Bucket=name)
    return f"s3://{name}"


def _serve() -> None:
    import threading

    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    ignored = sys.argv[2:] if sys.argv[1:2] == ["--ignore"] else []
    moto, one_at_a_time = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def application(environ: dict[str, Any], start_response: Any) -> Any:
        """Serialise conditional puts: moto looks for an object and then writes it, so that two might win; in S3 one does."""
        for header in ignored:
            environ.pop(header, None)
        if environ["REQUEST_METHOD"] == "PUT" and {"HTTP_IF_NONE_MATCH", "HTTP_IF_MATCH"} & environ.keys():
            with one_at_a_time:
                return [*moto(environ, start_response)]
        return moto(environ, start_response)

    server = make_server("127.0.0.1", 0, application, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.port}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _serve()
