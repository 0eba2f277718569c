"""Digests of the messages between a client and a node, so that a message that changed on its way counts as not received.

A client sends the digest of its request in a header. The node checks it, and ends its answer with a digest of the answer. Nodes
and clients of earlier versions do neither, and their messages are not checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import pyarrow as pa
import pyarrow.flight as flight
import xxhash

from ckpt.storage.base.errors import Unavailable
from ckpt.storage.base.store import Buffer

_HEADER = "ckpt-digest"

_DIGEST_PREFIX = b"\xd8\x01"
"""The beginning of the message with the digest of an answer: the MessagePack extension type 1 with 16 bytes follows."""

_ADVICE = "changed on its way; use TLS, and check the memory and the network cards of both hosts"

B = TypeVar("B", bytes, pa.Buffer)


class DigestHeader(flight.ServerMiddleware):  # type: ignore[misc]
    """The digest that a client has sent with a request."""

    def __init__(self, digest: str) -> None:
        self.digest = digest


class DigestHeaders(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Keeps the digest of each request for `require_unchanged`. A node has it under the name `DigestHeaders.NAME`."""

    NAME = "digest"

    def start_call(self, info: flight.CallInfo, headers: dict[str, list[str | bytes]]) -> DigestHeader | None:
        found = headers.get(_HEADER)
        return DigestHeader(found[0] if isinstance(found[0], str) else found[0].decode("latin-1")) if found else None


def request_header(verb: str, request: Buffer) -> tuple[bytes, bytes]:
    """Return the header with the digest of a request. request: the body of an action, a ticket, or the command of an append."""
    return _HEADER.encode(), _digest_request(verb, request).encode()


def require_unchanged(context: flight.ServerCallContext, verb: str, request: Buffer | pa.Buffer) -> bool:
    """Raise Unavailable if a request differs from the digest in its header.

    Returns whether there is such a header. The client then expects a digest of the answer.
    """
    header = context.get_middleware(DigestHeaders.NAME)
    if header is not None and header.digest != _digest_request(verb, request):
        raise Unavailable(f"the request {verb} was {_ADVICE}")
    return header is not None


def with_digest(answers: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the messages of an answer, and then a message with their digest."""
    digest = xxhash.xxh3_128()
    for answer in answers:
        digest.update(answer)
        yield answer
    yield _DIGEST_PREFIX + digest.digest()


def without_digest(answers: Sequence[B], source: str) -> Sequence[B]:
    """Return the messages of an answer without that of their digest, if there is one.

    source: the node and the call, for the message.

    Raises Unavailable if the answer differs from its digest.
    """
    if not answers or bytes(memoryview(answers[-1])[:2]) != _DIGEST_PREFIX:
        return answers
    digest = xxhash.xxh3_128()
    for answer in answers[:-1]:
        digest.update(memoryview(answer))
    if bytes(answers[-1]) != _DIGEST_PREFIX + digest.digest():
        raise Unavailable(f"the answer of {source} was {_ADVICE}")
    return answers[:-1]


def _digest_request(verb: str, request: Buffer | pa.Buffer) -> str:
    digest = xxhash.xxh3_128(verb.encode() + b"\0")
    digest.update(memoryview(request))
    return digest.hexdigest()
