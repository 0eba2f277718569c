"""The engine `ckpt` of verl hands weights from a trainer process to rollout processes, by the calls that verl makes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.peers import NAMES, tls_variables
from hydra import compose, initialize_config_module
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs

import ckpt

import_external_libs("ckpt.adapters.verl")  # what verl does with custom_backend_module
ENGINE = CheckpointEngineRegistry.get("ckpt")

ROLLOUT = """
import asyncio, hashlib, json, sys
import torch
import ckpt.adapters.verl
from verl.checkpoint_engine import CheckpointEngineRegistry
engine = CheckpointEngineRegistry.new("ckpt", bucket_size=1 << 20, timeout=float(sys.argv[1]))
engine.prepare()
print("ready", flush=True)
engine.init_process_group(**json.loads(sys.stdin.readline()))

async def main():
    found = []
    async for name, tensor in engine.receive_weights(global_steps=1):
        digest = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        found.append([name, str(tensor.dtype), list(tensor.shape), digest])
        print("got", name, flush=True)
    print(json.dumps(found), flush=True)

asyncio.run(main())
engine.finalize()
"""


def weights(seed: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    yield "embed.weight", torch.randn(700, 1000, generator=generator).bfloat16()  # larger than a bucket
    for i in range(5):
        yield f"layers.{i}.weight", torch.randn(200, 500, generator=generator).bfloat16()
        yield f"layers.{i}.bias", torch.randn(500, generator=generator)


def expected(seed: int = 0) -> list[list[object]]:
    import hashlib

    return [
        [name, str(t.dtype), list(t.shape), hashlib.sha256(t.view(torch.uint8).numpy().tobytes()).hexdigest()]
        for name, t in weights(seed)
    ]


class Rollouts:
    """Rollout workers, each in a process."""

    def __init__(self, number: int, timeout: float) -> None:
        command = [sys.executable, "-c", ROLLOUT, str(timeout)]
        self.processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(number)
        ]
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"

    def start(self, arguments: dict[str, list[object]]) -> None:
        for i, process in enumerate(self.processes):
            assert process.stdin is not None
            process.stdin.write(json.dumps({name: values[i] for name, values in arguments.items()}) + "\n")
            process.stdin.flush()

    def ends(self) -> list[tuple[int, str, str]]:
        found = []
        for process in self.processes:
            out, err = process.communicate(timeout=600)
            found.append((process.returncode, out, err))
        return found


@pytest.fixture
def rollouts():
    made: list[Rollouts] = []

    def start(number: int, timeout: float = 600) -> Rollouts:
        made.append(Rollouts(number, timeout))
        return made[-1]

    yield start
    for each in made:
        for process in each.processes:
            process.kill()
            process.wait()


def topology(engines: list, workers: int):
    """Make the calls of `CheckpointEngineManager.build_process_group`."""
    metadata = [engine.prepare() for engine in engines] + [{}] * workers
    actors, others = ENGINE.build_topology(len(engines), workers, metadata)
    for i, engine in enumerate(engines):
        engine.init_process_group(**{name: values[i] for name, values in actors.items()})
    return others


def test_two_rollout_workers_get_the_weights_of_two_actor_ranks(rollouts) -> None:
    engines = [ENGINE(bucket_size=1 << 20, is_master=rank == 0) for rank in range(2)]
    workers = rollouts(2)
    workers.start(topology(engines, 2))
    used = []

    def noted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights():
            used.append(name)
            yield name, tensor

    asyncio.run(engines[0].send_weights(weights(), global_steps=1))
    asyncio.run(engines[1].send_weights(noted(), global_steps=1))
    for status, out, err in workers.ends():
        assert status == 0, err
        assert json.loads(out.splitlines()[-1]) == expected()
    assert used == [name for name, _ in weights()]  # making a weight is a collective call of the actor ranks
    for engine in engines:
        engine.finalize()


def test_a_trainer_with_a_certificate_serves_other_hosts_over_tls(
    rollouts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variables = tls_variables(tmp_path / "job", f"DNS:{socket.gethostname()}")
    other = tls_variables(tmp_path / "other", f"DNS:{socket.gethostname()}")
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ckpt.InvalidArgument, match="set CKPT_TOKEN_FILE, CKPT_TLS_CERT_FILE, CKPT_TLS_KEY_FILE, CKPT_CA_FILE"):
        ENGINE(bucket_size=1 << 20, is_master=True, host="10.0.0.5").prepare()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    engine = ENGINE(bucket_size=1 << 20, is_master=True)
    trusting = rollouts(1)
    monkeypatch.setenv("CKPT_CA_FILE", other["CKPT_CA_FILE"])
    distrusting = rollouts(1, 600.0)
    monkeypatch.setenv("CKPT_CA_FILE", variables["CKPT_CA_FILE"])
    arguments = topology([engine], 1)
    assert arguments["address"][0].startswith(f"peer+tls://{socket.gethostname()}:")
    trusting.start(arguments)
    distrusting.start(arguments)
    asyncio.run(engine.send_weights(weights()))
    ((status, out, err),) = trusting.ends()
    assert status == 0, err
    assert json.loads(out.splitlines()[-1]) == expected()
    ((status, out, err),) = distrusting.ends()
    assert status != 0
    assert "Untrusted" in err
    assert "got" not in out
    engine.finalize()


def test_each_hand_over_has_the_weights_of_then(rollouts) -> None:
    engine = ENGINE(bucket_size=1 << 20, is_master=True)
    for seed in (1, 2):
        workers = rollouts(1)
        workers.start(topology([engine], 1))
        asyncio.run(engine.send_weights(weights(seed)))
        ((status, out, err),) = workers.ends()
        assert status == 0, err
        assert json.loads(out.splitlines()[-1]) == expected(seed)
        engine.finalize()


def test_what_was_sent_is_a_copy() -> None:
    engine = ENGINE(bucket_size=1 << 20, is_master=True)
    topology([engine], 0)
    tensor = torch.ones(10)
    asyncio.run(engine.send_weights(iter([("w", tensor)])))
    tensor.zero_()
    ((name, found),) = asyncio.run(received(engine))
    assert name == "w"
    assert found.equal(torch.ones(10))
    engine.finalize()


async def received(engine) -> list[tuple[str, torch.Tensor]]:
    return [pair async for pair in engine.receive_weights()]


def test_a_killed_trainer_times_out(rollouts, tmp_path: Path) -> None:
    program = tmp_path / "trainer.py"
    program.write_text("""
import asyncio, json, time
import torch
import ckpt.adapters.verl
from verl.checkpoint_engine import CheckpointEngineRegistry
engine = CheckpointEngineRegistry.new("ckpt", bucket_size=1 << 20, is_master=True)
print(json.dumps(engine.prepare()), flush=True)

def weights():
    for i in range(100):
        yield f"w{i}", torch.randn(1 << 18)
        time.sleep(0.1 if i < 3 else 600)

asyncio.run(engine.send_weights(weights()))
""")
    trainer = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True)
    workers = rollouts(1, timeout=5.0)
    try:
        assert trainer.stdout is not None
        address = json.loads(trainer.stdout.readline())["address"]
        workers.start({"address": [address]})
        assert workers.processes[0].stdout.readline().startswith("got w0")
        os.kill(trainer.pid, signal.SIGKILL)
        ((status, _, err),) = workers.ends()
        assert status != 0
        assert "TimeoutError: timed out: bucket" in err
    finally:
        trainer.kill()
        trainer.wait()


def test_calls_in_another_order_are_refused() -> None:
    engine = ENGINE(bucket_size=1 << 20, is_master=True)
    with pytest.raises(ckpt.InvalidArgument, match="call prepare before it"):
        asyncio.run(engine.send_weights(iter(())))
    with pytest.raises(ckpt.InvalidArgument, match="call init_process_group before it"):
        asyncio.run(received(engine))
    with pytest.raises(ckpt.InvalidArgument, match="the first actor rank is not the master"):
        ENGINE.build_topology(1, 1, [{}, {}])


def test_the_configuration_of_verl_takes_the_options_of_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "howto" / "verl.md").read_text()
    options = re.findall(r"actor_rollout_ref\.\S+=\S+", page)
    assert len(options) == 2
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer", overrides=[*options, "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.ckpt.timeout=5"]
        )
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    import_external_libs(engine.custom_backend_module)
    assert CheckpointEngineRegistry.get(engine.backend) is ENGINE
    made = CheckpointEngineRegistry.new(engine.backend, bucket_size=1 << 20, **engine.engine_kwargs[engine.backend])
    assert made._timeout == 5
