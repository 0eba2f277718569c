"""A Lightning training with dropout and shuffled data, which writes the loss of each batch to a file and may kill itself.

python lightning_training.py URL LOSSES [--package=…] [--kill-at=N] …
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

SAMPLES, BATCH = 44, 4


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("losses", type=Path)
    parser.add_argument("--package", default="lightning.pytorch")
    parser.add_argument("--kill-at", type=int, default=-1, help="the number of batches after which the process kills itself")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--sharded", action="store_true", help="ModelParallelStrategy with FSDP2")
    parser.add_argument("--sampler", default="shuffle")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--mode", default="max_size_cycle", help="of the combined loaders")
    parser.add_argument("--averaging", action="store_true", help="a moving average of the weights")
    parser.add_argument("--swa", action="store_true", help="StochasticWeightAveraging from the second epoch on")
    parser.add_argument("--finetuning", action="store_true", help="the first layers are frozen before the third epoch")
    parser.add_argument("--persistent-workers", action="store_true")
    parser.add_argument("--noise", action="store_true", help="samples with random noise")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--val-interval", type=float, default=1.0)
    parser.add_argument("--manual", action="store_true", help="manual optimization with two optimizers")
    parser.add_argument("--nan-at", type=int, help="the step of which the last rank has no finite loss")
    parser.add_argument("--timeout", type=float, default=600, help="of a save, in seconds")
    parser.add_argument("--no-callback", action="store_true")
    parser.add_argument("--ckpt-path", default=None)
    parser.add_argument("--deepspeed-stage", type=int)
    parser.add_argument("--precision", default="32-true")
    return parser.parse_args()


options = parsed()
pl: Any = importlib.import_module(options.package)


class Data(Dataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x, self.y = torch.randn(SAMPLES, 6, generator=generator), torch.randn(SAMPLES, 1, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x = self.x[index]
        return (x + torch.randn(6) if options.noise else x), self.y[index]


class Stream(IterableDataset):
    """Samples without a length: in order, in an order drawn at the start of an epoch, or by a shuffle buffer."""

    def __iter__(self) -> Any:
        data, kind = Data(), options.sampler
        order = torch.randperm(SAMPLES).tolist() if kind == "permuted-stream" else range(SAMPLES)
        buffer: list[Any] = []
        for i in order:
            buffer.append(data[i])
            if kind != "buffered-stream" or len(buffer) == 8:
                yield buffer.pop(int(torch.randint(len(buffer), ())) if len(buffer) > 1 else 0)
        yield from buffer


class StatefulStream:
    """Batches without a length, from a loader with a state of its own."""

    def __init__(self) -> None:
        self.batch = 0

    def __iter__(self) -> Any:
        data = Data()
        while self.batch * BATCH < SAMPLES:
            rows = [data[self.batch * BATCH + i] for i in range(BATCH)]
            self.batch += 1
            yield [torch.stack(each) for each in zip(*rows, strict=True)]
        self.batch = 0

    def state_dict(self) -> dict[str, int]:
        return {"batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batch = state["batch"]


class OwnSampler(Sampler):
    """Another order in each epoch, from a numpy generator that continues from epoch to epoch."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(5)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Any:
        return iter(self.random.permutation(SAMPLES).tolist())


class HiddenSampler(OwnSampler):
    """The same with a generator that nobody can find."""

    generators: dict = {}

    def __init__(self) -> None:
        self.generators["one"] = np.random.default_rng(os.getpid())

    def __iter__(self) -> Any:
        return iter(self.generators["one"].permutation(SAMPLES).tolist())


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 16, "rule": torch.nn.functional.relu})
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
        )
        self.automatic_optimization = not options.manual
        self.seen = 0

    if options.sharded:

        def configure_model(self) -> None:
            from torch.distributed.fsdp import fully_shard

            mesh = self.device_mesh["data_parallel"]
            for layer in self.layers[0], self.layers[3], self.layers:
                fully_shard(layer, mesh=mesh)

        def on_train_start(self) -> None:
            """Write the whole parameters and their moments to a file."""
            self.layers.reshard()  # after the validation that Lightning begins with
            states = self.trainer.optimizers[0].state
            whole = {
                name: [each.full_tensor().detach() for each in (parameter, states[parameter]["exp_avg"])]
                for name, parameter in self.named_parameters()
                if parameter in states
            }
            torch.save(whole, options.losses.with_name(f"{options.losses.name}.start.{self.global_rank}"))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch if isinstance(batch, list) else [torch.cat(each) for each in zip(*batch.values(), strict=True)]
        loss = torch.nn.functional.mse_loss(self.layers(x), y)
        if self.global_step == options.nan_at and self.global_rank == options.ranks - 1:
            loss = loss * float("nan")
        self.log("train_loss", loss, on_step=True, on_epoch=False)
        if options.manual:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with options.losses.with_name(f"{options.losses.name}.{self.global_rank}").open("a") as file:
            rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            loss = outputs["loss"].item().hex() if outputs else batch[0].sum().item().hex()
            file.write(f"{self.current_epoch} {batch_idx} {self.global_step} {loss} {rate:.12g}\n")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.layers(x + torch.randn_like(x)), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], 0.05)
        if options.manual:
            return [optimizer, torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)]
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss", "interval": "epoch"}}


class Finetuning(pl.callbacks.BaseFinetuning):
    """Freezes the first layers and the batch norm at the start, and unfreezes them at the third epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(list(pl_module.layers[:2]), train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 2:
            self.unfreeze_and_add_param_group(list(pl_module.layers[:2]), optimizer, lr=0.01, train_bn=True)


class Kill(pl.Callback):
    """Kills this process at the start of a batch, once all saves are committed."""

    batches = 0

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self.batches == options.kill_at:
            for callback in trainer.callbacks:
                if getattr(callback, "_checkpointer", None) is not None:
                    callback._checkpointer.wait()
            trainer.strategy.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        self.batches += 1


def loader() -> Any:
    if options.sampler == "stateful-stream":
        return StatefulStream()
    if options.sampler == "combined":
        short = torch.utils.data.Subset(Data(), range(16))
        both = {"all": DataLoader(Data(), BATCH, shuffle=True), "some": DataLoader(short, BATCH, shuffle=True)}
        return importlib.import_module(f"{options.package}.utilities").CombinedLoader(both, options.mode)
    data: Any = Stream() if "stream" in options.sampler else Data()
    kinds: dict[str, dict[str, Any]] = {
        "shuffle": {"shuffle": True},
        "seeded": {"shuffle": True, "generator": torch.Generator().manual_seed(7)},
        "own": {"sampler": OwnSampler()},
        "hidden": {"sampler": HiddenSampler()},
    }
    workers = {"num_workers": options.workers, "persistent_workers": options.persistent_workers}
    return DataLoader(data, BATCH, **workers, **kinds.get(options.sampler, {}))


def deepspeed_strategy(stage: int) -> Any:
    from helpers.deepspeed_cpu import use_gloo, zero_config

    use_gloo()
    config = zero_config(stage, train_micro_batch_size_per_gpu=BATCH)
    strategies = importlib.import_module(f"{options.package}.strategies")

    class OnCpu(strategies.DeepSpeedStrategy):
        """DeepSpeedStrategy without its checks that the devices are those of CUDA."""

        def setup_environment(self) -> None:
            super(strategies.DeepSpeedStrategy, self).setup_environment()

        def setup_distributed(self) -> None:
            self.set_world_ranks()
            self._init_deepspeed_distributed()

        @property
        def root_device(self) -> torch.device:
            return torch.device("cpu", 0)  # DeepSpeed needs a number

    return OnCpu(config=config)


def strategy() -> Any:
    if options.deepspeed_stage is not None:
        return deepspeed_strategy(options.deepspeed_stage)
    if options.sharded:
        return pl.strategies.ModelParallelStrategy(data_parallel_size=options.ranks, tensor_parallel_size=1)
    return "ddp" if options.ranks > 1 else "auto"


def main() -> None:
    pl.seed_everything(1)
    callbacks = [Kill()]
    if options.averaging:
        callbacks.append(pl.callbacks.EMAWeightAveraging(decay=0.9))
    if options.swa:
        callbacks.append(pl.callbacks.StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2, annealing_epochs=2))
    if options.finetuning:
        callbacks.append(Finetuning())
    if not options.no_callback:
        from ckpt.adapters.lightning import Checkpoints

        callbacks.append(Checkpoints(options.url, every=options.every, keep=options.keep, timeout=options.timeout))
    trainer = pl.Trainer(
        accelerator="cpu", devices=options.ranks, strategy=strategy(), precision=options.precision,
        max_epochs=options.epochs, max_steps=options.max_steps, callbacks=callbacks, logger=False,
        accumulate_grad_batches=options.accumulate, val_check_interval=options.val_interval,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=not options.no_callback,
    )  # fmt: skip
    torch.manual_seed(os.getpid() if Path(options.url).exists() else 1)  # a restart has other numbers until it resumes
    trainer.fit(Model(), loader(), DataLoader(Data(), 8, shuffle=False), ckpt_path=options.ckpt_path)


main()
