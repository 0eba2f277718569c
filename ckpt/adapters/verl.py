"""A checkpoint engine of verl: the trainer hands its weights to the rollout workers through the memory of its host.

    actor_rollout_ref.rollout.checkpoint_engine.backend=ckpt
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=ckpt.adapters.verl

The weights are saved in buckets, each as one step in shared memory. The rollout workers read a bucket as soon as it is saved:
on the host of the trainer as open files, on other hosts over the network. Every byte is verified.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable

import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

import ckpt
from ckpt.adapters.peer_address import load_from_peer, open_peer
from ckpt.adapters.peer_memory import PeerMemory
from ckpt.storage.base.errors import InvalidArgument
from ckpt.storage.base.store import Store


@CheckpointEngineRegistry.register("ckpt")
class StepEngine(CheckpointEngine):  # type: ignore[misc]
    """Sends weights from the first actor rank to all rollout workers. verl makes it by its name in the configuration:

        actor_rollout_ref.rollout.checkpoint_engine.backend=ckpt

    bucket_size: bytes of a bucket; verl sets it from `update_weights_bucket_megabytes`. A larger tensor is a bucket of its own.
    is_master: whether this is the first actor rank; verl sets it.
    timeout: seconds that a rollout worker waits for the next bucket.
    host: as for `PeerMemory`.

    During a hand-over, the memory of the trainer's host has a copy of all weights.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, timeout: float = 600.0, host: str | None = None) -> None:
        self._bucket_bytes = bucket_size
        self._is_master = is_master
        self._timeout = timeout
        self._host = host
        self._memory: PeerMemory | None = None
        self._address: str | None = None

    def prepare(self) -> dict[str, str]:
        """Return the address of the memory of the first actor rank, which begins to serve it."""
        if not self._is_master:
            return {}
        self.finalize()
        self._memory = PeerMemory(self._host)
        return {"address": self._memory.address}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, str]]
    ) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """Return the address for each worker. metadata: what `prepare` of each returned, that of the first actor rank first.

        Raises:
            InvalidArgument: The first actor rank was made without is_master.
        """
        if "address" not in metadata[0]:
            raise InvalidArgument(
                "the first actor rank is not the master of the checkpoint engine: construct its engine with "
                "is_master=True, as verl does"
            )
        address = metadata[0]["address"]
        return {"address": [address] * actor_wg_world_size}, {"address": [address] * rollout_world_size}

    def init_process_group(self, address: str) -> None:
        """Note the address from which a rollout worker reads."""
        self._address = address

    def finalize(self) -> None:
        """Free the memory."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        self._address = None

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Save the weights in buckets. Other actor ranks only take part in making them.

        Raises:
            InvalidArgument: `prepare` was not called.
            CkptError: As of `ckpt.save`.
        """
        if not self._is_master:
            async for _ in ensure_async_iterator(weights):
                pass
            return
        if self._memory is None:
            raise InvalidArgument("send_weights without a memory: call prepare before it, as verl does")
        numbers = itertools.count()
        bucket: dict[str, torch.Tensor] = {}
        nbytes = 0
        async for name, tensor in ensure_async_iterator(weights):
            if bucket and nbytes + tensor.nbytes > self._bucket_bytes:
                await asyncio.to_thread(_save, self._memory.store, next(numbers), bucket, False)
                bucket, nbytes = {}, 0
            bucket[name] = tensor.detach().to("cpu", copy=True)
            nbytes += tensor.nbytes
        await asyncio.to_thread(_save, self._memory.store, next(numbers), bucket, True)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the names and tensors, on the host, in the order in which they are sent.

        Raises:
            TimeoutError: The trainer has not sent the next bucket in time, or can't be reached.
            InvalidArgument: The trainer serves with TLS, and the environment of this process has no CKPT_CA_FILE or token.
            Refused: The trainer serves only its own host, or without TLS, or the token is wrong.
            Untrusted: The certificate of the trainer can't be verified.
            IntegrityError: Bytes were damaged.
        """
        if self._address is None:
            raise InvalidArgument("receive_weights without an address: call init_process_group before it, as verl does")
        store = open_peer(self._address, self._timeout)
        for number in itertools.count():
            found = await asyncio.to_thread(load_from_peer, store, number, self._timeout, f"bucket {number} of the trainer")
            for name, tensor in found["weights"]:
                yield name, tensor
            if found["is_last"]:
                return


def _save(store: Store, number: int, bucket: dict[str, torch.Tensor], is_last: bool) -> None:
    state = {"weights": list(bucket.items()), "is_last": is_last}
    ckpt.save(state, store, number, group=None, codec="none", nan="allow")
