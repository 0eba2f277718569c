"""Runs Megatron-Core on the CPU: its code names CUDA devices and types of tensors, but needs no CUDA kernel here."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import random as parallel_random
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.overrides import TorchFunctionMode

VOCABULARY, LENGTH, BATCH = 64, 16, 2


class _NoCuda(TorchFunctionMode):
    """Makes tensors on the CPU where CUDA is named, and calls the type of a tensor as CUDA's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.")
        return args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)


def without_cuda() -> None:
    """Let all code of Megatron-Core run on the CPU, deterministically."""
    _NoCuda().__enter__()
    torch.cuda.current_device = lambda: "cpu"  # where Megatron makes its buffers
    torch.cuda.synchronize = lambda: None
    tracker = parallel_random.get_cuda_rng_tracker()
    tracker.fork = lambda *_, **__: torch.random.fork_rng(devices=[], enabled=False)  # it is that of a GPU
    torch.use_deterministic_algorithms(True)


def transformer_config(tp: int, pp: int, bf16: bool = False) -> TransformerConfig:
    dtype = torch.bfloat16 if bf16 else torch.float32
    return TransformerConfig(
        num_layers=4, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True, tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp, pipeline_dtype=dtype, hidden_dropout=0.1, attention_dropout=0.0, bf16=bf16,
        params_dtype=dtype, gradient_accumulation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
    )  # fmt: skip


def gpt_model(config: TransformerConfig, seed: int) -> Any:
    """Return the part of a small GPT that this rank has."""
    torch.manual_seed(seed)
    return GPTModel(
        config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(), share_embeddings_and_output_weights=False,
    )  # fmt: skip


def distributed_optimizer(config: TransformerConfig, model: Any) -> tuple[Any, Any]:
    """Return the model in the DistributedDataParallel of Megatron-Core, and its distributed optimizer."""
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(config, ddp, model)
    options = OptimizerConfig(
        optimizer="adam", lr=1e-2, bf16=config.bf16, params_dtype=config.params_dtype, use_distributed_optimizer=True,
        clip_grad=1.0,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(options, [wrapped])
    for each in optimizer.chained_optimizers:  # Adam of torch makes them at its first step, and Megatron requires them
        for parameter in (parameter for group in each.optimizer.param_groups for parameter in group["params"]):
            zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            each.optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}
        _accept_steps_of_groups(each)
    return wrapped, optimizer


def _accept_steps_of_groups(optimizer: Any) -> None:
    """Let a load keep the step counts of Adam, which Megatron-Core sets from the groups and then replaces or requires."""
    set_states, get_states = optimizer._set_main_param_and_optimizer_states, optimizer._get_main_param_and_optimizer_states

    @torch.no_grad()
    def set_with_step(parameter: Any, tensors: Any) -> None:
        set_states(parameter, {**tensors, "step": get_states(parameter)["step"]})

    optimizer._set_main_param_and_optimizer_states = set_with_step


def loss_of(model: Any, number: int) -> Any:
    """Return the loss of a batch of random tokens."""
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(number))
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
