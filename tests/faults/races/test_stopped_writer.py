"""A client is stopped while a repair deletes objects without a record: it publishes existing objects, or it is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from helpers.nodes import NodeProcess
from helpers.stopped_client import StoppedClient

from ckpt.aggregator.file_io.namespace import Namespace, open_namespace
from ckpt.aggregator.maintenance import scrub
from ckpt.aggregator.records.eras import begin_era
from ckpt.aggregator.records.tombstone_collection import collect_tombstones
from ckpt.storage.base.errors import NotFound
from ckpt.storage.testing import random_bytes

OLD, NEW = random_bytes(1 << 20, 1), random_bytes(1 << 20, 2)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    nodes = [NodeProcess(tmp_path_factory.mktemp("nodes") / f"n{i}") for i in range(4)]
    try:
        yield "ckpt://" + ",".join(node.address for node in nodes)
    finally:
        for node in nodes:
            node.close()


@pytest.fixture
def namespace(url: str) -> Namespace:
    opened, _ = open_namespace(url)
    opened.put("a", OLD)
    opened.delete(["b"])
    return opened


def run_repair(url: str) -> str:
    """Run a repair as an operator does, without the hour for which objects without a record are left alone; return its
    output."""
    command = [sys.executable, "-m", "ckpt.tools.node", "admin", "repair", url, "--quick", "--grace", "0"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout


def content(namespace: Namespace, path: str) -> bytes | None:
    """Return the bytes of a file, or None where it does not exist."""
    try:
        return namespace.get(path)
    except NotFound:
        return None


def assert_whole(namespace: Namespace) -> None:
    """Check that all records name objects that exist, and that all members answer."""
    found = scrub.scrub_namespace(namespace, verify=True, grace_seconds=0.0)
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
    """The writer is stopped between its objects and its record: no record names the objects."""
    writer = StoppedClient(url, work, "namespace.record")
    try:
        assert "2 unreferenced objects deleted" in run_repair(url) or work == MANY_APPENDS
        outcome = writer.finish()
    finally:
        writer.close()
    assert outcome.startswith("refused"), outcome
    assert "a repair has deleted its objects" in outcome, outcome
    assert content(namespace, "a") == OLD
    assert content(namespace, "b") is None
    assert_whole(namespace)


@pytest.mark.parametrize("point", ["register.change", "register.changed"])
def test_a_repair_deletes_no_object_of_a_record_that_a_member_has(url: str, namespace: Namespace, point: str) -> None:
    """At the second point one member has the record already: its objects stay, though the writer has no reply yet."""
    writer = StoppedClient(url, PUT, point)
    try:
        run_repair(url)
        outcome = writer.finish()
    finally:
        writer.close()
    if outcome.startswith("acknowledged"):
        assert content(namespace, "a") == NEW
    assert content(namespace, "a") in (OLD, NEW), outcome
    assert_whole(namespace)


def test_a_refused_writer_that_stops_again_publishes_its_data_or_fails(url: str, namespace: Namespace) -> None:
    """It has renamed its objects, and is stopped again while a repair deletes them."""
    writer = StoppedClient(url, PUT, "namespace.record", "register.change")
    try:
        assert begin_era(namespace) is not None
        writer.continue_to_next_point()
        assert "unreferenced objects deleted" in run_repair(url)
        outcome = writer.finish()
    finally:
        writer.close()
    assert content(namespace, "a") == (NEW if outcome.startswith("acknowledged") else OLD), outcome
    assert_whole(namespace)


def test_a_writer_without_a_repair_publishes_its_objects_in_a_new_era(url: str, namespace: Namespace) -> None:
    """An era begins, and the objects exist: the writer publishes them under other names."""
    writer = StoppedClient(url, PUT, "namespace.record")
    try:
        assert begin_era(namespace) is not None
        outcome = writer.finish()
    finally:
        writer.close()
    assert outcome.startswith("acknowledged"), outcome
    assert content(namespace, "a") == NEW
    assert_whole(namespace)
    assert not scrub.scrub_namespace(namespace, grace_seconds=0.0).orphans, "objects with the old names are left"


def test_a_stopped_writer_does_not_bring_back_a_collected_file(url: str, namespace: Namespace) -> None:
    """The writer stops while members may have its record. The collection removes every trace of whether the file was deleted
    since."""
    collect_tombstones(namespace, 0.0)
    writer = StoppedClient(url, "namespace.put('b', b'small')", "register.accept")
    try:
        namespace.put("b", b"other")
        namespace.delete(["b"])
        assert collect_tombstones(namespace, 0.0) >= 1
        outcome = writer.finish()
    finally:
        writer.close()
    assert outcome.startswith("refused"), outcome
    assert "it can't be known whether it was published and then deleted" in outcome
    assert namespace.stat("b") is None


def test_a_stopped_rename_of_a_deleted_file_is_refused(url: str, namespace: Namespace) -> None:
    """Another client deletes the file meanwhile, and a repair deletes its objects: the file gets no second name."""
    client = StoppedClient(url, "namespace.rename('a', 'b')", "namespace.rename")
    try:
        namespace.delete(["a"])
        run_repair(url)
        outcome = client.finish()
    finally:
        client.close()
    assert outcome.startswith("refused"), outcome
    assert content(namespace, "a") is content(namespace, "b") is None
    assert_whole(namespace)


@pytest.mark.parametrize(
    "work",
    ["repair.repair_namespace(namespace, scrub.scrub_namespace(namespace))", "rebalance.drain_member(namespace, MEMBER)"],
)
def test_a_stopped_repair_or_drain_names_no_deleted_fragment(url: str, namespace: Namespace, work: str) -> None:
    """It has made fragments on other members, and another repair deletes them before a record names them."""
    file = namespace.stat("a")
    assert file is not None
    assert file.layout is not None
    holder = file.layout.objects[0]
    if work.startswith("repair"):
        namespace.open_members[holder.member].store.delete([holder.name])
    client = StoppedClient(url, work.replace("MEMBER", repr(holder.member)), "repair.record")
    try:
        run_repair(url)
        client.finish()
    finally:
        client.close()
    assert content(namespace, "a") == OLD
    assert_whole(namespace)
