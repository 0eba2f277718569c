"""Runs of programs/hf_training.py: one that is never killed, one that is, and its continuation."""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from helpers.folders import PROGRAMS
from helpers.torchrun import environment


def run(folder: Path, name: str, ranks: int = 1, program: str = "hf_training.py", **options: Any) -> tuple[int, str]:
    """Run a training program, and return its exit status and what it has printed.

    program: the file in tests/programs; options: its options. With `fsdp`, `accelerate launch` starts it with FSDP2.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [str(PROGRAMS / program), str(folder), name, json.dumps(options)]
    if ranks == 1:
        return run_in_child(folder / f"{name}.log", arguments)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    if options.get("fsdp"):
        config = ["--config_file", str(PROGRAMS / "fsdp2.yaml"), "--main_process_port", "0"]
        if program == "hf_training.py":
            config += ["--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP", "--fsdp_transformer_layer_cls_to_wrap=GPT2Block"]
        launcher = ["-m", "accelerate.commands.launch", *config, f"--num_processes={ranks}"]
    command = [sys.executable, *launcher, *arguments]
    process = subprocess.Popen(
        command, env=environment(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES=""), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=600)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, printed


def run_in_child(log: Path, arguments: list[str]) -> tuple[int, str]:
    """Run a program in a child of this process, which has imported transformers: the import takes longer than the training."""
    child = multiprocessing.get_context("fork").Process(target=_run_program, args=(log, arguments))
    child.start()
    child.join(600)
    if child.is_alive():
        child.kill()
        child.join()
    return child.exitcode or 0, log.read_text()


def _run_program(log: Path, arguments: list[str]) -> None:
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    warnings.showwarning = lambda message, *_: print(message)  # pytest collects the warnings of its own process
    sys.argv = arguments
    status = 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def finish(folder: Path, name: str, ranks: int = 1, **options: Any) -> str:
    """Run a training program that must reach its end, and return what it has printed."""
    status, printed = run(folder, name, ranks, **options)
    assert status == 0, printed[-4000:]
    return printed


def lines(folder: Path, name: str, rank: int = 0, suffix: str = "jsonl") -> list[Any]:
    file = folder / f"{name}-{rank}.{suffix}"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def keeps_losses_to_log() -> bool:
    """Return whether this version keeps the losses that are not logged yet where they can be saved; older ones do not."""
    from transformers import Trainer

    return "self._tr_loss" in inspect.getsource(Trainer._inner_training_loop)


def check_continuation(folder: Path, kill_at: int, ranks: int = 1, **options: Any) -> None:
    """Kill a training run in the middle of an update, and require that its continuation repeats the losses of a whole run."""
    finish(folder / "quiet", "quiet", ranks, **options)
    status, printed = run(folder / "killed", "killed", ranks, kill_at=kill_at, **options)
    assert status == (-signal.SIGKILL if ranks == 1 else 1), printed[-4000:]
    if ranks > 1:
        assert "SIGKILL" in printed
    finish(folder / "killed", "again", ranks, resume=True, **options)
    for rank in range(ranks):
        whole = lines(folder / "quiet", "quiet", rank)
        killed, again = lines(folder / "killed", "killed", rank), lines(folder / "killed", "again", rank)
        assert killed == whole[: len(killed)]
        assert again == whole[len(whole) - len(again) :]
        assert 0 < again[0][0] <= kill_at
        logged = lines(folder / "killed", "again", rank, "logs.jsonl")
        skipped = 0 if keeps_losses_to_log() else 1
        whole_log = lines(folder / "quiet", "quiet", rank, "logs.jsonl")
        assert logged[skipped:] == whole_log[len(whole_log) - len(logged) + skipped :]
        assert (
            lines(folder / "killed", "again", rank, "end.jsonl")[0][:3]
            == lines(folder / "quiet", "quiet", rank, "end.jsonl")[0][:3]
        )


def check_loop_continuation(
    folder: Path, ranks: int = 1, saved: int = 9, kill_at: int = 11, first: tuple[int, int] = (1, 2), **options: Any
) -> None:
    """Kill a loop of accelerate, and require that its continuation repeats the losses of a whole run.

    An epoch has 7 batches, and gradients are accumulated over two.

    saved: after how many batches the newest step is saved.
    first: the epoch and batch with which the continuation begins.
    """
    program = "accelerate_training.py"
    status, printed = run(folder / "quiet", "quiet", ranks, program, **options)
    assert status == 0, printed[-4000:]
    status, printed = run(folder / "killed", "killed", ranks, program, kill_at=kill_at, saved=saved, **options)
    assert status == (-signal.SIGKILL if ranks == 1 else 1), printed[-4000:]
    status, printed = run(folder / "killed", "again", ranks, program, resume=True, **options)
    assert status == 0, printed[-4000:]
    for rank in range(ranks):
        whole, again = lines(folder / "quiet", "quiet", rank), lines(folder / "killed", "again", rank)
        assert tuple(again[0][:2]) == first
        assert again == whole[len(whole) - len(again) :]
        assert lines(folder / "killed", "killed", rank) == whole[:kill_at]
