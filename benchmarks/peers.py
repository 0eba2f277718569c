"""The peers: how each library saves a flat dict of arrays to a folder, and fills such a dict from it.

Each is used as its documentation describes, with its defaults. Its modules are imported when the object is created, so that the
first save does not include imports.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any, ClassVar

from states import State


class Peer:
    """A way to save. If it saves in the background, `save` returns early, and `done` returns whether the save has ended."""

    title: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ("torch",)
    """The modules that must be installed."""
    numpy = False
    """Whether it saves numpy arrays; otherwise torch tensors."""
    background = False
    """Whether it saves in the background."""
    ours = False
    """Whether it is this project."""

    @classmethod
    def missing(cls) -> list[str]:
        """Return the needed modules that are not installed."""
        return [module for module in cls.needs if not is_installed(module)]

    def save(self, state: State, folder: Path) -> None:
        """Save a state to a folder that does not exist yet."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait for the save in the background."""

    def done(self) -> bool:
        """Return whether the save in the background has ended."""
        return True

    def helper_pids(self) -> list[int]:
        """Return the ids of the processes that this one has started to save."""
        return []

    def load(self, folder: Path, like: State) -> State:
        """Fill the arrays of `like` and return it. A peer that can't fill arrays returns new ones."""
        raise NotImplementedError


class Ckpt(Peer):
    title = "ckpt"
    ours = True

    def __init__(self) -> None:
        import ckpt

        self._ckpt = ckpt

    def save(self, state: State, folder: Path) -> None:
        self._ckpt.save(state, folder)

    def load(self, folder: Path, like: State) -> State:
        self._ckpt.load(folder, like)
        return like


class CkptAsync(Ckpt):
    title = "ckpt async"
    background = True

    def save(self, state: State, folder: Path) -> None:
        self._handle = self._ckpt.save(state, folder, blocking=False)

    def finish(self) -> None:
        self._handle.result()

    def done(self) -> bool:
        return self._handle.done()


class TorchSave(Peer):
    title = "torch.save"

    def __init__(self) -> None:
        import torch

        self._torch = torch

    def save(self, state: State, folder: Path) -> None:
        folder.mkdir()
        self._torch.save(state, folder / "state.pt")

    def load(self, folder: Path, like: State) -> State:
        stored = self._torch.load(folder / "state.pt", mmap=True)
        for name, value in like.items():
            value.copy_(stored[name])
        return like


class Safetensors(Peer):
    title = "safetensors"
    needs = ("torch", "safetensors")

    def __init__(self) -> None:
        from safetensors import safe_open
        from safetensors.torch import save_file

        self._open, self._save_file = safe_open, save_file

    def save(self, state: State, folder: Path) -> None:
        folder.mkdir()
        self._save_file(state, folder / "state.safetensors")

    def load(self, folder: Path, like: State) -> State:
        with self._open(folder / "state.safetensors", "pt") as file:
            for name, value in like.items():
                value.copy_(file.get_tensor(name))
        return like


class Dcp(Peer):
    title = "torch DCP"

    def __init__(self) -> None:
        import torch.distributed.checkpoint as dcp

        self._dcp = dcp

    def save(self, state: State, folder: Path) -> None:
        self._dcp.save(state, checkpoint_id=folder)

    def load(self, folder: Path, like: State) -> State:
        self._dcp.load(like, checkpoint_id=folder)
        return like


class DcpThreads(Dcp):
    title = "torch DCP, 2 threads"

    def save(self, state: State, folder: Path) -> None:
        writer = self._dcp.FileSystemWriter(folder, single_file_per_rank=False, thread_count=2)
        self._dcp.save(state, storage_writer=writer)


class DcpAsync(Dcp):
    title = "torch DCP async"
    background = True

    def __init__(self) -> None:
        import torch.distributed as dist

        super().__init__()
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # async_save requires a group

    def save(self, state: State, folder: Path) -> None:
        self._future = self._dcp.async_save(state, checkpoint_id=folder)

    def finish(self) -> None:
        self._future.result()

    def done(self) -> bool:
        return bool(self._future.done())


class DcpProcess(DcpAsync):
    """An asynchronous save by a process of its own, with the plan of the first save used again."""

    title = "torch DCP async, process"

    def __init__(self) -> None:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        super().__init__()
        self._kind = AsyncCheckpointerType.PROCESS
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # at which the process that saves makes a group of its own

    def save(self, state: State, folder: Path) -> None:
        planner = self._dcp.DefaultSavePlanner(enable_plan_caching=True)
        self._future = self._dcp.async_save(state, checkpoint_id=folder, planner=planner, async_checkpointer_type=self._kind)

    def helper_pids(self) -> list[int]:
        return [child.pid for child in multiprocessing.active_children() if child.pid is not None]


class Orbax(Peer):
    title = "orbax"
    needs = ("orbax.checkpoint", "jax")
    numpy = True

    def __init__(self) -> None:
        import orbax.checkpoint as orbax

        self._orbax = orbax
        self._checkpointer: Any = orbax.PyTreeCheckpointer()

    def save(self, state: State, folder: Path) -> None:
        self._checkpointer.save(folder, state)

    def load(self, folder: Path, like: State) -> State:
        return self._orbax.PyTreeCheckpointer().restore(folder)  # type: ignore[no-any-return]


class OrbaxAsync(Orbax):
    title = "orbax async"
    background = True

    def __init__(self) -> None:
        super().__init__()
        self._checkpointer = self._orbax.AsyncCheckpointer(self._orbax.PyTreeCheckpointHandler())

    def save(self, state: State, folder: Path) -> None:
        super().save(state, folder)
        self._waiter = threading.Thread(target=self._checkpointer.wait_until_finished)  # orbax has no done()
        self._waiter.start()

    def finish(self) -> None:
        self._waiter.join()
        self._checkpointer.check_for_errors()

    def done(self) -> bool:
        return not self._waiter.is_alive()


class OrbaxV1(Peer):
    """Orbax by its newest API."""

    title = "orbax v1"
    needs = ("orbax.checkpoint.experimental.v1", "jax")
    numpy = True

    def __init__(self) -> None:
        import orbax.checkpoint.experimental.v1 as orbax

        self._orbax = orbax

    def save(self, state: State, folder: Path) -> None:
        self._orbax.save_pytree(folder, state)

    def load(self, folder: Path, like: State) -> State:
        return self._orbax.load_pytree(folder)  # type: ignore[no-any-return]


class H5py(Peer):
    title = "h5py"
    needs = ("torch", "h5py", "ml_dtypes")
    numpy = True

    def __init__(self) -> None:
        import h5py

        self._h5py = h5py

    def save(self, state: State, folder: Path) -> None:
        folder.mkdir()
        with self._h5py.File(folder / "state.h5", "w") as file:
            for name, value in state.items():
                file.create_dataset(name, data=without_bf16(value))

    def load(self, folder: Path, like: State) -> State:
        with self._h5py.File(folder / "state.h5") as file:
            for name, value in like.items():
                file[name].read_direct(without_bf16(value))
        return like


class Zarr(Peer):
    title = "zarr, no codec"
    needs = ("torch", "zarr", "ml_dtypes")
    numpy = True

    def __init__(self) -> None:
        import zarr

        self._zarr = zarr

    def save(self, state: State, folder: Path) -> None:
        group = self._zarr.open_group(folder, mode="w")
        for name, value in state.items():
            data = without_bf16(value)
            array = group.create_array(name, shape=data.shape, dtype=data.dtype, chunks=data.shape, compressors=None)
            array[...] = data

    def load(self, folder: Path, like: State) -> State:
        group = self._zarr.open_group(folder, mode="r")
        for name, value in like.items():
            without_bf16(value)[...] = group[name][...]
        return like


class RunaiStreamer(Safetensors):
    """Run:ai Model Streamer. It only reads; the file is written by safetensors."""

    title = "runai streamer"
    needs = ("torch", "safetensors", "runai_model_streamer")

    def __init__(self) -> None:
        from runai_model_streamer import SafetensorsStreamer

        super().__init__()
        self._streamer = SafetensorsStreamer

    def load(self, folder: Path, like: State) -> State:
        with self._streamer() as streamer:
            streamer.stream_file(str(folder / "state.safetensors"))
            for name, value in streamer.get_tensors():
                like[name].copy_(value)
        return like


class Fastsafetensors(Safetensors):
    """fastsafetensors without GPUDirect. It only reads; the file is written by safetensors."""

    title = "fastsafetensors"
    needs = ("torch", "safetensors", "fastsafetensors")

    def __init__(self) -> None:
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup

        super().__init__()
        self._loader, self._group = SafeTensorsFileLoader, SingleGroup

    def load(self, folder: Path, like: State) -> State:
        loader = self._loader(self._group(), device="cpu", nogds=True)
        loader.add_filenames({0: [str(folder / "state.safetensors")]})
        buffer = loader.copy_files_to_device()
        for name, value in like.items():
            value.copy_(buffer.get_tensor(name))
        buffer.close()
        loader.close()
        return like


class Tensorizer(Peer):
    title = "tensorizer"
    needs = ("torch", "tensorizer")

    def __init__(self) -> None:
        from tensorizer import TensorDeserializer, TensorSerializer

        self._serializer, self._deserializer = TensorSerializer, TensorDeserializer

    def save(self, state: State, folder: Path) -> None:
        folder.mkdir()
        serializer = self._serializer(str(folder / "state.tensors"))
        serializer.write_state_dict(state)
        serializer.close()

    def load(self, folder: Path, like: State) -> State:
        with self._deserializer(str(folder / "state.tensors"), device="cpu") as stored:
            for name, value in like.items():
                value.copy_(stored[name])
        return like


class Torchsnapshot(Peer):
    title = "torchsnapshot"
    needs = ("torch", "torchsnapshot")

    def __init__(self) -> None:
        import torchsnapshot

        self._torchsnapshot = torchsnapshot

    def save(self, state: State, folder: Path) -> None:
        self._torchsnapshot.Snapshot.take(str(folder), {"state": self._torchsnapshot.StateDict(**state)})

    def load(self, folder: Path, like: State) -> State:
        target = self._torchsnapshot.StateDict(**like)
        self._torchsnapshot.Snapshot(str(folder)).restore({"state": target})
        return dict(target)


def is_installed(module: str) -> bool:
    """Return whether a module is installed."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not installed
        return False


def without_bf16(value: Any) -> Any:
    """Return an array of the same memory in a type that HDF5 and Zarr have."""
    return value.view("uint16") if value.dtype.itemsize == 2 else value


PEERS: dict[str, type[Peer]] = {
    "ckpt": Ckpt, "ckpt-async": CkptAsync, "torch-save": TorchSave, "safetensors": Safetensors,
    "dcp": Dcp, "dcp-threads": DcpThreads, "dcp-async": DcpAsync, "dcp-process": DcpProcess,
    "orbax": Orbax, "orbax-async": OrbaxAsync, "orbax-v1": OrbaxV1, "h5py": H5py, "zarr": Zarr,
    "runai": RunaiStreamer, "fastsafetensors": Fastsafetensors, "tensorizer": Tensorizer, "torchsnapshot": Torchsnapshot,
}  # fmt: skip
OURS = [key for key, peer in PEERS.items() if peer.ours]
OTHERS = [key for key, peer in PEERS.items() if not peer.ours]
