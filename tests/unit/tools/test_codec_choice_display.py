"""ckpt-inspect prints what codec="auto" chose, and why."""

from __future__ import annotations

import dataclasses
import json

from ckpt.format.codec_choice import FAST_STORE, CodecSpeed, Resources, choose_codec
from ckpt.tools.codec_choice_display import choice_json, describe_choice, describe_codec

PLANES = CodecSpeed('{"id": "float_planes"}', 0.67, 1.1e9)
LZ4 = CodecSpeed('{"cname": "lz4", "id": "blosc"}', 0.76, 1.9e9)


def test_each_reason_has_one_line() -> None:
    slow = choose_codec("bfloat16", 10**10, [PLANES], Resources(0.3e9, 2, 2, None))
    assert describe_choice(slow) == (
        "auto: float_planes for bfloat16: 22.33 s instead of 33.33 s; the store takes 0.30 GB/s, 2 processors encode 1.10 GB/s "
        "each to 0.67"
    )
    busy = choose_codec("bfloat16", 10**10, [LZ4], Resources(0.3e9, 2, 0, 1.0))
    assert describe_choice(busy) == (
        "auto: no codec for bfloat16: blosc lz4 takes too much processor time, 25.33 s instead of 33.33 s, 5.26 processor "
        "seconds from the training; the store takes 0.30 GB/s, 2 processors encode 1.90 GB/s each to 0.76"
    )
    fast = choose_codec("bfloat16", 10**10, [], Resources(20e9, 2, 0, 1.0))
    assert describe_choice(fast) == f"auto: no codec for bfloat16: {FAST_STORE}; the store takes 20.00 GB/s"
    assert all(len(describe_choice(choice)) <= 240 for choice in (slow, busy, fast))


def test_any_text_in_a_commit_record_is_described() -> None:
    for text in ("", "[]", "7", "{", '{"id": 3}', '"x"', "null"):
        assert isinstance(describe_codec(text), str)
    choice = choose_codec("x", 10**10, [PLANES], Resources(0.3e9, 1, 1, None))
    for text in ("", "{", "[[[["):
        assert isinstance(describe_choice(dataclasses.replace(choice, codec=text, candidate=text)), str)
    assert choice_json(choice)["codec"] == json.loads(PLANES.config)
    assert choice_json(dataclasses.replace(choice, codec="{"))["codec"] == "{"
