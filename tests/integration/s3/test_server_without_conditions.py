"""The first writer detects an S3 server that ignores If-None-Match or If-Match."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.messages import one_line
from helpers.states import state_of

import ckpt
from ckpt.storage.base import fencing_probe
from ckpt.storage.remote.object_store import ObjectStore

pytest_plugins = ["helpers.moto_server"]


@pytest.fixture
def careless(request: pytest.FixtureRequest, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the URL of a bucket at such a server."""
    import boto3
    from helpers.moto_server import serving

    with serving("--ignore", request.param) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        client: Any = boto3.client("s3", endpoint_url=endpoint)
        client.create_bucket(Bucket="careless")
        yield "s3://careless/run"


@pytest.mark.parametrize("careless", ["HTTP_IF_NONE_MATCH", "HTTP_IF_MATCH"], indirect=True)
def test_a_server_that_ignores_conditions_is_refused(careless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fencing_probe, "_probed_urls", set())
    for call in (lambda: ckpt.Checkpointer(careless), lambda: ckpt.save(state_of(0), careless, 0)):
        with pytest.raises(ckpt.StoreError) as error:
            call()
        one_line(error, careless, "If-None-Match", f"set {fencing_probe.UNFENCED_STORES_VARIABLE} to this URL")
    monkeypatch.setenv(fencing_probe.UNFENCED_STORES_VARIABLE, f"s3://other {careless}")
    ckpt.save(state_of(0), careless, 0)
    assert ckpt.load(careless)["step"] == 0


def test_a_server_that_honours_conditions_is_probed_once(bucket: str, s3_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[str] = []
    honours = ObjectStore.honours_conditions

    def counted_probe(self: ObjectStore, name: str) -> bool:
        probed.append(name)
        return honours(self, name)

    monkeypatch.setattr(ObjectStore, "honours_conditions", counted_probe)
    for step in range(3):
        ckpt.save(state_of(step), f"{bucket}/run", step)
    assert len(probed) == 1
    names = [o["Key"] for o in s3_client.list_objects_v2(Bucket=os.path.basename(bucket))["Contents"]]
    assert not [name for name in names if "probe" in name]
