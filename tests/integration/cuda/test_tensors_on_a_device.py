"""Tensors on a CUDA device are saved as they are at the save, and loaded to the device, whatever runs there meanwhile."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt.block_io import staging_arena

torch = pytest.importorskip("torch")
from ckpt.state.leaves import torch_streams  # noqa: E402  imports torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

TYPES = [
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex32", "bool", "int8",
    "uint8", "int16", "uint16", "int32", "int64", "uint64",
]  # fmt: skip


def bits(tensor: Any) -> Any:
    """Return the bytes of a tensor, whose type may not have a comparison."""
    return tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).cpu()


def numbers(dtype: str, *shape: int) -> Any:
    found = torch.randn(shape, device="cuda") * 50
    return found.to(getattr(torch, dtype)) if dtype != "complex32" else found.to(torch.complex64).to(torch.complex32)


@pytest.mark.parametrize("dtype", TYPES)
def test_each_type_is_loaded_to_the_device_and_to_the_host(dtype: str, tmp_path: Path) -> None:
    state = {
        "flat": numbers(dtype, 1000),
        "matrix": numbers(dtype, 30, 40),
        "scalar": numbers(dtype),
        "empty": numbers(dtype, 0, 3),
    }
    ckpt.save(state, tmp_path / "r")
    like = {name: torch.zeros_like(value) for name, value in state.items()}
    ckpt.load(tmp_path / "r", like)
    host = ckpt.load(tmp_path / "r")
    for name, value in state.items():
        assert like[name].device.type == "cuda"
        assert host[name].device.type == "cpu"
        assert bits(like[name]).equal(bits(value)), name
        assert bits(host[name]).equal(bits(value)), name


VIEWS = {
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[::3, 1::2],
    "expanded": lambda x: x[:1].expand(7, -1),
    "conjugate": lambda x: torch.complex(x, -x).conj(),
    "negative": lambda x: torch.complex(x, -x).conj().imag,
    "channels last": lambda x: x.reshape(2, 4, 5, -1).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_saved_as_the_user_sees_it(view: str, tmp_path: Path) -> None:
    value = VIEWS[view](torch.randn(40, 50, device="cuda"))
    ckpt.save({"x": value}, tmp_path / "r")
    assert ckpt.load(tmp_path / "r")["x"].equal(value.cpu())
    like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda") if view != "expanded" else None
    if like is not None:
        ckpt.load(tmp_path / "r", {"x": like})
        assert like.equal(value.resolve_conj().resolve_neg())


def busy(milliseconds: float) -> None:
    """Keep the current stream busy for about this time, on a device with 1.5 GHz."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))


def test_a_save_waits_for_the_kernels_that_compute_its_tensors(tmp_path: Path) -> None:
    stream = torch.cuda.Stream()
    x = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        busy(200)
        x += 1
        ckpt.save({"x": x}, tmp_path / "r")
    assert ckpt.load(tmp_path / "r")["x"].eq(1).all()


def test_an_asynchronous_save_has_the_values_of_its_call(tmp_path: Path) -> None:
    """The loop changes the tensors right after the call, without waiting for it, many times."""
    x = [torch.zeros(3 << 20, device="cuda") for _ in range(4)]
    with ckpt.Checkpointer(tmp_path / "r", every=None) as ck:
        for step in range(5):
            handle = ck.save(step, {"x": x})
            for value in x:
                value += 1
            handle.result()
            assert all(value.eq(step).all() for value in ckpt.load(tmp_path / "r", step=step)["x"])


def test_a_load_waits_for_the_kernels_that_still_use_the_old_values(tmp_path: Path) -> None:
    sizes = {**{f"large{i}": 4 << 20 for i in range(8)}, **{f"small{i}": 9 for i in range(200)}}
    ckpt.save({name: torch.full((size,), 7.0, device="cuda") for name, size in sizes.items()}, tmp_path / "r")
    like = {name: torch.zeros(size, device="cuda") for name, size in sizes.items()}
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        busy(2000)
        before = {name: value * 1 for name, value in like.items()}
        ckpt.load(tmp_path / "r", like)
        after = {name: value * 1 for name, value in like.items()}
    torch.cuda.synchronize()
    for name in like:
        assert before[name].eq(0).all(), f"a kernel that was started before the load read the loaded {name}"
        assert after[name].eq(7).all()


@pytest.mark.parametrize("attached", [False, True])
def test_a_step_in_a_cuda_graph_does_not_change_what_is_saved(attached: bool, tmp_path: Path) -> None:
    """A replay calls no hook of the optimizer, so an attached optimizer would not wait for the copy."""
    model = torch.nn.Linear(2048, 2048, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, capturable=True)
    batch = torch.randn(64, 2048, device="cuda")
    with ckpt.Checkpointer(tmp_path / "r", every=None) as ck:
        if attached:
            ck.attach(optimizer)

        def train() -> None:
            optimizer.zero_grad(set_to_none=False)
            model(batch).square().mean().backward()
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                train()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            train()
        for step in range(8):
            expected = {k: v.clone() for k, v in model.state_dict().items()}
            moments = optimizer.state[model.weight]["exp_avg"].clone()
            handle = ck.save(step, {"model": model, "optimizer": optimizer})
            for _ in range(5):
                graph.replay()
            handle.result()
            found = ckpt.load(tmp_path / "r", step=step)
            for name, value in expected.items():
                assert found["model"][name].equal(value.cpu()), (step, name)
            assert found["optimizer"]["state"][0]["exp_avg"].equal(moments.cpu()), step


def test_many_small_tensors_of_several_types_are_saved_in_a_stream(tmp_path: Path) -> None:
    names = [f"layer{i}.{kind}" for i in range(1500) for kind in ("float32", "bfloat16", "int64")]
    state = {name: numbers(name.rpartition(".")[2], 1 + i % 90) for i, name in enumerate(names)}
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        ckpt.save(state, tmp_path / "r")
    like = {name: torch.zeros_like(value) for name, value in state.items()}
    ckpt.load(tmp_path / "r", like)
    assert [name for name, value in state.items() if not value.equal(like[name])] == []


def test_parts_of_tensors_are_loaded_to_the_device(tmp_path: Path) -> None:
    state = {f"x{i}": torch.randn(40 + i, 30, device="cuda").to(torch.bfloat16) for i in range(60)}
    ckpt.save(state, tmp_path / "r")
    like = {
        name: ckpt.Shard(torch.zeros(20, 7, device="cuda", dtype=torch.bfloat16), tuple(value.shape), (11, 5))
        for name, value in state.items()
    }
    ckpt.load(tmp_path / "r", like)
    for name, value in state.items():
        assert like[name].local.equal(value[11:31, 5:12]), name


def test_memory_that_cannot_be_locked_leaves_no_error_for_the_next_kernel() -> None:
    memory = np.zeros(1 << 20, np.uint8)
    device = torch.device("cuda", 0)
    assert torch_streams.pin(memory, device)
    assert not torch_streams.pin(memory, device)
    torch.ones(3, device="cuda").add_(1)
    torch_streams.unpin(memory, device)
    torch_streams.unpin(memory, device)
    torch.ones(3, device="cuda").add_(1)


def test_saves_keep_no_memory_of_the_device_and_no_thread(tmp_path: Path) -> None:
    x = torch.ones(8 << 20, device="cuda")
    with ckpt.Checkpointer(tmp_path / "r", every=None, keep=2) as ck:
        ck.save(0, {"x": x}).result()
        before, threads = torch.cuda.memory_allocated(), threading.active_count()
        for step in range(1, 30):
            ck.save(step, {"x": x}).result()
        gc.collect()
        assert torch.cuda.memory_allocated() == before
        assert threading.active_count() <= threads


def test_the_first_steps_map_and_lock_the_staging_memory(tmp_path: Path) -> None:
    staging_arena.pool.clear()
    x = torch.ones(4 << 20, device="cuda")
    with ckpt.Checkpointer(tmp_path / "r", every=10**6) as ck:
        ck.step(1, {"x": x})
        preparing = staging_arena.pool._preparing
        assert preparing is not None
        preparing.join()
        (arena,) = staging_arena.pool._idle
        assert arena._pinned_for == x.device
        assert arena.capacity_bytes >= x.nbytes


def test_a_loss_on_the_device_does_not_make_a_step_wait(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path / "r", every=10**6) as ck:
        x = torch.ones(1000, device="cuda")
        ck.step(1, {"x": x}, loss=x.sum())
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        busy(500)
        loss = x.sum()
        done.record()
        ck.step(2, {"x": x}, loss=loss)
        assert not done.query(), "the step waited for the loss"
        torch.cuda.synchronize()


def test_random_generators_of_the_device_continue(tmp_path: Path) -> None:
    torch.cuda.manual_seed_all(5)
    own = torch.Generator("cuda").manual_seed(6)
    torch.randn(10, device="cuda")
    torch.randn(10, device="cuda", generator=own)
    state = {"random": ckpt.RandomState(), "own": own}
    ckpt.save(state, tmp_path / "r")
    expected = torch.randn(10, device="cuda"), torch.randn(10, device="cuda", generator=own)
    ckpt.load(tmp_path / "r", state)
    found = torch.randn(10, device="cuda"), torch.randn(10, device="cuda", generator=own)
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))


def test_no_memory_on_the_device_is_an_error_and_the_next_save_succeeds(tmp_path: Path) -> None:
    """A tensor that is not contiguous is copied on the device first."""
    x = torch.ones(64 << 20, device="cuda").view(8 << 10, -1).t()
    with ckpt.Checkpointer(tmp_path / "r", every=None) as ck:
        ck.save(0, {"x": x}).result()
        torch.cuda.empty_cache()
        try:
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1) / torch.cuda.mem_get_info()[1])
            with pytest.raises(ckpt.CkptError, match="could not be copied"):
                ck.save(1, {"x": x}).result()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        ck.save(2, {"x": x}).result()
    assert ckpt.load(tmp_path / "r", step=2)["x"].eq(1).all()
