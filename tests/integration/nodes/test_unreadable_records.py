"""The commands that maintain a namespace continue past a record that can't be read, name its path, and delete nothing."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from helpers.damaged_namespaces import damage_record, write_newer_record
from helpers.nodes import directories

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance.repair_leader import RepairLeader
from ckpt.aggregator.placement.rendezvous_hash import choose_members
from ckpt.storage.base.errors import Unavailable
from ckpt.storage.testing import random_bytes

MakeUnreadable = Callable[[Namespace, Path, str], None]


def admin(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckpt.tools.node", "admin", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def lose_quorum(namespace: Namespace, folder: Path, path: str) -> None:
    """Damage the record of a path on all but one of the members that keep it."""
    members = namespace.ring.replica_set(f"/{path}").members
    for member in members[: len(members) - 1]:
        damage_record(folder / member, path)


def lose_all_records(namespace: Namespace, folder: Path, path: str) -> None:
    """Damage the record of a path on all members that keep it."""
    for member in namespace.ring.replica_set(f"/{path}").members:
        damage_record(folder / member, path)


def make_newer(namespace: Namespace, folder: Path, path: str) -> None:
    """Replace the record of a path by one that a newer version would write."""
    write_newer_record(namespace, path)


@pytest.fixture
def open_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Namespace]:
    """Return a function that creates ckpt://lab on some directories, with files of these paths, and returns a client of it."""

    def create(paths: Sequence[str], count: int = 3, size: int = 100_000) -> Namespace:
        members = ", ".join(f'{{ url = "{tmp_path}/disk{i}", name = "disk{i}" }}' for i in range(count))
        (tmp_path / "config.toml").write_text(f"[namespaces.lab]\nmembers = [{members}]\n")
        monkeypatch.setenv("CKPT_CONFIG", str(tmp_path / "config.toml"))
        namespace = Namespace(directories(tmp_path, count))
        for number, path in enumerate(paths):
            namespace.put(path, random_bytes(size, number))
        namespace.settle([f"/{path}" for path in paths])
        return namespace

    return create


def objects_of(folder: Path) -> set[Path]:
    return {path for path in folder.glob("disk*/objects/**/*") if path.is_file()}


def lose_object(namespace: Namespace, folder: Path, path: str) -> None:
    """Delete one of the objects of a file."""
    file = namespace.stat(path)
    assert file is not None
    assert file.layout is not None
    lost = file.layout.objects[0]
    (folder / lost.member / "objects" / lost.name).unlink()


@pytest.mark.parametrize("mode", [[], ["--quick"]], ids=["full", "quick"])
@pytest.mark.parametrize("make_unreadable", [lose_quorum, lose_all_records, make_newer])
def test_repair_repairs_the_other_files_and_deletes_nothing(
    tmp_path: Path, open_lab: Callable[..., Namespace], make_unreadable: MakeUnreadable, mode: list[str]
) -> None:
    """Without its record, each object of the file looks like one that no record names."""
    namespace = open_lab("nm")
    writer = namespace.create("torn")
    writer.append(memoryview(random_bytes(100_000, 5)))
    writer._commit_objects()  # these objects have no record, and count as orphans at once with --grace 0
    lose_object(namespace, tmp_path, "m")
    before = objects_of(tmp_path)
    make_unreadable(namespace, tmp_path, "n")
    done = admin("repair", "ckpt://lab", "--grace", "0", *mode)
    assert done.returncode == 1, done
    lines = done.stdout.splitlines()
    assert sum(line.startswith("n: ") for line in lines) == 1, done.stdout
    assert sum("1 record can't be read, so no unreferenced object is deleted: " in line for line in lines) == 1, done.stdout
    assert any(line.startswith("m: endangered") for line in lines), done.stdout
    assert "1 file made whole" in done.stdout
    assert done.stdout.rstrip().endswith("0 unreferenced objects deleted; not all whole yet")
    assert "Traceback" not in done.stderr, done.stderr
    assert before <= objects_of(tmp_path)
    assert namespace.get("m") == random_bytes(100_000, 1)
    done = admin("scrub", "ckpt://lab", "--json", "--grace", "0", *mode)
    assert done.returncode == 1, done
    found = json.loads(done.stdout)
    assert (found["files"], found["damaged"], found["unreadable"], found["whole"]) == (1, [], ["n"], False)
    assert found["orphans"] == {}
    namespace.close()


def test_a_report_names_ten_unreadable_paths_and_counts_the_others(open_lab: Callable[..., Namespace]) -> None:
    paths = [f"f{i:02}" for i in range(13)]
    namespace = open_lab([*paths, "whole"], size=100)
    for path in paths[:12]:
        write_newer_record(namespace, path)
    namespace.close()
    for command in ("scrub", "repair"):
        done = admin(command, "--quick", "ckpt://lab")
        assert done.returncode == 1, done
        lines = done.stdout.splitlines()
        assert [line[:5] for line in lines[:10]] == [f"{path}: " for path in paths[:10]], done.stdout
        assert lines[10] == "… and 2 more"
        assert lines[11] == (
            "12 records can't be read, so no unreferenced object is deleted: start all members, install a newer ckpt-store if "
            "one wrote them, or write the files again under other names"
        )
        assert not any(line.startswith(("f10: ", "f11: ", "f12: ")) for line in lines), done.stdout
        assert "2 files, 200 B in ckpt://lab: not all whole" in done.stdout


def test_a_scrub_without_unreadable_records_reports_an_empty_list(open_lab: Callable[..., Namespace]) -> None:
    open_lab("nm").close()
    done = admin("scrub", "--json", "ckpt://lab")
    assert done.returncode == 0, done
    assert json.loads(done.stdout)["unreadable"] == []


@pytest.mark.parametrize(
    ("command", "make_unreadable"),  # `forget` can't copy a record without a quorum to other members
    [(c, m) for c in ("drain", "rebalance", "forget") for m in (lose_quorum, make_newer) if (c, m) != ("forget", lose_quorum)],
)
def test_the_other_files_are_moved(
    tmp_path: Path, open_lab: Callable[..., Namespace], command: str, make_unreadable: MakeUnreadable
) -> None:
    """The fragments of the unreadable file may be among those to move, so the command does not report success."""
    paths = [f"f{i}" for i in range(8)]
    namespace = open_lab(["n", *paths], count=4)
    make_unreadable(namespace, tmp_path, "n")
    if command == "rebalance":  # as after a time in which other members were down
        namespace.locations = namespace.locations[:2]
        for number, path in enumerate(paths):
            namespace.put(path, random_bytes(100_000, number + 1))
    before = objects_of(tmp_path)
    done = admin(command, "ckpt://lab", *([] if command == "rebalance" else ["disk1"]))
    assert done.returncode == 1, done
    assert sum(line.startswith("n: ") for line in done.stdout.splitlines()) == 1, done
    assert not done.stdout.startswith("0 files moved"), done.stdout
    assert "is forgotten" not in done.stdout
    assert "Traceback" not in done.stderr, done.stderr
    namespace.close()
    namespace = Namespace(directories(tmp_path, 4))
    for number, path in enumerate(paths):
        file = namespace.stat(path)
        assert file is not None
        assert file.layout is not None
        assert namespace.get(path) == random_bytes(100_000, number + 1)
        members = {o.member for o in file.layout.objects}
        if command == "rebalance":
            (stripe,) = file.layout.stripes
            assert members == set(choose_members(f"{file.head.version}/0", namespace.locations, len(stripe.fragments)))
        else:
            assert "disk1" not in members
    assert len(before & objects_of(tmp_path)) >= 2, "those of the unreadable file"
    namespace.close()


def test_repair_repairs_files_while_a_record_keeps_a_ring_change_from_its_end(
    tmp_path: Path, open_lab: Callable[..., Namespace]
) -> None:
    """A `forget` that could not copy the record leaves the change half-done."""
    namespace = open_lab("nm", count=4)
    lose_quorum(namespace, tmp_path, "n")
    done = admin("forget", "ckpt://lab", "disk3")
    assert done.returncode == 1, done
    (reason,) = [line for line in done.stdout.splitlines() if line.startswith("the records: ")]
    assert "1 record can't be copied to other members (/n); the other records are: can't change /n" in reason
    namespace.close()
    namespace = Namespace(directories(tmp_path, 4))
    lose_object(namespace, tmp_path, "m")
    done = admin("repair", "--quick", "ckpt://lab")
    assert done.returncode == 1, done
    lines = done.stdout.splitlines()
    assert any(line.startswith("n: ") for line in lines), done
    assert any(line.startswith("the records: ") for line in lines), done
    assert "1 file made whole" in done.stdout
    assert namespace.get("m") == random_bytes(100_000, 1)
    with pytest.raises(Unavailable):
        namespace.get("n")
    namespace.close()


def test_the_repair_by_a_node_counts_unreadable_records(
    open_lab: Callable[..., Namespace], caplog: pytest.LogCaptureFixture
) -> None:
    namespace = open_lab("nm")
    write_newer_record(namespace, "n")
    leader = RepairLeader(lambda: namespace, "process", 1e9)
    with caplog.at_level(logging.INFO):
        leader.repair_once(verify=False)
    leader.close(600)
    assert "; 1 files could not be repaired, 0 members are missing" in caplog.text
    assert "the record of n can't be read" in caplog.text
    namespace.close()
