"""Describes what `codec="auto"` chose for a step, and why, as ckpt-inspect prints it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from ckpt.format.codec_choice import FASTER, CodecChoice
from ckpt.format.difference_choice import DifferenceChoice


def describe_codec(config: str) -> str:
    """Return a codec configuration in short: `blosc lz4`."""
    try:
        parameters = json.loads(config)
        return " ".join(str(parameters[key]) for key in ("id", "cname") if key in parameters)
    except (ValueError, TypeError, RecursionError):  # a commit record may have any text
        return config


def describe_choice(choice: CodecChoice) -> str:
    """Return one line: the choice, the seconds that were predicted, and the measurements behind them."""
    chosen = "no codec" if choice.codec is None else describe_codec(choice.codec)
    store = f"the store takes {choice.store_bytes_per_second / 1e9:.2f} GB/s"
    if choice.candidate is None:
        return f"auto: {chosen} for {choice.dtype}: {choice.reason}; {store}"
    seconds = f"{choice.seconds:.2f} s instead of {choice.seconds_without:.2f} s"
    if choice.reason != FASTER:
        seconds = f"{describe_codec(choice.candidate)} {choice.reason}, {seconds}"
    stolen = f", {choice.stolen_seconds:.2f} processor seconds from the training" if choice.stolen_seconds else ""
    return (
        f"auto: {chosen} for {choice.dtype}: {seconds}{stolen}; {store}, {choice.encoders:g} processors encode "
        f"{choice.core_bytes_per_second / 1e9:.2f} GB/s each to {choice.ratio:.2f}"
    )


def describe_differences(choice: DifferenceChoice) -> str:
    """Return one line: whether differences were stored, the seconds that were predicted, and the measurements behind them."""
    chosen = "differences" if choice.stores_differences else "no differences"
    why = f"{choice.seconds:.2f} s instead of {choice.seconds_in_full:.2f} s in full"
    if choice.reason != FASTER:
        why = f"{choice.reason}, {why}"
    stolen = f", {choice.stolen_seconds:.2f} processor seconds from the training" if choice.stolen_seconds else ""
    base = choice.base_bytes_per_second
    reads = "" if base is None else f", and a thread reads {base / 1e9:.2f} GB/s of bases"
    return (
        f"auto: {chosen} for {choice.dtype}: {why}{stolen}; a processor encodes "
        f"{choice.core_bytes_per_second / 1e9:.2f} GB/s to {choice.ratio:.2f}{reads}"
    )


def choice_json(choice: CodecChoice) -> dict[str, object]:
    """Return a choice for --json, its codecs as configurations."""
    fields = asdict(choice)
    return fields | {name: _parsed(fields[name]) for name in ("codec", "candidate")}


def _parsed(config: str | None) -> Any:
    try:
        return None if config is None else json.loads(config)
    except ValueError:
        return config
