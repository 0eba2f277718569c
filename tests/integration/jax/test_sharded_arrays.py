"""jax arrays over many devices and processes: saved by their shards, loaded into another mesh and another layout."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.folders import PROGRAMS, TESTS
from helpers.messages import one_line

import ckpt

pytest.importorskip("jax")


WHOLE = np.arange(48 * 80, dtype=np.float32).reshape(48, 80)


def run(what: str, url: Path, size: int, devices: int, rows: int) -> None:
    """Run a job of `size` processes with `devices` each, in a mesh of `rows` rows; return the lines of its ranks."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAMS / "jax_rank.py"), what, str(url), *map(str, (port, rank, size, devices, rows))],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        for rank, process in enumerate(ranks):
            out, err = process.communicate(timeout=600)
            assert process.returncode == 0, err[-3000:]
            assert json.loads(out.splitlines()[-1]) == {"rank": rank, "devices": size * devices}
    finally:
        for process in ranks:
            process.kill()


def test_each_shard_of_eight_devices_is_written_once(tmp_path: Path) -> None:
    """Nothing is gathered: each shard is a row of the manifest, written once although some devices have copies."""
    run("save", tmp_path, 1, 8, 4)
    step = ckpt.open(tmp_path)[7]
    assert step.commit.raw_bytes == 5 * WHOLE.nbytes + 8
    assert {row.box.shape for row in step.manifest().by_leaf()["arrays.1"]} == {(12, 40)}
    for i, array in ckpt.load(tmp_path, only="arrays")["arrays"].items():
        assert np.array_equal(array, WHOLE + int(i))
    run("load", tmp_path, 1, 8, 2)


def test_processes_meet_for_their_first_save_only_and_a_later_save_raises_an_earlier_failure(tmp_path: Path) -> None:
    run("save several", tmp_path, 2, 1, 1)
    assert ckpt.open(tmp_path).steps() == [0, 1, 3]


def test_a_step_of_two_processes_loads_into_other_layouts(tmp_path: Path) -> None:
    run("save", tmp_path, 2, 4, 4)
    assert ckpt.open(tmp_path)[7].commit.world_size == 2
    for i, array in ckpt.load(tmp_path, only="arrays")["arrays"].items():
        assert np.array_equal(array, WHOLE + int(i))
    run("load", tmp_path, 2, 4, 2)
    run("load", tmp_path, 1, 3, 3)


def test_the_example_continues_with_half_of_the_devices(tmp_path: Path) -> None:
    def losses(devices: int, steps: int, url: Path) -> dict[int, float]:
        environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, str(TESTS.parent / "examples/jax_mesh.py"), "--steps", str(steps), "--url", str(url)]
        out = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=True).stdout
        lines = [line.split() for line in out.splitlines()]
        assert all(line[5] == str(devices) for line in lines)
        return {int(line[1]): float(line[3]) for line in lines}

    straight = losses(8, 15, tmp_path / "straight")
    assert list(losses(8, 10, tmp_path / "cut")) == list(range(10))
    rest = losses(4, 15, tmp_path / "cut")
    assert list(rest) == list(range(10, 15))
    assert all(abs(loss - straight[step]) < 1e-4 * straight[step] for step, loss in rest.items())


def test_a_registered_pytree_is_restored_in_place(tmp_path: Path) -> None:
    import jax

    from ckpt.adapters.jax import Tree

    @jax.tree_util.register_pytree_node_class
    class Pair:
        def __init__(self, a: object, b: object) -> None:
            self.a, self.b = a, b

        def tree_flatten(self) -> tuple[tuple[object, object], None]:
            return (self.a, self.b), None

        @classmethod
        def tree_unflatten(cls, _: None, leaves: tuple[object, object]) -> Pair:
            return cls(*leaves)

    made = {"pair": Pair(jax.numpy.arange(5.0), [jax.numpy.ones((2, 2)), 3])}
    ckpt.save({"train": Tree(made)}, tmp_path, 0)
    like = Tree({"pair": Pair(jax.numpy.zeros(5), [jax.numpy.zeros((2, 2)), 0])})
    assert ckpt.load(tmp_path, {"train": like})["train"] is like
    assert isinstance(like.value["pair"], Pair)
    assert like.value["pair"].a.tolist() == [0, 1, 2, 3, 4]
    assert like.value["pair"].b[0].tolist() == [[1, 1], [1, 1]]
    assert like.value["pair"].b[1] == 3


def test_leaves_of_a_pytree_with_equal_names_are_restored_separately(tmp_path: Path) -> None:
    """Each is loaded into its own target; where only one of them is asked for, the load does not guess which."""
    import jax
    from jax import numpy as jnp

    from ckpt.adapters.jax import Tree

    def made(start: float) -> dict[str, object]:
        first, second, third = (jnp.full(2, start + i) for i in range(3))
        return {"a.b": first, "a": {"b": second}, "a.b~": third, "": jnp.full(2, start + 3), "value": jnp.full(2, start + 4)}

    want = made(1.0)
    ckpt.save({"train": Tree(want)}, tmp_path, 0)
    like = Tree(made(50.0))
    ckpt.load(tmp_path, {"train": like})
    assert jax.tree.all(jax.tree.map(jnp.array_equal, like.value, want))
    alone = Tree({"a.b": jnp.zeros(2)})
    with pytest.raises(ckpt.LeafMismatch) as error:
        ckpt.load(tmp_path, {"train": alone})
    one_line(error, "leaf train", "two leaves were saved as a.b")
    assert alone.value["a.b"].tolist() == [0, 0]


def test_an_abstract_array_is_loaded_with_its_sharding(tmp_path: Path) -> None:
    code = """
import sys, jax, numpy as np, ckpt
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
whole = np.arange(48.0, dtype=np.float32).reshape(8, 6)
ckpt.save({"w": jax.numpy.asarray(whole), "key": jax.random.key(5), "n": jax.numpy.asarray(3)}, sys.argv[1], 1)
like = jax.eval_shape(lambda: {"key": jax.random.key(0), "n": jax.numpy.asarray(0)})
for spec in (P("a", "b"), P("a"), P(None, "b"), P()):
    sharding = NamedSharding(mesh, spec)
    loaded = ckpt.load(sys.argv[1], {**like, "w": jax.ShapeDtypeStruct((8, 6), np.float32, sharding=sharding)})
    assert loaded["w"].sharding == sharding
    assert np.array_equal(loaded["w"], whole)
assert jax.random.key_data(loaded["key"]).tolist() == [0, 5]
assert loaded["n"].weak_type
try:
    ckpt.save(like, sys.argv[1], 2)
except ckpt.UnsupportedLeaf as error:
    print(error)
"""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert out.stdout == "leaf key: a jax.ShapeDtypeStruct has a shape but no data: store the array\n", out.stderr[-3000:]


def test_weak_types_are_loaded_and_a_jax_without_them_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weakly typed array leaves the dtype to the other operand, so a load that makes it strong changes the rounding."""
    import jax
    import jax.numpy as jnp

    weak = jnp.broadcast_to(jnp.asarray(1.5), (4,))
    half, single = jnp.ones(4, jnp.bfloat16), jnp.zeros(4, jnp.float32)
    ckpt.save({"weak": weak, "strong": half}, tmp_path, 1)
    for loaded in (ckpt.load(tmp_path), ckpt.load(tmp_path, like={"weak": weak, "strong": half})):
        assert loaded["weak"].weak_type
        assert not loaded["strong"].weak_type
        assert (loaded["weak"] * half).dtype == jnp.bfloat16

    def other_parameters(*_: object, **__: object) -> None:
        raise TypeError("bind() got an unexpected keyword argument")

    with monkeypatch.context() as patched:
        patched.setattr(jax.lax.convert_element_type_p, "bind", other_parameters)
        with pytest.raises(ckpt.LeafMismatch) as error:
            ckpt.load(tmp_path)
        one_line(error, "leaf weak", f"jax {jax.__version__}", "dtype='float32'")
        strong = ckpt.load(tmp_path, like={"weak": single, "strong": half})
    assert strong["weak"].tolist() == [1.5] * 4
    assert not strong["weak"].weak_type


def test_a_dtype_that_jax_would_convert_is_named(tmp_path: Path) -> None:
    import jax

    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        ckpt.save({"a": {"w": jax.numpy.ones(3)}}, tmp_path, 1)
    with pytest.raises(ckpt.LeafMismatch) as error:
        ckpt.load(tmp_path)
    one_line(error, "leaf a.w", "jax converted float64 to float32", "jax_enable_x64")


def test_a_key_does_not_load_into_a_key_of_another_generator(tmp_path: Path) -> None:
    import jax

    key = jax.random.key(3, impl="rbg")
    ckpt.save({"key": key}, tmp_path, 1)
    other = jax.random.key(0, impl="unsafe_rbg")  # its key data has the same shape, and other numbers follow from it
    for like in (other, jax.eval_shape(lambda: other)):
        with pytest.raises(ckpt.LeafMismatch, match="has a key of rbg, `like` has one of unsafe_rbg"):
            ckpt.load(tmp_path, like={"key": like})
    for like in (jax.random.key(0, impl="rbg"), jax.eval_shape(lambda: key)):
        loaded = ckpt.load(tmp_path, like={"key": like})["key"]
        assert jax.random.bits(loaded) == jax.random.bits(key)
    raw = ckpt.load(tmp_path, like={"key": np.zeros(4, np.uint32)})["key"]
    assert raw.tolist() == jax.random.key_data(key).tolist()
