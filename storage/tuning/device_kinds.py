"""The kinds of devices, local and remote, and the ways in which each can be read. Pure."""

from __future__ import annotations

from dataclasses import replace

from ckpt.storage.tuning.choice import Choice, ChoiceSpace

KIB, MIB = 1 << 10, 1 << 20

DISK = ChoiceSpace(
    requests=(1, 2, 4, 8, 16, 32),
    request_bytes=(512 * KIB, MIB, 2 * MIB, 4 * MIB),
    first=Choice(16, 512 * KIB),
    max_bytes_in_flight=64 * MIB,
)
"""A local file system whose page cache can be bypassed."""

NETWORK = ChoiceSpace(
    requests=(2, 4, 8, 16, 32, 64),
    request_bytes=(MIB, 2 * MIB, 4 * MIB, 8 * MIB),
    first=Choice(32, 4 * MIB),
    max_bytes_in_flight=256 * MIB,
)
"""A bucket, a node, or a server: each request costs a round trip."""


def of_whole_blocks(space: ChoiceSpace, block_bytes: int, max_requests: int) -> ChoiceSpace:
    """Return the ways to read a device if each request is a whole block, for which its thread has memory."""
    return replace(
        space,
        requests=tuple(requests for requests in space.requests if requests <= max_requests),
        request_bytes=(block_bytes,),
        first=replace(space.first, requests=min(4, max_requests), request_bytes=block_bytes),
        max_bytes_in_flight=block_bytes * max_requests,
    )
