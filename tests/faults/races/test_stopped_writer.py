"""A client that stands still while a repair deletes what no record names: it publishes what exists, or it is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from helpers.nodes import Process
from helpers.stopped_client import Stopped

from ckpt.aggregator.file_io.namespace import Namespace, open_namespace
from ckpt.aggregator.maintenance import scrub as surveys
from ckpt.aggregator.records.eras import begin_era
from ckpt.aggregator.records.record_collection import collect_tombstones
from ckpt.storage.base.errors import NotFound
from ckpt.storage.testing import random_bytes

OLD, NEW = random_bytes(1 << 20, 1), random_bytes(1 << 20, 2)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    nodes = [Process(tmp_path_factory.mktemp("nodes") / f"n{i}") for i in range(4)]
    try:
        yield "ckpt://" + ",".join(node.address for node in nodes)
    finally:
        for node in nodes:
            node.close()


@pytest.fixture
def namespace(url: str) -> Namespace:
    found, _ = open_namespace(url)
    found.put("a", OLD)
    found.delete(["b"])
    return found


def repair(url: str) -> str:
    """As an operator runs it, without the hour that objects without a record are left alone."""
    command = [sys.executable, "-m", "ckpt.tools.node", "admin", "repair", url, "--quick", "--grace", "0"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def content(namespace: Namespace, path: str) -> bytes | None:
    try:
        return namespace.get(path)
    except NotFound:
        return None


def whole(namespace: Namespace) -> None:
    """All records name objects that exist, and after a repair nothing else is left."""
    found = surveys.scrub_namespace(namespace, verify=True, grace_seconds=0.0)
    assert not found.damaged_files, found
    assert not found.missing_members, found


PUT = "namespace.put('a', random_bytes(1 << 20, 2))"
PUT_NEW = "namespace.put('b', random_bytes(1 << 20, 2), new=True)"
MANY_APPENDS = """
with namespace.create('a', None, 0, aligned=False) as writer:
    for number in range(8):
        writer.append(memoryview(random_bytes(1 << 17, number)))
    writer.commit()
"""
APPEND = """
with namespace.create('a', aligned=False, base=namespace.stat('a')) as writer:
    writer.append(memoryview(random_bytes(1 << 20, 2)))
    writer.commit()
"""


@pytest.mark.parametrize("work", [PUT, PUT_NEW, MANY_APPENDS, APPEND])
def test_objects_that_a_repair_deletes_are_not_published(url: str, namespace: Namespace, work: str) -> None:
    """The writer stopped between its objects and its record: no record names them."""
    writer = Stopped(url, work, "namespace.record")
    try:
        assert "2 forgotten objects deleted" in repair(url) or work == MANY_APPENDS
        said = writer.goes_on()
    finally:
        writer.close()
    assert said.startswith("refused"), said
    assert "a repair has deleted its objects" in said, said
    assert content(namespace, "a") == OLD
    assert content(namespace, "b") is None
    whole(namespace)


@pytest.mark.parametrize("point", ["ledger.change", "ledger.changed"])
def test_a_writer_that_stops_while_members_agree(url: str, namespace: Namespace, point: str) -> None:
    """At the second point one member has the record already: what it names stays, though the writer is not answered."""
    writer = Stopped(url, PUT, point)
    try:
        repair(url)
        said = writer.goes_on()
    finally:
        writer.close()
    if said.startswith("acknowledged"):
        assert content(namespace, "a") == NEW
    assert content(namespace, "a") in (OLD, NEW), said
    whole(namespace)


def test_a_writer_that_stops_after_it_was_refused(url: str, namespace: Namespace) -> None:
    """It has given its objects names anew, and stands still once more while they are deleted."""
    writer = Stopped(url, PUT, "namespace.record", "ledger.change")
    try:
        assert begin_era(namespace) is not None
        writer.goes_on_to_the_next_point()
        assert "forgotten objects deleted" in repair(url)
        said = writer.goes_on()
    finally:
        writer.close()
    assert content(namespace, "a") == (NEW if said.startswith("acknowledged") else OLD), said
    whole(namespace)


def test_a_writer_that_no_repair_meets_loses_nothing(url: str, namespace: Namespace) -> None:
    """An era begins, and what it has written is there: it goes on with its objects, under other names."""
    writer = Stopped(url, PUT, "namespace.record")
    try:
        assert begin_era(namespace) is not None
        said = writer.goes_on()
    finally:
        writer.close()
    assert said.startswith("acknowledged"), said
    assert content(namespace, "a") == NEW
    whole(namespace)
    assert not surveys.scrub_namespace(namespace, grace_seconds=0.0).orphans, "the names from before are gone"


def test_what_was_deleted_and_collected_does_not_come_back(url: str, namespace: Namespace) -> None:
    """A writer stops while members may have its record. Nothing is left that says whether the file was deleted since."""
    collect_tombstones(namespace, 0.0)
    writer = Stopped(url, "namespace.put('b', b'small')", "ledger.accept")
    try:
        namespace.put("b", b"other")
        namespace.delete(["b"])
        assert collect_tombstones(namespace, 0.0) >= 1
        said = writer.goes_on()
    finally:
        writer.close()
    assert said.startswith("refused"), said
    assert "it can't be known whether it was published and then deleted" in said
    assert namespace.stat("b") is None


def test_a_renaming_that_stops(url: str, namespace: Namespace) -> None:
    """Meanwhile somebody deletes the file, and a repair its objects: it gets no second name."""
    client = Stopped(url, "namespace.rename('a', 'b')", "namespace.rename")
    try:
        namespace.delete(["a"])
        repair(url)
        said = client.goes_on()
    finally:
        client.close()
    assert said.startswith("refused"), said
    assert content(namespace, "a") is content(namespace, "b") is None
    whole(namespace)


@pytest.mark.parametrize(
    "work",
    ["repair.repair_namespace(namespace, scrub.scrub_namespace(namespace))", "rebalance.drain_member(namespace, MEMBER)"],
)
def test_a_repair_or_a_drain_that_stops(url: str, namespace: Namespace, work: str) -> None:
    """It has made fragments on other members, and another repair deletes them before a record names them."""
    file = namespace.stat("a")
    assert file is not None
    assert file.layout is not None
    holder = file.layout.objects[0]
    if work.startswith("repair"):
        namespace.open_members[holder.member].store.delete([holder.name])
    client = Stopped(url, work.replace("MEMBER", repr(holder.member)), "repair.record")
    try:
        repair(url)
        client.goes_on()
    finally:
        client.close()
    assert content(namespace, "a") == OLD
    whole(namespace)
