"""The child process of a run, which measures one thing in a process that has done nothing else.

run.py starts it. By hand: `python benchmarks/one.py ckpt --data /tmp/x --gib 1 --repeat 3 --result /tmp/ckpt.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from dataclasses import asdict
from pathlib import Path

import states
from peers import PEERS, Peer
from probes import PeakMemory, drop_cache, fsync_files, quiet_step_seconds, step_seconds, stored_bytes
from results import PeerResult

STEP_ROUNDS = 3
"""How many times more rounds measure the training step, which varies by a few percent from round to round."""
SETTLE_SECONDS = 1.0
"""The wait before a round, because a virtual machine returns freed memory to its host for a moment."""


def measure_peer(peer: Peer, state: states.State, folder: Path, repeat: int) -> PeerResult:
    """Save and load `repeat` times, each time in a new folder, after one round as warm-up."""
    found = PeerResult(states.nbytes(state), [], [], [], [], [], 0, 0, 0, [])
    for number in range(repeat + 1):
        warm_up = number == 0
        target = folder / f"{number}"
        copy = states.copy_seconds(state, states.blank(state)) if peer.background else 0.0
        os.sync()
        with PeakMemory(peer.helper_pids) as memory:
            began = time.perf_counter()
            peer.save(state, target)
            stall = time.perf_counter() - began
            peer.finish()
            fsync_files(target)
            durable = time.perf_counter() - began
        found.save_memory_bytes = max(found.save_memory_bytes, memory.nbytes)
        found.stored_bytes = stored_bytes(target)

        like = states.blank(state)
        drop_cache(target)
        if warm_up:  # not in the timed rounds, because the sampling slows the load
            with PeakMemory(peer.helper_pids) as memory:
                peer.load(target, like)
            found.load_memory_bytes = memory.nbytes
            drop_cache(target)
        began = time.perf_counter()
        peer.load(target, like)
        cold = time.perf_counter() - began
        began = time.perf_counter()
        loaded = peer.load(target, like)
        hot = time.perf_counter() - began
        states.require_equal(loaded, state)
        del like, loaded
        shutil.rmtree(target)

        if not warm_up:
            found.stall_seconds.append(stall)
            found.copy_seconds.append(copy)
            found.durable_seconds.append(durable)
            found.cold_seconds.append(cold)
            found.hot_seconds.append(hot)
    if peer.background:  # after the timed rounds, which this would disturb
        found.step_ratios = [step_ratio(peer, state, folder / f"step-{number}") for number in range(STEP_ROUNDS * repeat)]
    return found


def step_ratio(peer: Peer, state: states.State, target: Path) -> float:
    """Return the time of a training step during a save in the background, over that of steps before and after."""
    os.sync()  # otherwise the deletion of the previous round continues during the steps
    time.sleep(SETTLE_SECONDS)
    before = quiet_step_seconds()
    peer.save(state, target)
    busy = step_seconds(lambda steps: peer.done())
    peer.finish()
    after = quiet_step_seconds()
    shutil.rmtree(target)
    return 2 * busy / (before + after)


def main() -> None:
    """Measure one thing, and write the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["limits", "lazy", *PEERS])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--leaves", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()

    folder = args.data / args.what
    folder.mkdir(parents=True)
    try:
        if args.what == "limits":
            import limits

            found = limits.measure(folder, args.gib, args.repeat)
        elif args.what == "lazy":
            import lazy

            found = asdict(lazy.measure(folder, args.gib, args.repeat))
        else:
            peer = PEERS[args.what]()
            state = states.make(args.gib, args.leaves)
            found = asdict(measure_peer(peer, states.as_numpy(state) if peer.numpy else state, folder, args.repeat))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    args.result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
