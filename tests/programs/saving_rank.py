"""One rank of a job, for tests that start real processes: `python saving_rank.py WHAT URL [options as JSON]`.

Its rank and size come from the detected group (torchrun, mpiexec, environment). It prints a line of JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from typing import Any

import numpy as np

import ckpt
from ckpt.groups import detect
from ckpt.storage.base.failpoints import set_failpoints

COLUMNS = 1000


def state_of(step: int, rank: int, size: int, fill: bool = True) -> dict[str, Any]:
    """Return rows of a matrix, a slice of a flattened one, a replicated leaf, and values of this rank only."""
    rows = np.arange(size * 4 * COLUMNS, dtype=np.float64).reshape(size * 4, COLUMNS) + step
    moments = np.arange(7 * size * 11, dtype=np.float32) * (step + 1)
    cuts = [len(moments) * i // size for i in range(size + 1)]
    copied = np.random.default_rng(step).standard_normal(50_000)
    part, flat = rows[4 * rank : 4 * rank + 4].copy(), moments[cuts[rank] : cuts[rank + 1]].copy()
    if not fill:
        part[:], flat[:], copied[:] = 0, 0, 0
    return {
        "rows": ckpt.Shard(part, rows.shape, (4 * rank, 0)),
        "flat": ckpt.Shard(flat, (7, size * 11), flat=cuts[rank]),
        "copied": copied,
        "own": {"step": step if fill else -1, "rank": rank if fill else -1},
        "random": ckpt.RandomState(),
    }


def require_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert np.array_equal(got["rows"].local, want["rows"].local)
    assert np.array_equal(got["flat"].local, want["flat"].local)
    assert np.array_equal(got["copied"], want["copied"])
    assert got["own"] == want["own"], (got["own"], want["own"])


def main() -> None:
    what, url, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    for module in options.get("imports", []):
        if module == "torch.distributed":
            import torch.distributed as dist

            dist.init_process_group("gloo")
        else:
            __import__(module, fromlist=["x"])
    group = detect()
    output: dict[str, Any] = {"rank": group.rank, "size": group.size, "group": group.name}
    if what == "load":
        loaded = ckpt.load(url, state_of(0, group.rank, group.size, False))
        step = loaded["own"]["step"]
        require_same(loaded, state_of(step, group.rank, group.size))
        output["step"] = step
    elif what == "train":
        with ckpt.Checkpointer(url, every=1, keep=2, timeout=options.get("timeout", 60)) as saver:
            state, start = saver.restore(state_of(0, group.rank, group.size, False))
            if start:
                require_same(state, state_of(start - 1, group.rank, group.size))
            if group.rank == options.get("victim"):
                set_failpoints(options["failpoints"])
            for step in range(start, start + options["steps"]):
                handle = saver.save(step, state_of(step, group.rank, group.size))
                if group.rank == 0 or options.get("wait"):
                    handle.result()
                    print(json.dumps({"committed": step}), flush=True)
            output |= {"start": start, "random": os.getpid()}
    print(json.dumps(output), flush=True)
    if "torch.distributed" in options.get("imports", []):
        import torch.distributed as dist

        group_reference = weakref.ref(dist.group.WORLD)
        dist.destroy_process_group()  # otherwise its threads are alive when the process ends, which may abort it
        gc.collect()
        assert group_reference() is None, "ckpt keeps the process group, and so its threads"


if __name__ == "__main__":
    main()
