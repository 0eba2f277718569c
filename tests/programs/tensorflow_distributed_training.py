"""A training run with tf.distribute: momentum, dropout from a generator, counters that the replicas sum up.

Usage:

    tensorflow_distributed_training.py REPOSITORY LOG mirrored|workers

mirrored: MirroredStrategy on two devices of one process.
workers: MultiWorkerMirroredStrategy with TF_CONFIG, two processes. This process starts them, and they end with it.
Worker 0 writes LOG: each line is a step and the bits of its loss and counters.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

STEPS = 22
FEATURES = 4


def start_workers() -> int:
    """Run two workers; return the exit status of the first one that fails, else 0."""
    probes = [socket.socket() for _ in range(2)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
    for probe in probes:
        probe.close()

    def end_with_parent() -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    workers = []
    for index in range(2):
        config = json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})
        environ = os.environ | {"TF_CONFIG": config}
        workers.append(subprocess.Popen([sys.executable, *sys.argv], env=environ, preexec_fn=end_with_parent))
    return next((status for status in [worker.wait() for worker in workers] if status), 0)


def make_strategy(mode: str) -> Any:
    import tensorflow as tf  # not at the top: the process that starts the workers does without it

    if mode == "workers":
        return tf.distribute.MultiWorkerMirroredStrategy()
    devices = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def make_training() -> Any:
    """Return the variables of the training and a generator, as a module."""
    import tensorflow as tf

    class Training(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = [tf.Variable(tf.fill((FEATURES, 8), 0.1)), tf.Variable(tf.fill((8, 1), 0.2))]
            self.momenta = [tf.Variable(tf.zeros_like(weight), trainable=False) for weight in self.weights]
            on_read, kinds = tf.VariableSynchronization.ON_READ, tf.VariableAggregation
            self.seen = tf.Variable(0, synchronization=on_read, aggregation=kinds.SUM, trainable=False)
            self.mean = tf.Variable(0.0, synchronization=on_read, aggregation=kinds.MEAN, trainable=False)
            self.generator = tf.random.Generator.from_seed(3)

    return Training()


def make_train_step(strategy: Any, training: Any) -> Any:
    """Return a function that trains on the data of all replicas, and returns the mean loss."""
    import tensorflow as tf

    @tf.function
    def train_step(x: Any) -> Any:
        def on_replica(x: Any) -> Any:
            with tf.GradientTape() as tape:
                hidden = tf.nn.relu(x @ training.weights[0])
                kept = tf.cast(training.generator.uniform(tf.shape(hidden)) < 0.7, tf.float32)
                loss = tf.reduce_mean((hidden * kept @ training.weights[1] - 1) ** 2)
            gradients = tape.gradient(loss, training.weights)
            gradients = tf.distribute.get_replica_context().all_reduce("sum", gradients)
            for weight, momentum, gradient in zip(training.weights, training.momenta, gradients, strict=True):
                momentum.assign(0.9 * momentum + gradient)
                weight.assign_sub(0.05 * momentum)
            training.seen.assign_add(tf.shape(x)[0])
            training.mean.assign(0.5 * training.mean + 0.5)
            return loss

        return strategy.reduce("mean", strategy.run(on_replica, args=(x,)), axis=None)

    return train_step


def rows(step: int, replica: int) -> Any:
    """Return the rows of a replica in a step, by a generator that both determine."""
    import tensorflow as tf

    random = np.random.default_rng((step, replica))
    return tf.constant(random.standard_normal((3 + 2 * replica, FEATURES)).astype(np.float32))


def main() -> None:
    url, log, mode = sys.argv[1:4]
    if mode == "workers" and "TF_CONFIG" not in os.environ:
        sys.exit(start_workers())

    import ckpt

    strategy = make_strategy(mode)
    assert strategy.num_replicas_in_sync == 2
    worker = strategy.cluster_resolver.task_id if mode == "workers" else 0
    with strategy.scope():
        training = make_training()
    train_step = make_train_step(strategy, training)

    with ckpt.Checkpointer(url, every=2) as saver, open(log if worker == 0 else os.devnull, "a") as out:
        _, start = saver.restore({"training": training})
        for step in range(start, STEPS):
            x = strategy.experimental_distribute_values_from_function(
                lambda context, step=step: rows(step, context.replica_id_in_sync_group)
            )
            loss = train_step(x)
            bits = [float(loss.numpy()).hex(), str(training.seen.read_value().numpy()), float(training.mean.read_value()).hex()]
            out.write(f"{step} {','.join(bits)}\n")
            out.flush()
            saver.step(step, {"training": training})


if __name__ == "__main__":
    main()
