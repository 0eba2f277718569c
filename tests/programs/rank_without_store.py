"""One of two ranks that save together; from the second save on, one of them can't write to the store.

    rank_without_store.py torch|jax|mpi|env FOLDER RANK [network]

RANK: the rank that fails. network: notes do not use shared memory. The report is FOLDER/report-<rank>.json, and no rank
ends before all have reported, as a rank that is found dead would end the wait of the other one, too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import ckpt
from ckpt.groups import host_notes
from ckpt.storage.base.failpoints import set_failpoints

SIZE = 2
BREAKS = "local.fsync=error@*,local.rename=error@*"  # no file becomes visible


def begin(kind: str, folder: Path) -> int:
    if kind == "torch":
        import torch.distributed as dist

        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=SIZE)
        return rank
    if kind == "jax":
        import jax

        jax.distributed.initialize(f"127.0.0.1:{os.environ['MASTER_PORT']}", SIZE, int(os.environ["RANK"]))
        return int(os.environ["RANK"])
    if kind == "mpi":
        from mpi4py import MPI

        return int(MPI.COMM_WORLD.Get_rank())
    return int(os.environ["RANK"])


def main() -> None:
    kind, folder, failing_rank = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    rank = begin(kind, folder)
    if sys.argv[4:] == ["network"]:
        host_notes._BASE = Path("/no/shared/memory")
    state = {"w": ckpt.Shard(np.full((4, 1000), float(rank)), (8, 1000), (4 * rank, 0))}
    report: dict[str, Any] = {}
    ck = ckpt.Checkpointer(folder / "repo", every=None, timeout=600.0)
    ck.save(0, state, blocking=True)
    if rank == failing_rank:
        set_failpoints(BREAKS)
    try:
        ck.save(1, state, blocking=True)
    except ckpt.CkptError as error:
        report = {"kind": type(error).__name__, "text": str(error)}
    (folder / f"report-{rank}.json.new").write_text(json.dumps(report))
    (folder / f"report-{rank}.json.new").rename(folder / f"report-{rank}.json")
    while len(list(folder.glob("report-*.json"))) < SIZE:
        time.sleep(0.05)
    if kind != "mpi":  # an MPI rank ends with MPI.Finalize, with or without notes
        os._exit(0)


if __name__ == "__main__":
    main()
