"""Compares how fast weights get from files into parameters: ckpt, runai-model-streamer, safetensors, and a raw read.

    python benchmarks/weights.py [FOLDER] [MIB] [ROUNDS]

It needs torch, safetensors and runai-model-streamer. Each reader copies every tensor into a parameter that exists, as a server
does. "raw" is the limit: four threads read the file of safetensors into memory that exists, and verify nothing. The readers
take turns, in a new process for each time. Cold: the files are first dropped from the page cache. The script prints medians,
the smallest and largest time, and the median of the ratios of the speeds of ckpt and the other in each round. Processor
seconds depend less on what else the machine does.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

READERS = ("raw", "ckpt", "runai", "safetensors")


def model(mib: int) -> dict[str, torch.Tensor]:
    """Return parameters in bfloat16 with the names and shapes of a Llama, with the fewest layers that take `mib` MiB."""
    width, inner, heads, words = 2048, 5632, 256, 32000
    found = {"model.embed_tokens.weight": (words, width), "lm_head.weight": (words, width), "model.norm.weight": (width,)}
    layer = {
        "self_attn.q_proj": (width, width), "self_attn.k_proj": (heads, width), "self_attn.v_proj": (heads, width),
        "self_attn.o_proj": (width, width), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner), "input_layernorm": (width,), "post_attention_layernorm": (width,),
    }  # fmt: skip
    number = 0
    while 2 * sum(torch.Size(shape).numel() for shape in found.values()) < mib << 20:
        found.update({f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()})
        number += 1
    generator = torch.Generator().manual_seed(0)
    return {name: torch.empty(shape, dtype=torch.bfloat16).normal_(generator=generator) for name, shape in found.items()}


def prepare(folder: Path, mib: int) -> None:
    """Write the weights in both formats."""
    from safetensors.torch import save_file

    import ckpt

    weights = model(mib)
    ckpt.save(weights, folder / "ckpt", 0)
    (folder / "safetensors").mkdir()
    save_file(weights, folder / "safetensors" / "model.safetensors")
    os.sync()


def tensors(reader: str, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    file = str(folder / "safetensors" / "model.safetensors")
    if reader == "ckpt":
        from ckpt.adapters.weights import iterate_weights

        yield from iterate_weights(folder / "ckpt")
    elif reader == "safetensors":
        from safetensors import safe_open

        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)
    else:
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_file(file)
            yield from streamer.get_tensors()


def read_raw(path: Path, memory: memoryview) -> None:
    """Read a file in pieces of 16 MiB, in four threads."""
    with open(path, "rb") as file, ThreadPoolExecutor(4) as threads:

        def read(start: int) -> None:
            end = min(len(memory), start + (16 << 20))
            while start < end:
                start += os.preadv(file.fileno(), [memory[start : min(end, start + (1 << 20))]], start)

        list(threads.map(read, range(0, len(memory), 16 << 20)))


def measure(reader: str, folder: Path) -> None:
    """Print the seconds and the processor seconds from the first call to the last copy.

    The imports and the allocation of the parameters are not included.
    """
    from safetensors import safe_open

    with safe_open(str(folder / "safetensors" / "model.safetensors"), "pt") as opened:
        slices = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    parameters = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in slices.items()}
    file = folder / "safetensors" / "model.safetensors"
    memory = np.ones(file.stat().st_size if reader == "raw" else 0, np.uint8)
    if reader == "ckpt":
        import ckpt.adapters.weights  # noqa: F401
    elif reader == "runai":
        import runai_model_streamer  # noqa: F401
    start, processors = time.perf_counter(), time.process_time()
    copied = 0
    if reader == "raw":
        read_raw(file, memory.data)
    else:
        for name, tensor in tensors(reader, folder):
            parameters[name].copy_(tensor)
            copied += 1
    seconds, processors = time.perf_counter() - start, time.process_time() - processors
    assert copied == len(parameters) or reader == "raw"
    print(seconds, processors)


def drop_from_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds_of(reader: str, folder: Path, cold: bool) -> tuple[float, float]:
    if cold:
        drop_from_cache(folder)
    done = subprocess.run([sys.executable, __file__, "--measure", reader, str(folder)], check=True, capture_output=True)
    seconds, processors = map(float, done.stdout.split()[-2:])
    return seconds, processors


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2], Path(sys.argv[3]))
        return
    root = Path(tempfile.mkdtemp(dir=sys.argv[1] if len(sys.argv) > 1 else None))
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    try:
        prepare(root, int(sys.argv[2]) if len(sys.argv) > 2 else 1024)
        nbytes = sum(file.stat().st_size for file in (root / "safetensors").iterdir())
        for cold in (True, False):
            times: dict[str, list[tuple[float, float]]] = {reader: [] for reader in READERS}
            for number in range(rounds + (not cold)):
                for reader in READERS:
                    measured = seconds_of(reader, root, cold)
                    if cold or number:  # the first hot round fills the cache
                        times[reader].append(measured)
            for reader, found in times.items():
                seconds = [time for time, _ in found]
                middle = statistics.median(seconds)
                ratio = statistics.median(other / own for (other, _), (own, _) in zip(found, times["ckpt"], strict=True))
                print(
                    f"{'cold' if cold else 'hot':<5} {reader:<12} {middle:6.2f} s ({min(seconds):.2f} to {max(seconds):.2f})  "
                    f"{nbytes / middle / 1e9:5.2f} GB/s  {statistics.median(time for _, time in found):5.2f} s of processors  "
                    f"ckpt/{reader} {ratio:.2f}",
                    flush=True,
                )
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
