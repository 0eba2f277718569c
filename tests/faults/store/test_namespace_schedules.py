"""Random schedules of faults: no acknowledged file is lost while the redundancy tolerates the faults."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.damaged_namespaces import assert_whole, content, filled_namespace
from helpers.folders import TESTS
from helpers.nodes import directories
from helpers.processes import SOAK

from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import repair, scrub
from ckpt.aggregator.placement.redundancy import parse_redundancy
from ckpt.aggregator.records.ring_change import change_ring
from ckpt.storage.base.errors import StoreError


@pytest.mark.parametrize("point", ["repair.fragment", "repair.commit", "register.change", "register.changed"])
def test_the_next_repair_completes_a_killed_one(tmp_path: Path, point: str) -> None:
    filled_namespace(tmp_path, "2x", 4).close()
    shutil.rmtree(next(tmp_path.glob("disk*/objects")))  # not every disk has objects
    program = (
        "import sys; from pathlib import Path; from helpers.nodes import directories\n"
        "from ckpt.aggregator.file_io.namespace import Namespace\n"
        "from ckpt.aggregator.maintenance.repair import repair_namespace, scrub_namespace\n"
        "n = Namespace(directories(Path(sys.argv[1]), 4)); repair_namespace(n, scrub_namespace(n)); print('done'); n.close()"
    )
    environment = os.environ | {"CKPT_FAILPOINTS": f"{point}=kill", "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    namespace = Namespace(directories(tmp_path, 4))
    for path, data in content().items():
        assert namespace.get(path) == data
    assert not repair.repair_namespace(namespace, scrub.scrub_namespace(namespace)).failed
    assert_whole(namespace, "2x")
    namespace.close()


SEEDS = [int(os.environ["CKPT_SEED"])] if "CKPT_SEED" in os.environ else range(1000 if SOAK else 15)


class Schedule:
    """A namespace, what was written to it, and the steps of a random schedule."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed, self.draw = folder, seed, random.Random(seed)
        self._redundancy, self._count = self.draw.choice([("2x", 4), ("3x", 5), ("2+1", 5), ("4+2", 7)])
        self._tolerated_losses = parse_redundancy(self._redundancy).tolerated_losses
        self._numbers = itertools.count()
        self._damaged: set[str] = set()
        self.acknowledged = {"first": b"1"}
        self.namespace = self._open()
        self.namespace.put("first", b"1")

    def step(self) -> None:
        """Do something at random. A step that could lose acknowledged files does nothing."""
        self.draw.choice(
            [
                self._write, self._write, self._write, self._replace, self._delete, self._lose_objects, self._damage_objects,
                self._replace_disk, self._miss_write, self._change_ring, self._repair, self._open_again,
            ]
        )()  # fmt: skip

    def _open(self) -> Namespace:
        return Namespace(directories(self._folder, self._count, redundancy=self._redundancy))

    def _open_again(self) -> None:
        self.namespace.close()
        self.namespace = self._open()

    def _put(self, path: str, data: bytes) -> None:
        self.namespace.put(path, data)
        self.acknowledged[path] = data

    def _new_path(self) -> str:
        return f"f{next(self._numbers)}"

    def _random_data(self) -> bytes:
        return self.draw.randbytes(self.draw.choice([0, 10, 33_000, 70_000, 600_000]))

    def _write(self) -> None:
        self._put(self._new_path(), self._random_data())

    def _replace(self) -> None:
        path = self.draw.choice(list(self.acknowledged)) if self.acknowledged else self._new_path()
        self._put(path, self._random_data())

    def _delete(self) -> None:
        if self.acknowledged:
            path = self.draw.choice(list(self.acknowledged))
            self.namespace.delete([path])
            del self.acknowledged[path]

    def _change_ring(self) -> None:
        ring = self.draw.sample(self.namespace.locations, self.draw.randint(2 * self._tolerated_losses + 1, self._count))
        if not self._damaged & ({s.name for s in ring} | set(self.namespace.ring.all_members)):
            change_ring(self.namespace, ring)  # else the records of these members may be lost, too

    def _random_member(self) -> str:
        return f"disk{self.draw.randrange(self._count)}"

    def _miss_write(self) -> None:
        """A member is away during a write."""
        member = self._random_member()
        disk, away = self._folder / member, self._folder / "away"
        if self._damaged - {member} or not disk.exists():
            return
        disk.rename(away)
        disk.write_text("not a folder")
        data = self.draw.randbytes(self.draw.choice([10, 70_000]))
        self._put(self.draw.choice([*self.acknowledged, self._new_path()]), data)
        disk.unlink()
        away.rename(disk)
        self._open_again()

    def _disk_to_damage(self) -> Path | None:
        """Return the disk of a random member; None if its damage could lose acknowledged files."""
        member = self._random_member()
        if len(self._damaged | {member}) > self._tolerated_losses:
            return None
        self._damaged.add(member)
        return self._folder / member

    def _objects_to_damage(self) -> list[Path]:
        if (disk := self._disk_to_damage()) is None:
            return []
        objects = [p for p in (disk / "objects").rglob("*") if p.is_file()]
        return self.draw.sample(objects, self.draw.randint(0, len(objects)))

    def _replace_disk(self) -> None:
        """An empty disk replaces one."""
        if (disk := self._disk_to_damage()) is not None:
            self.namespace.close()
            shutil.rmtree(disk, ignore_errors=True)
            self.namespace = self._open()

    def _lose_objects(self) -> None:
        for path in self._objects_to_damage():
            path.unlink()

    def _damage_objects(self) -> None:
        for path in self._objects_to_damage():
            if path.stat().st_size:
                raw = bytearray(path.read_bytes())
                raw[self.draw.randrange(len(raw))] ^= 0x40
                path.write_bytes(raw)

    def _repair(self) -> None:
        done = repair.repair_namespace(self.namespace, scrub.scrub_namespace(self.namespace, verify=True))
        assert not done.failed, (self._seed, done.failed)
        self._damaged.clear()


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
def test_acknowledged_files_survive_random_fault_schedules(tmp_path: Path, seed: int) -> None:
    """Random writes, deletions, losses, damage, repairs and changes of the record ring: after each step, every acknowledged
    file is readable and equal."""
    schedule = Schedule(tmp_path, seed)
    for _ in range(schedule.draw.randint(10, 25)):
        schedule.step()
        assert list(schedule.namespace.list()) == sorted(schedule.acknowledged), seed
        for path, data in schedule.acknowledged.items():
            try:
                assert schedule.namespace.get(path) == data, (seed, path)
            except StoreError as error:
                raise AssertionError(f"seed {seed}: {path}: {error}") from error
    schedule.namespace.close()
