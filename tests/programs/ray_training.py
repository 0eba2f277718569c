"""Trains with Ray Train on two workers, four times: ray_training.py FOLDER MEMBERS.

In "checkpointer", ckpt.Checkpointer saves. In "reports", Ray persists what torch.save has written. Each is done twice; in the
second one, worker 1 kills itself after a step. Each worker appends number and loss of each step to FOLDER/NAME/RANK.log. All of
Ray's files are in the namespace of MEMBERS.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
import torch
from ray import train

import ckpt

STEPS, KILL_AT = 14, 8


def make_state() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(3)
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model = ray.train.torch.prepare_model(model)
    torch.manual_seed(100 + train.get_context().get_world_rank())
    return model, {"model": model.module, "optimizer": optimizer, "random": ckpt.RandomState()}


def train_step(config: dict[str, Any], step: int, model: Any, state: dict[str, Any]) -> float:
    x = torch.randn(8, 4)
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    with open(f"{config['folder']}/{train.get_context().get_world_rank()}.log", "a") as file:
        file.write(f"{step} {loss.item().hex()}\n")
    return loss.item()


def kill_once(config: dict[str, Any], step: int) -> None:
    mark = Path(config["folder"], "killed")
    if step == KILL_AT and config["is_killed"] and train.get_context().get_world_rank() == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def loop_with_checkpointer(config: dict[str, Any]) -> None:
    model, state = make_state()
    with ckpt.Checkpointer(config["url"], every=3) as ck:
        state, start = ck.restore(state)
        for step in range(start, STEPS):
            loss = train_step(config, step, model, state)
            ck.step(step, state, loss=loss)
            kill_once(config, step)
            train.report({"step": step, "loss": loss})


def loop_with_reports(config: dict[str, Any]) -> None:
    model, state = make_state()
    rank, start, found = train.get_context().get_world_rank(), 0, train.get_checkpoint()
    if found is not None:
        with found.as_directory() as folder:
            saved = torch.load(f"{folder}/{rank}.pt")
        start = saved["step"] + 1
        model.module.load_state_dict(saved["model"])
        state["optimizer"].load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
    for step in range(start, STEPS):
        loss = train_step(config, step, model, state)
        saved = {"model": model.module.state_dict(), "optimizer": state["optimizer"].state_dict()}
        with tempfile.TemporaryDirectory() as folder:
            torch.save({"step": step, "random": torch.get_rng_state(), **saved}, f"{folder}/{rank}.pt")
            train.report({"step": step, "loss": loss}, checkpoint=train.Checkpoint.from_directory(folder))
        kill_once(config, step)


def storage_by_url(members: str, name: str) -> dict[str, Any]:
    return {"storage_path": f"fsspec+ckpt://{members}/{name}"}


def storage_by_filesystem(members: str, name: str) -> dict[str, Any]:
    import fsspec
    import pyarrow.fs as pafs

    filesystem = fsspec.filesystem("ckpt", members=members)
    return {"storage_path": name, "storage_filesystem": pafs.PyFileSystem(pafs.FSSpecHandler(filesystem))}


def fit(loop: Callable[[dict[str, Any]], None], storage: dict[str, Any], config: dict[str, Any]) -> None:
    """Train, and print the step and the place of the last checkpoint that Ray knows."""
    Path(config["folder"]).mkdir()
    trainer = ray.train.torch.TorchTrainer(
        loop,
        train_loop_config=config,
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(name="job", **storage, failure_config=train.FailureConfig(max_failures=2)),
    )
    result = trainer.fit()
    if result.checkpoint is not None:
        with result.checkpoint.as_directory() as found:
            steps = [torch.load(f"{found}/{rank}.pt")["step"] for rank in range(2)]
        print("checkpoint", *steps, type(result.checkpoint.filesystem).__name__, result.checkpoint.path)


def main() -> None:
    folder, members = sys.argv[1:]
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    for loop, storage in ((loop_with_checkpointer, storage_by_url), (loop_with_reports, storage_by_filesystem)):
        for suffix in ("", "-killed"):
            name = loop.__name__.rpartition("_")[2] + suffix
            config = {"folder": f"{folder}/{name}", "url": f"ckpt://{members}/{name}/steps", "is_killed": bool(suffix)}
            fit(loop, storage(members, name), config)
    ray.shutdown()


if __name__ == "__main__":
    main()
