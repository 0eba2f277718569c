"""The training runs of framework_saves.py: STEPS steps of a model of equal layers, with Adam; each EVERY-th step is saved."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

import ckpt

STEPS = 13
EVERY = 4
WIDTH = 1024
BATCH = 2
Way = Literal["ckpt", "bare", "own"]


class Begin(Protocol):
    """What a training run calls when a step begins."""

    finish: Callable[[], None]
    """Waits for the end of a save that the framework itself makes in the background."""

    def __call__(self) -> None: ...


Training = Callable[[Way, Path, int, Begin], None]
"""A training run. Arguments: the way of its saves, the folder for them, MiB of parameters, what to call when a step begins."""


def layer_count(mib: int) -> int:
    """Return the number of square layers whose float32 weights take `mib` MiB."""
    return max(1, mib * 2**20 // (4 * WIDTH * WIDTH))


def rows(count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return training data."""
    return np.random.default_rng(1).normal(size=(count, WIDTH)).astype(np.float32)


def torch_model(mib: int) -> Any:
    import torch

    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layer_count(mib))])


def transformers(way: Way, folder: Path, mib: int, begin: Begin) -> None:
    """Trainer of transformers."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from ckpt.adapters.transformers import CkptTrainer

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch_model(mib)

        def forward(self, x: Any) -> dict[str, Any]:
            return {"loss": self.layers(x).square().mean()}

    class Callback(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            begin()

        def on_step_end(self, args: Any, state: Any, control: Any, *, optimizer: Any, **kwargs: Any) -> None:
            if saver is not None:
                saver.step(state.global_step - 1, {"model": model, "optimizer": optimizer.optimizer})

    saver = ckpt.Checkpointer(folder / "run", every=EVERY) if way == "bare" else None
    model = Model()
    args = TrainingArguments(
        str(folder), max_steps=STEPS, save_strategy="no" if way == "bare" else "steps", save_steps=EVERY, use_cpu=True,
        per_device_train_batch_size=BATCH, report_to="none", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    kind, more = (CkptTrainer, {"ckpt": folder / "run"}) if way == "ckpt" else (Trainer, {})
    data = [{"x": row} for row in rows(STEPS * BATCH)]
    kind(model, args, train_dataset=data, callbacks=[Callback()], **more).train()
    if saver is not None:
        saver.close()


def lightning(way: Way, folder: Path, mib: int, begin: Begin) -> None:
    """Trainer of Lightning, whose own way is ModelCheckpoint."""
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    from ckpt.adapters.lightning import Checkpoints

    class Model(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch_model(mib)

        def training_step(self, batch: Any) -> Any:
            return self.layers(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    class Beginning(pl.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, *args: Any) -> None:
            begin()

    class Bare(pl.Callback):  # type: ignore[misc]
        saver = ckpt.Checkpointer(folder / "run", every=EVERY) if way == "bare" else None

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            assert self.saver is not None
            self.saver.step(trainer.global_step - 1, {"model": module, "optimizer": trainer.optimizers[0]})

    saving: Any = {
        "ckpt": lambda: Checkpoints(folder / "run", every=EVERY),
        "bare": Bare,
        "own": lambda: ModelCheckpoint(folder, every_n_train_steps=EVERY, save_top_k=-1),
    }[way]()
    trainer = pl.Trainer(
        max_steps=STEPS, callbacks=[saving, Beginning()], enable_checkpointing=way != "bare", logger=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.from_numpy(rows(STEPS * BATCH)), batch_size=BATCH))
    if way == "bare":
        saving.saver.close()


def accelerate(way: Way, folder: Path, mib: int, begin: Begin) -> None:
    """A loop with accelerate, whose own way is save_state."""
    import torch
    from accelerate import Accelerator

    from ckpt.adapters.accelerate import attach

    accelerator = Accelerator(cpu=True)
    model = torch_model(mib)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    data = torch.from_numpy(rows(BATCH))
    saver = ckpt.Checkpointer(folder / "run", every=EVERY) if way == "bare" else None
    if way == "ckpt":
        attach(accelerator, folder / "run")
    for step in range(STEPS):
        begin()
        accelerator.backward(model(data).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if saver is not None:
            saver.step(step, {"model": model, "optimizer": optimizer.optimizer})
        elif step % EVERY == EVERY - 1:
            accelerator.save_state(str(folder / f"step_{step}"))
    accelerator.end_training()
    if saver is not None:
        saver.close()


def torchtitan(way: Way, folder: Path, mib: int, begin: Begin) -> None:
    """A loop with the optimizers and the checkpoint manager of torchtitan, whose own way is the asynchronous save by DCP."""
    import torch

    torch._utils._get_available_device_type = lambda: "cpu"  # before torchtitan looks for an accelerator
    import torch.distributed as dist
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    from ckpt.adapters.torchtitan import CkptManager

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch_model(mib)
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="Adam", optimizer_kwargs={"lr": 1e-3})]
    optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(model_parts=[model])
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizers.optimizers[0])
    data = torch.from_numpy(rows(BATCH))
    saver = ckpt.Checkpointer(folder / "run", every=EVERY) if way == "bare" else None
    manager = None
    if way != "bare":
        kind = CkptManager if way == "ckpt" else CheckpointManager
        manager = kind(
            kind.Config(enable=True, interval=EVERY, folder=str(folder / "run"), async_mode="async"), dataloader=None,
            model_parts=[model], optimizers=optimizers, lr_schedulers=schedule, states={}, sd_adapter=None,
        )  # fmt: skip
    if way == "own":
        begin.finish = manager.maybe_wait_for_saving
    for step in range(STEPS):
        begin()
        optimizers.zero_grad()
        model(data).square().mean().backward()
        optimizers.step()
        if saver is not None:
            saver.step(step, {"model": model, "optimizer": optimizers.optimizers[0]})
        elif manager is not None:
            manager.save(step + 1)
    (saver or manager).close()


def keras(way: Way, folder: Path, mib: int, begin: Begin) -> None:
    """Model.fit of Keras on TensorFlow, whose own way is BackupAndRestore."""
    import keras

    from ckpt.adapters.keras import Checkpoints

    class Beginning(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            begin()

    class Bare(keras.callbacks.Callback):  # type: ignore[misc]
        saver = ckpt.Checkpointer(folder / "run", every=EVERY) if way == "bare" else None

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            assert self.saver is not None
            self.saver.step(batch, {"model": self.model})

    model = keras.Sequential(
        [keras.Input((WIDTH,)), *[keras.layers.Dense(WIDTH, use_bias=False) for _ in range(layer_count(mib))]]
    )
    model.compile("adam", "mse")
    saving: Any = {
        "ckpt": lambda: Checkpoints(folder / "run", every=EVERY),
        "bare": Bare,
        "own": lambda: keras.callbacks.BackupAndRestore(folder, save_freq=EVERY, delete_checkpoint=False),
    }[way]()
    data = rows(STEPS * BATCH)
    model.fit(data, data, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[saving, Beginning()])
    if way == "bare":
        saving.saver.close()


def flax(way: Way, folder: Path, mib: int, begin: Begin) -> None:
    """A loop with Flax NNX, whose own way is the CheckpointManager of Orbax."""
    import optax
    import orbax.checkpoint as ocp
    from flax import nnx

    from ckpt.adapters.orbax import CheckpointManager

    keys = nnx.Rngs(1)
    model = nnx.Sequential(*[nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=keys) for _ in range(layer_count(mib))])
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    data = rows(BATCH)

    @nnx.jit
    def train_step(model: Any, optimizer: Any) -> Any:
        loss, gradient = nnx.value_and_grad(lambda m: (m(data) ** 2).mean())(model)
        optimizer.update(model, gradient)
        return loss

    options = ocp.CheckpointManagerOptions(save_interval_steps=1)
    saver = ckpt.Checkpointer(folder / "run", every=EVERY) if way == "bare" else None
    manager = None
    if way != "bare":
        manager = (CheckpointManager if way == "ckpt" else ocp.CheckpointManager)(folder / "run", options=options)
    if way == "own":
        begin.finish = manager.wait_until_finished
    for step in range(STEPS):
        begin()
        train_step(model, optimizer).block_until_ready()
        if saver is not None:
            saver.step(step, {"model": model, "optimizer": optimizer})
        elif manager is not None and step % EVERY == EVERY - 1:
            manager.save(step, args=ocp.args.StandardSave(nnx.to_pure_dict(nnx.state((model, optimizer)))))
    (saver or manager).close()


def paddle(way: Way, folder: Path, mib: int, begin: Begin) -> None:
    """A loop with PaddlePaddle, whose own way is paddle.save."""
    import paddle as pd

    from ckpt.adapters.paddle import ModelState

    model = pd.nn.Sequential(*[pd.nn.Linear(WIDTH, WIDTH, bias_attr=False) for _ in range(layer_count(mib))])
    optimizer = pd.optimizer.Adam(parameters=model.parameters())
    data = pd.to_tensor(rows(BATCH))
    saver = None if way == "own" else ckpt.Checkpointer(folder / "run", every=EVERY)
    state = {"train": ModelState(model, optimizer)} if way == "ckpt" else {"model": model, "optimizer": optimizer}
    for step in range(STEPS):
        begin()
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
        if saver is not None:
            saver.step(step, state)
        elif step % EVERY == EVERY - 1:
            pd.save(model.state_dict(), str(folder / f"step_{step}.pdparams"))
            pd.save(optimizer.state_dict(), str(folder / f"step_{step}.pdopt"))
    if saver is not None:
        saver.close()


def mindspore(way: Way, folder: Path, mib: int, begin: Begin) -> None:
    """Model.train of MindSpore, whose own way is ModelCheckpoint."""
    import mindspore as ms
    from mindspore import nn, train

    from ckpt.adapters.mindspore import Checkpoints

    class Beginning(train.Callback):  # type: ignore[misc]
        def on_train_step_begin(self, run_context: Any) -> None:
            begin()

    class Bare(train.Callback):  # type: ignore[misc]
        saver = ckpt.Checkpointer(folder / "run", every=EVERY) if way == "bare" else None

        def on_train_step_end(self, run_context: Any) -> None:
            assert self.saver is not None
            self.saver.step(run_context.original_args().cur_step_num - 1, {"net": net, "optimizer": optimizer})

    ms.set_seed(1)
    net = nn.SequentialCell(*[nn.Dense(WIDTH, WIDTH, has_bias=False) for _ in range(layer_count(mib))])
    optimizer = nn.Adam(net.trainable_params())
    own = train.CheckpointConfig(save_checkpoint_steps=EVERY, keep_checkpoint_max=STEPS)
    saving: Any = {
        "ckpt": lambda: Checkpoints(folder / "run", every=EVERY),
        "bare": Bare,
        "own": lambda: train.ModelCheckpoint("model", str(folder), own),
    }[way]()
    data = ms.dataset.NumpySlicesDataset({"x": rows(STEPS * BATCH), "y": rows(STEPS * BATCH)}, shuffle=False).batch(BATCH)
    train.Model(net, nn.MSELoss(), optimizer).train(1, data, callbacks=[saving, Beginning()])
    if way == "bare":
        saving.saver.close()


def deepspeed(way: Way, folder: Path, mib: int, begin: Begin) -> None:
    """A loop with an engine of ZeRO stage 2, whose own way is save_checkpoint. The master weights and moments are saved."""
    import deepspeed
    import torch

    from ckpt.adapters.deepspeed import attach

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    deepspeed.logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # so that it communicates with gloo, and compiles nothing
    model = torch_model(mib)
    config = {
        "train_micro_batch_size_per_gpu": BATCH, "zero_optimization": {"stage": 2, "reduce_bucket_size": 1 << 24},
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}}, "steps_per_print": 10**9,
    }  # fmt: skip
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    inner = engine.optimizer.optimizer
    flat = {"weights": [p for group in inner.param_groups for p in group["params"]], "optimizer": inner}
    saver = ckpt.Checkpointer(folder / "run", every=EVERY) if way == "bare" else None
    attached = attach(engine, folder / "run") if way == "ckpt" else None
    data = torch.from_numpy(rows(BATCH))
    for step in range(STEPS):
        begin()
        engine.backward(engine(data).square().mean())
        engine.step()
        if saver is not None:
            saver.step(step, flat)
        elif step % EVERY == EVERY - 1:
            engine.save_checkpoint(str(folder), tag=f"step_{step}")
    if (used := saver or attached) is not None:
        used.close()
    engine.destroy()


def megatron(way: Way, folder: Path, mib: int, begin: Begin) -> None:
    """A loop with sharded state dicts of Megatron-Core, whose own way is dist_checkpointing, in the background."""
    import framework_megatron

    framework_megatron.train(way, folder, mib, begin)


TRAININGS: dict[str, Training] = {
    "transformers": transformers, "lightning": lightning, "accelerate": accelerate, "keras": keras, "flax": flax,
    "torchtitan": torchtitan, "paddle": paddle, "mindspore": mindspore, "deepspeed": deepspeed,
    "megatron": megatron,
}  # fmt: skip
