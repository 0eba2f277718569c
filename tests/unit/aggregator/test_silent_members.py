"""Members that become silent while their records are restored, or while unfinished files are discarded."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from helpers.nodes import NodeProcess, directories, node_processes, nodes_config
from helpers.processes import until
from helpers.registers import new_registers, replicated_registers

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import all_records, scrub
from ckpt.aggregator.records import damaged_records
from ckpt.storage.base.errors import Unavailable
from ckpt.storage.base.fd_io import DescriptorReader
from ckpt.storage.node.client import NodeStore
from ckpt.storage.registers.base import Register, Registers, RegisterValue
from ckpt.storage.registers.sqlite import SqliteRegisters
from ckpt.storage.testing import random_bytes

PATHS = [f"p{i:03}" for i in range(100)]


@pytest.fixture
def registers(tmp_path: Path) -> dict[str, Registers]:
    """Three members, of which m2 has got a new disk after the records were written."""
    made: dict[str, Registers] = {f"m{i}": new_registers(tmp_path / f"{i}.sqlite") for i in range(2)}
    made["m2"] = SqliteRegisters(str(tmp_path / "2.sqlite"))
    replicated_registers(made).update(PATHS, lambda _, __: RegisterValue(b"", b"one"))
    made["m2"].close()
    for file in tmp_path.glob("2.sqlite*"):
        file.unlink()
    made["m2"] = SqliteRegisters(str(tmp_path / "2.sqlite"))
    return made


def test_the_records_of_a_new_disk_are_restored_by_one_call(
    registers: dict[str, Registers], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckpt")
    calls: list[int] = []
    accept = registers["m2"].accept

    def counted(values: Sequence[Any], *arguments: Any, repair_damaged: bool = False, **options: Any) -> list[bool]:
        if repair_damaged:
            calls.append(len(values))
        return accept(values, *arguments, repair_damaged=repair_damaged, **options)

    registers["m2"].accept = counted  # type: ignore[method-assign]
    replicated_registers(registers).settle(PATHS)
    assert calls == [len(PATHS)]
    assert all(isinstance(answer, Register) for answer in registers["m2"].read(PATHS))
    assert f"m2 had no record of {PATHS[7]} (its registers are new), and has one again" in caplog.text
    assert "was damaged" not in caplog.text


def test_nothing_waits_for_a_new_disk_that_is_silent(
    registers: dict[str, Registers], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "ckpt")
    monkeypatch.setattr(damaged_records, "_SECONDS", 0.01)
    over = threading.Event()
    waits: list[bool] = []
    accept = registers["m2"].accept

    def silent(*arguments: Any, repair_damaged: bool = False, **options: Any) -> list[bool]:
        if not repair_damaged:
            return accept(*arguments, **options)
        waits.append(over.wait(300))
        raise Unavailable("no answer")

    registers["m2"].accept = silent  # type: ignore[method-assign]
    replicated_registers(registers).settle(PATHS)
    assert waits == []
    assert "100 damaged records on m2 could not be restored yet" in caplog.text
    over.set()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[NodeProcess]]:
    with node_processes(tmp_path, 3) as made:
        yield made


@pytest.mark.slow
def test_a_writer_is_aborted_while_a_node_is_silent(processes: list[NodeProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    """The call to the silent node is still running when `abort` returns. The others have discarded their objects then."""
    namespace = Namespace(nodes_config(processes, redundancy="3x", deadline_seconds=300.0))
    writer = namespace.create("a")
    writer.append(memoryview(random_bytes(100_000, 1)))
    ended: list[str] = []
    call = NodeStore.call

    def noted(store: NodeStore, verb: str, *arguments: object, deadline: float | None = None) -> Any:
        try:
            return call(store, verb, *arguments, deadline=deadline)
        finally:
            if verb == "abort":
                ended.append(store.address)

    monkeypatch.setattr(NodeStore, "call", noted)
    silent, *others = processes
    silent.signal(signal.SIGSTOP)
    writer.abort()
    assert silent.stopped()
    assert sorted(ended) == sorted(process.address for process in others)
    silent.signal(signal.SIGCONT)
    until(lambda: silent.address in ended, "the node discards its object, too")
    namespace.close()


def test_an_abort_does_not_show_that_a_member_answers(processes: list[NodeProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    """It returns also if the member did not answer. That of a member that is down runs in the background."""
    namespace = Namespace(nodes_config(processes, redundancy="3x"))
    writer = namespace.create("a")
    writer.append(memoryview(random_bytes(100_000, 1)))
    lost = processes[0]
    lost.kill()
    namespace.fan_out.health.record_failure(lost.address, "no answer")
    aborts: list[Future[Any]] = []
    submit = namespace.fan_out.submit

    def noted(name: str, *arguments: Any, **options: Any) -> Future[Any]:
        future = submit(name, *arguments, **options)
        if name == lost.address:
            aborts.append(future)
        return future

    monkeypatch.setattr(namespace.fan_out, "submit", noted)
    writer.abort()
    (abort,) = aborts
    abort.result(300)
    assert namespace.fan_out.health.is_down(lost.address)
    namespace.close()


@pytest.mark.slow
def test_a_member_that_becomes_silent_during_a_scrub_is_reported_as_missing(
    processes: list[NodeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has listed its records, and does not answer when they are read."""
    namespace = Namespace(nodes_config(processes, redundancy="2x", deadline_seconds=10.0))
    namespace.put("a", b"1")
    silent = processes[0]
    scan = namespace.scan

    def scan_and_stop(*arguments: Any, **options: Any) -> Any:
        found = scan(*arguments, **options)
        silent.signal(signal.SIGSTOP)
        return found

    monkeypatch.setattr(namespace, "scan", scan_and_stop)
    found = scrub.scrub_namespace(namespace)
    assert silent.stopped()
    assert [*found.missing_members] == [silent.address]
    assert found.files == 1
    assert not found.orphans
    namespace.close()


def test_the_records_of_all_members_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrub waits for the slowest member, not for one after the other."""
    namespace = Namespace(directories(tmp_path, 3))
    namespace.put("a", b"1")
    namespace.settle(["/a"])
    answers, _ = namespace.scan("/")
    all_read = threading.Barrier(3)
    read = SqliteRegisters.read

    def read_together(registers: SqliteRegisters, *arguments: Any) -> Any:
        all_read.wait(300)
        return read(registers, *arguments)

    monkeypatch.setattr(SqliteRegisters, "read", read_together)
    assert all_records._MemberRecords().read_changed(namespace, answers)
    namespace.close()


def test_an_interrupted_read_writes_nothing_more_into_the_memory_of_its_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member answers when the caller already uses the memory for something else."""
    namespace = Namespace(directories(tmp_path, 2, redundancy="2x"))
    namespace.put("a", random_bytes(100_000, 1))
    resumed, ended = threading.Event(), threading.Event()
    read_into = DescriptorReader.read_into

    def silent(reader: DescriptorReader, position: int, buffer: memoryview) -> int:
        os.kill(os.getpid(), signal.SIGINT)  # the main thread waits for this read
        resumed.wait(300)
        try:
            return read_into(reader, position, buffer)
        finally:
            ended.set()

    memory = bytearray(100_000)
    with namespace.open("a") as file:
        monkeypatch.setattr(DescriptorReader, "read_into", silent)
        with pytest.raises(KeyboardInterrupt):
            file.read_into(0, memoryview(memory))
        resumed.set()
        assert ended.wait(300)
    assert memory == bytes(100_000)
    namespace.close()
