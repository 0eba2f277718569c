"""Trains a small network in jax on a mesh of devices, and saves its shards. Run it again, and it continues.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/jax_mesh.py --steps 20
XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/jax_mesh.py --steps 40    # on half of the devices
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckpt

WIDTH = 64


def initial(mesh: Mesh) -> dict[str, jax.Array]:
    """Return new weights, sharded over the devices."""
    first, second = jax.random.split(jax.random.key(0))
    columns = NamedSharding(mesh, PartitionSpec(None, "model"))
    rows = NamedSharding(mesh, PartitionSpec("model", None))
    return {
        "up": jax.device_put(jax.random.normal(first, (WIDTH, 4 * WIDTH)) / 8, columns),
        "down": jax.device_put(jax.random.normal(second, (4 * WIDTH, WIDTH)) / 16, rows),
    }


@jax.jit
def train_step(weights: dict[str, jax.Array], batch: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """One step of gradient descent towards the identity."""

    def loss_of(weights: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((jax.nn.relu(batch @ weights["up"]) @ weights["down"] - batch) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda w, g: w - 0.5 * g, weights, gradients), loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--url", default="runs/jax-mesh")
    args = parser.parse_args()

    mesh = Mesh(np.array(jax.devices()), ("model",))
    with ckpt.Checkpointer(args.url, every=5, keep=2) as ck:
        state, start = ck.restore({"weights": initial(mesh)})
        for step in range(start, args.steps):
            batch = jax.random.normal(jax.random.key(step), (32, WIDTH))
            state["weights"], loss = train_step(state["weights"], batch)
            ck.step(step, state, loss=loss)
            print(f"step {step}  loss {float(loss):.6f}  on {len(jax.devices())} devices")


if __name__ == "__main__":
    main()
