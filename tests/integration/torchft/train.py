"""Trains a small model as one of two replicas of torchft, and logs the loss of each step that both commit.

python train.py REPLICA LIGHTHOUSE LOG STEPS
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft.ddp import DistributedDataParallel
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo

from ckpt.adapters.torchft import CkptTransport


def main() -> None:
    replica, lighthouse, log, steps = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(100 + replica)  # a new replica has other weights, until it gets those of its peer
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)

    def load_state_dict(state: dict) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    seconds = timedelta(seconds=60)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=2, use_async_quorum=False, timeout=seconds,
        quorum_timeout=seconds, connect_timeout=seconds, load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()}, replica_id=f"replica-{replica}",
        store_addr="localhost", store_port=store.port, rank=0, world_size=1, lighthouse_addr=lighthouse,
        checkpoint_transport=CkptTransport(),
    )  # fmt: skip
    wrapped = DistributedDataParallel(manager, model)
    optimizer = OptimizerWrapper(manager, inner)
    with open(log, "a", buffering=1) as file:
        while manager.current_step() < steps:
            optimizer.zero_grad()  # a quorum; a replica that is behind gets the state here
            step = manager.current_step()
            generator = torch.Generator().manual_seed(1000 * step + replica)
            inputs = torch.randn(8, 20, generator=generator)
            loss = (wrapped(inputs) - inputs[:, :3]).square().mean()
            loss.backward()
            optimizer.step()
            if manager.current_step() == step + 1:
                file.write(f"{step} {loss.item().hex()}\n")
            time.sleep(0.05)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
