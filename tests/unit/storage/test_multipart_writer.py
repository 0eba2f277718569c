"""The writer that streams to a bucket: what it commits is stored, and what was discarded is never returned as stored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from helpers.processes import until
from helpers.thread_limits import refused_threads

from ckpt.storage.base.errors import NoSpace, Refused, StoreError
from ckpt.storage.remote.multipart_writer import PART_BYTES, MultipartWriter

Put = Callable[[bytes | Iterator[bytes], int], None]


def writer_of_two_parts(put: Put) -> MultipartWriter:
    writer = MultipartWriter("s3://bucket/object", put, 0)
    writer.append(memoryview(bytes(PART_BYTES)))
    writer.append(memoryview(bytes(PART_BYTES)))
    return writer


def test_a_commit_during_which_the_writer_is_aborted_fails() -> None:
    begun, go, results = threading.Event(), threading.Event(), list[object]()

    def put(data: bytes | Iterator[bytes], part_bytes: int) -> None:
        begun.set()
        assert go.wait(300)
        for _ in data:
            pass

    def commit() -> None:
        try:
            results.append(writer.commit())
        except StoreError as error:
            results.append(error)

    writer = writer_of_two_parts(put)
    assert begun.wait(300)
    threads = [threading.Thread(target=commit), threading.Thread(target=writer.abort)]
    threads[0].start()
    until(lambda: writer._pieces._is_finished)
    threads[1].start()
    until(lambda: writer._pieces._is_cancelled)
    go.set()
    for thread in threads:
        thread.join(300)
    assert isinstance(results[0], StoreError), f"committed {results[0]} bytes that were discarded"
    assert "aborted" in str(results[0])


@pytest.mark.parametrize("kind", [StoreError, NoSpace, Refused])
def test_a_failed_upload_raises_the_error_of_its_kind(kind: type[StoreError]) -> None:
    def put(data: bytes | Iterator[bytes], part_bytes: int) -> None:
        raise kind("the bucket is full")

    with pytest.raises(StoreError, match="the bucket is full") as raised:
        writer_of_two_parts(put).commit()
    assert raised.type is kind


def test_an_upload_that_gets_no_thread_raises_a_store_error() -> None:
    with refused_threads(1, 1000), pytest.raises(StoreError, match="can't start a thread"):
        writer_of_two_parts(lambda data, part_bytes: None)
