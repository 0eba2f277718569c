"""One process of a jax job: `python jax_rank.py WHAT URL PORT RANK SIZE DEVICES ROWS`. Prints a line of JSON."""

from __future__ import annotations

import json
import os
import sys

WHAT, URL, PORT, RANK, SIZE, DEVICES, ROWS = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:8])
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import ckpt  # noqa: E402
from ckpt.groups import jax as jax_group  # noqa: E402

WHOLE = np.arange(48 * 80, dtype=np.float32).reshape(48, 80)
LAYOUTS = [("rows",), ("rows", "columns"), (None, "columns"), (("columns", "rows"),), ()]


def arrays(mesh: Mesh, layouts: list[tuple[object, ...]], fill: bool) -> dict[str, jax.Array]:
    """Return one array for each layout, of which each process makes its own shards."""
    made = {}
    for i, layout in enumerate(layouts):
        sharding = NamedSharding(mesh, PartitionSpec(*layout))
        made[str(i)] = jax.make_array_from_callback(
            WHOLE.shape, sharding, lambda index, i=i: WHOLE[index] + i if fill else np.zeros_like(WHOLE[index])
        )
    return made


def save_several() -> None:
    """Save two steps, assert that the processes exchange no message for the second, and then let a save fail unseen."""
    ckpt.save({"step": 0}, URL, 0)
    first = next(jax_group._gather_numbers)
    ckpt.save({"step": 1}, URL, 1)
    assert next(jax_group._gather_numbers) == first + 1, "the processes have met again"
    failed = ckpt.save({"a": np.zeros(9 + RANK)}, URL, 2, blocking=False)  # one array of two shapes
    assert failed.wait(300)
    try:
        ckpt.save({"step": 3}, URL, 3)
    except ckpt.SaveFailed as error:
        assert "saving step 2" in str(error)
    else:
        raise AssertionError("the next save must raise the error of a save that nobody has seen")


def main() -> None:
    if SIZE > 1:
        jax.distributed.initialize(f"localhost:{PORT}", SIZE, RANK)
    mesh = Mesh(np.array(jax.devices()).reshape(ROWS, -1), ("rows", "columns"))
    output = {"rank": RANK, "devices": len(jax.devices())}
    if WHAT == "save":
        state = {"arrays": arrays(mesh, LAYOUTS, True), "step": 7, "key": jax.random.key(3) if SIZE == 1 else None}
        ckpt.save(state, URL, 7)
    elif WHAT == "save several":
        save_several()
    else:
        like = {"arrays": arrays(mesh, LAYOUTS[::-1], False), "step": 0}
        loaded = ckpt.load(URL, like, share_reads=WHAT == "share")
        assert loaded["step"] == 7
        for i, array in enumerate(loaded["arrays"].values()):
            assert array.sharding == like["arrays"][str(i)].sharding
            for shard in array.addressable_shards:
                assert np.array_equal(shard.data, WHOLE[shard.index] + i)
    print(json.dumps(output), flush=True)
    if SIZE > 1:
        jax.distributed.shutdown()


main()
