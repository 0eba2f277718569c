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


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
def test_acknowledged_files_survive_random_fault_schedules(tmp_path: Path, seed: int) -> None:
    """Random writes, deletions, losses, damage, repairs and changes of the record ring: after each step, every acknowledged
    file is readable and equal."""
    draw = random.Random(seed)
    redundancy, count = draw.choice([("2x", 4), ("3x", 5), ("2+1", 5), ("4+2", 7)])
    code = parse_redundancy(redundancy)
    acknowledged: dict[str, bytes] = {"first": b"1"}
    numbers = itertools.count()
    damaged: set[str] = set()
    namespace = Namespace(directories(tmp_path, count, redundancy=redundancy))
    namespace.put("first", b"1")
    actions = ["put", "put", "put", "replace", "delete", "lose", "rot", "wipe", "away", "change", "repair", "open"]
    for _ in range(draw.randint(10, 25)):
        action = draw.choice(actions)
        if action in ("put", "replace"):
            path = draw.choice(list(acknowledged)) if action == "replace" and acknowledged else f"f{next(numbers)}"
            data = draw.randbytes(draw.choice([0, 10, 33_000, 70_000, 600_000]))
            namespace.put(path, data)
            acknowledged[path] = data
        elif action == "delete" and acknowledged:
            path = draw.choice(list(acknowledged))
            namespace.delete([path])
            del acknowledged[path]
        elif action == "change":
            ring = draw.sample(namespace.locations, draw.randint(2 * code.tolerated_losses + 1, count))
            if damaged & ({s.name for s in ring} | set(namespace.ring.all_members)):
                continue  # the records of these members may be lost, too
            change_ring(namespace, ring)
        elif action == "away":  # the member misses all changes until it is back
            member = f"disk{draw.randrange(count)}"
            if damaged - {member} or not (tmp_path / member).exists():
                continue
            (tmp_path / member).rename(tmp_path / "away")
            (tmp_path / member).write_text("not a folder")
            data = draw.randbytes(draw.choice([10, 70_000]))
            path = draw.choice([*acknowledged, f"f{next(numbers)}"])
            namespace.put(path, data)
            acknowledged[path] = data
            (tmp_path / member).unlink()
            (tmp_path / "away").rename(tmp_path / member)
            namespace.close()
            namespace = Namespace(directories(tmp_path, count, redundancy=redundancy))
        elif action == "wipe":  # an empty disk replaces it
            member = f"disk{draw.randrange(count)}"
            if len(damaged | {member}) > code.tolerated_losses:
                continue
            damaged.add(member)
            namespace.close()
            shutil.rmtree(tmp_path / member, ignore_errors=True)
            namespace = Namespace(directories(tmp_path, count, redundancy=redundancy))
        elif action in ("lose", "rot"):
            member = f"disk{draw.randrange(count)}"
            if len(damaged | {member}) > code.tolerated_losses:
                continue
            damaged.add(member)
            objects = [p for p in (tmp_path / member / "objects").rglob("*") if p.is_file()]
            for victim in draw.sample(objects, draw.randint(0, len(objects))):
                if action == "lose":
                    victim.unlink()
                elif victim.stat().st_size:
                    raw = bytearray(victim.read_bytes())
                    raw[draw.randrange(len(raw))] ^= 0x40
                    victim.write_bytes(raw)
        elif action == "repair":
            done = repair.repair_namespace(namespace, scrub.scrub_namespace(namespace, verify=True))
            assert not done.failed, (seed, done.failed)
            damaged.clear()
        elif action == "open":
            namespace.close()
            namespace = Namespace(directories(tmp_path, count, redundancy=redundancy))
        assert list(namespace.list()) == sorted(acknowledged), seed
        for path, data in acknowledged.items():
            try:
                assert namespace.get(path) == data, (seed, path)
            except StoreError as error:
                raise AssertionError(f"seed {seed}: {path}: {error}") from error
    namespace.close()
