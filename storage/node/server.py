"""The class NodeServer, a node: it serves one device over Arrow Flight.

It checks the token of a call before it handles the call. It checks lengths and digests before it acknowledges data. It reserves
no space that it does not have. Its own waits have limits, and unfinished uploads and reads expire.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.flight as flight

from ckpt.storage.base.buffer_pool import BufferPool
from ckpt.storage.base.checksums import transfer_digest
from ckpt.storage.base.errors import CkptError, IntegrityError, InvalidArgument, NotFound, StoreError, Unavailable
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.store import check_name
from ckpt.storage.base.threads import start_or_raise
from ckpt.storage.member.damaged_ranges import ChecksummedRange
from ckpt.storage.member.device import Device
from ckpt.storage.node import fd_passing_server, message_digests, wire
from ckpt.storage.node.forked_connections import GRPC
from ckpt.storage.node.inventory_verbs import InventoryVerbs
from ckpt.storage.node.outgoing_object import OutgoingObject
from ckpt.storage.node.register_verbs import RegisterVerbs, read_only_error
from ckpt.storage.node.token_check import TokenCheck
from ckpt.storage.node.upload_leases import SHUTTING_DOWN, UploadLeases

log = logging.getLogger("ckpt.node")

T = TypeVar("T")

_READ_BYTES = 4 << 20
"""The most bytes of an object that one message of a stream has."""
_LIST_ENTRIES = 5_000
"""The most entries that one message of a listing has."""


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """How a node serves. See `ckpt-node --help`."""

    tokens: Callable[[], tuple[str, ...]] | None = None
    """Returns the valid tokens at each call; see token_check.TokenFile. None requires no token."""
    certificate: tuple[bytes, bytes] | None = None
    """Certificate chain and key of the node, PEM. None serves without TLS."""
    client_ca: bytes | None = None
    """The authority, PEM, of which each client must have a certificate; None requires none."""
    read_only: bool = False
    """Whether calls that write are refused."""
    labels: tuple[tuple[str, str], ...] = ()
    """The failure domains of the node, outermost first: rack, host …"""
    buffer_bytes: int = 256 << 20
    """The memory for appends that are being received."""
    buffer_wait_seconds: float = 20.0
    """How long an append waits for a buffer."""
    lease_seconds: float = wire.UPLOAD_LEASE_SECONDS
    """How long the node keeps an upload whose client sends nothing, or a read whose client reads nothing."""
    pass_descriptors: bool = True
    """Whether clients on this host may read and write the files directly; see fd_passing_server.py."""


class NodeServer(flight.FlightServerBase):  # type: ignore[misc]
    """Serves a device. It is a context manager, and `port` is the one on which it listens.

    To end it, call `drain`, then `shutdown`, and then `close` of the device, which it has locked.

    port: 0 chooses a free one.

    Raises StoreError if another node serves the device, it can't listen at this address, or the system has no threads left.
    """

    def __init__(self, device: Device, host: str = "127.0.0.1", port: int = 0, options: NodeOptions | None = None) -> None:
        self._device = device
        self._options = options = options or NodeOptions()
        self._buffers = BufferPool(options.buffer_bytes)
        self.identity = device.identity()
        self.uploads = UploadLeases(device.store, self._unreserved_bytes, options.lease_seconds)
        self.counters: dict[tuple[str, str], float] = {}
        self._outgoing: set[OutgoingObject] = set()
        self._count_lock = threading.Lock()
        """Guards `_outgoing`. Guards changes of `counters`."""
        self.is_draining = False  # `drain` sets it once; the threads of calls only read it
        self._handlers = _handlers_of(self) | _handlers_of(InventoryVerbs(device))
        self._handlers |= _handlers_of(RegisterVerbs(device.registers, options.read_only))
        device.lock()
        self._fd_server = (
            fd_passing_server.start_fd_passing(self._open_descriptors, options.lease_seconds, options.tokens or tuple)
            if options.pass_descriptors
            else None
        )
        self._stop = threading.Event()
        middleware = {message_digests.DigestHeaders.NAME: message_digests.DigestHeaders()}
        GRPC.note_use()
        try:
            super().__init__(
                f"grpc+{'tls' if options.certificate else 'tcp'}://{host}:{port}",
                tls_certificates=[options.certificate] if options.certificate else None,
                verify_client=options.client_ca is not None,
                root_certificates=options.client_ca,
                middleware=middleware | ({"token": TokenCheck(options.tokens)} if options.tokens else {}),
            )
        except pa.ArrowException as error:  # gRPC prints the reason to stderr
            self.drain(0.0)
            raise StoreError(f"{device.path} can't listen at {host}:{port}: {error}; see the lines above") from error
        self._reaper = threading.Thread(target=self._expire_until_closed, name="ckpt-node-reaper", daemon=True)
        try:
            start_or_raise(self._reaper, f"the node of {device.path}")
        except StoreError:
            self.drain(0.0)
            self.shutdown()
            raise

    # --- state -------------------------------------------------------------------------------------------------

    def usage(self) -> tuple[int, int]:
        """Return the bytes of the objects, and the bytes that are free for more."""
        return self._device.usage()

    def _unreserved_bytes(self, reserved_bytes: int) -> int:
        """Return the free bytes that no upload has reserved. The disk counts reserved bytes as used; a size limit does not."""
        return self.usage()[1] - (reserved_bytes if self._device.is_limited else 0)

    def add_to_metric(self, metric: str, verb: str, by: float = 1) -> None:
        """Add to the counter of a verb."""
        with self._count_lock:
            self.counters[metric, verb] = self.counters.get((metric, verb), 0) + by

    def drain(self, seconds: float) -> int:
        """Refuse new objects, wait up to `seconds` for uploads, and discard the rest; return how many were discarded."""
        self.is_draining = True
        aborted_uploads = self.uploads.drain(seconds)
        self._stop.set()
        if self._fd_server is not None:
            self._fd_server.close()
        return aborted_uploads

    def _expire_until_closed(self) -> None:
        while not self._stop.wait(min(5.0, self._options.lease_seconds / 2)):
            try:
                self._expire_leases()
            except Exception as error:  # also a lack of memory: without this thread, no upload of a lost client ends
                log.warning("this node could not end the uploads of lost clients, and tries again: %s", error)

    def _expire_leases(self) -> None:
        for name in self.uploads.expire():
            log.warning(
                "this node has discarded the upload of %s: its client sent nothing for %g s", name, self._options.lease_seconds
            )
        with self._count_lock:
            sending = list(self._outgoing)
        for each in sending:
            if each.expire(self._options.lease_seconds):
                log.warning(
                    "this node has ended a read of %s: its client read nothing for %g s", each.name, self._options.lease_seconds
                )

    # --- Flight ------------------------------------------------------------------------------------------------

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterator[flight.Result]:
        verb = action.type if action.type in self._handlers else "unknown"  # otherwise, clients could add counters
        return self._run_handler(verb, lambda: self._run_action(context, action))

    def _run_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterator[flight.Result]:
        has_digest = message_digests.require_unchanged(context, action.type, action.body)
        verb = self._handlers.get(action.type)
        if verb is None:
            raise InvalidArgument(
                f"this node, with version {wire.PROTOCOL_VERSION} of the protocol, has no call {action.type!r}; "
                f"{wire.SAME_VERSION_ADVICE}"
            )
        if action.body.size > wire.MESSAGE_BYTES:
            raise InvalidArgument(f"a message of {action.body.size} bytes is too long; send at most {wire.MESSAGE_BYTES}")
        answer = verb(*wire.unpack(action.body))
        parts = map(wire.pack, answer if isinstance(answer, Iterator) else [answer])
        yield from map(flight.Result, message_digests.with_digest(parts) if has_digest else parts)

    def do_put(
        self, context: flight.ServerCallContext, descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader, writer: flight.FlightMetadataWriter,
    ) -> None:  # fmt: skip
        def receive() -> Iterator[int]:
            has_digest = message_digests.require_unchanged(context, "put", descriptor.command)
            key, nbytes, expected = wire.unpack(descriptor.command)
            if not 0 <= nbytes <= wire.MESSAGE_BYTES:
                raise InvalidArgument(f"an append of {nbytes} bytes is refused; send at most {wire.MESSAGE_BYTES}")
            with self._buffers.borrow(nbytes, self._options.buffer_wait_seconds) as loan:
                for chunk in reader:
                    data = wire.from_record_batch(chunk.data)
                    if loan.filled_bytes + len(data) > nbytes:
                        raise InvalidArgument(f"received more than {nbytes} bytes; announce all bytes of the append")
                    loan.append(data)
                if loan.filled_bytes < nbytes:
                    raise IntegrityError(f"received {loan.filled_bytes} of {nbytes} bytes; send the append again")
                with loan.full_view() as received:
                    if transfer_digest(received) != expected:
                        raise IntegrityError("the received bytes differ from the sent ones; send the append again")
                    failpoint("node.append")
                    position = self.uploads.append(key, received)
            self.add_to_metric("bytes_received", "put", nbytes)
            answer = [wire.pack(position)]
            for message in message_digests.with_digest(answer) if has_digest else answer:
                writer.write(pa.py_buffer(message))
            yield position

        for _ in self._run_handler("put", receive):
            pass

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.FlightDataStream:
        def streams() -> Iterator[flight.FlightDataStream]:
            message_digests.require_unchanged(context, "get", ticket.ticket)
            yield self._stream_object(ticket)

        [stream] = self._run_handler("get", streams)
        return stream

    def _stream_object(self, ticket: flight.Ticket) -> flight.FlightDataStream:
        name, position, nbytes = wire.unpack(ticket.ticket)
        if min(position, nbytes) < 0:
            raise InvalidArgument(f"{nbytes} bytes at {position} of {name} can't be read; give no negative number")
        failpoint("node.get")
        sending = OutgoingObject(name, self._device.store.open(name))

        def batches() -> Iterator[pa.RecordBatch]:
            done = 0
            with self._track_outgoing(sending):
                while done < nbytes:
                    length = min(_READ_BYTES, nbytes - done)
                    buffer = pa.allocate_buffer(length)
                    got = sending.read_into(position + done, memoryview(buffer))
                    self.add_to_metric("bytes_sent", "get", got)
                    if got:
                        column = pa.Array.from_buffers(pa.uint8(), got, [None, buffer])
                        yield pa.RecordBatch.from_arrays([column], schema=wire.SCHEMA)
                    if got < length:
                        return
                    done += got

        return flight.GeneratorStream(wire.SCHEMA, self._run_handler("get.read", batches))

    @contextmanager
    def _track_outgoing(self, outgoing: OutgoingObject) -> Iterator[None]:
        """A context in which an object is sent, and may expire. At its end, the object is closed."""
        with self._count_lock:
            self._outgoing.add(outgoing)
        try:
            yield
        finally:
            with self._count_lock:
                self._outgoing.discard(outgoing)
            outgoing.close()

    def _run_handler(self, verb: str, work: Callable[[], Iterator[T]]) -> Iterator[T]:
        """Yield the results of a handler, count the call, and send an error to the client with its kind."""
        began = time.perf_counter()
        try:
            yield from work()
            self.add_to_metric("calls", verb)
        except flight.FlightError:
            raise
        except Exception as error:
            self.add_to_metric("errors", verb)
            reported_error = _log_and_convert_error(verb, error)
            raise flight.FlightServerError(str(reported_error), extra_info=wire.encode_error(reported_error)) from error
        finally:
            self.add_to_metric("seconds", verb, time.perf_counter() - began)

    # --- objects -----------------------------------------------------------------------------------------------

    def _require_writable(self) -> None:
        if self._options.read_only:
            raise read_only_error()
        if self.is_draining:
            raise Unavailable(SHUTTING_DOWN)

    def _verb_put(self, name: str, data: bytes, new: bool) -> None:
        self._require_writable()
        with self.uploads.reserved(name, len(data)):
            (self._device.store.put_new if new else self._device.store.put)(name, data)

    def _verb_create(self, name: str, size_hint: int) -> str:
        self._require_writable()
        if size_hint < 0:
            raise InvalidArgument(f"{name} can't have {size_hint} bytes; give no negative number")
        return self.uploads.create(check_name(name), size_hint)

    def _verb_reserve(self, key: str, needed_bytes: int, requested_bytes: int) -> int:
        return self.uploads.reserve(key, needed_bytes, requested_bytes)

    def _verb_commit(self, key: str, length: int | None = None) -> int:
        """Commit an upload. length: its length in bytes if the client wrote through descriptors; None otherwise."""
        failpoint("node.commit")
        committed = self.uploads.commit(key, length)
        if length is not None:
            self.add_to_metric("bytes_near", "put", length)
        failpoint("node.committed")
        return committed

    def _verb_abort(self, key: str) -> None:
        self.uploads.abort(key)

    def _verb_exists(self, name: str) -> bool:
        return self._device.store.exists(name)

    def _verb_list(self, prefix: str) -> Iterator[list[list[object]]]:
        """Yield the objects in parts, each object with its name and its length in bytes."""
        part: list[list[object]] = []
        for entry in self._device.store.list(prefix):
            part.append([entry.name, entry.nbytes])
            if len(part) == _LIST_ENTRIES:
                yield part
                part = []
        yield part

    def _verb_folders(self, prefix: str) -> list[str]:
        return list(self._device.store.list_folders(prefix))

    def _verb_delete(self, names: list[str]) -> None:
        self._require_writable()
        self._device.store.delete(names)

    def _verb_sweep(self, prefix: str) -> None:
        """Do nothing; clients of earlier versions call it. Temporary files are deleted when their uploads expire."""

    def _verb_verify(self, name: str, ranges: list[Any]) -> list[int]:
        """Read ranges on the node, and return the indices of the damaged ones."""
        return self._device.verify(name, [ChecksummedRange(position, nbytes, cells) for position, nbytes, cells in ranges])

    def _verb_link(self, name: str, to: str) -> None:
        """Give an object a second name."""
        self._require_writable()
        self._device.link(check_name(name), check_name(to))

    def _verb_quarantine(self, name: str) -> None:
        """Move a damaged object to the quarantine: no reader finds it, and an operator can examine it."""
        self._require_writable()
        self._device.quarantine(name)

    def _verb_near(self) -> list[object] | None:
        """Return how clients on this host get descriptors: socket name, secret, lease in seconds; None if they get none."""
        if self._fd_server is None:
            return None
        address = self._fd_server.address
        return [address.socket_name, address.secret, address.lease_seconds]

    def _verb_info(self) -> list[object]:
        """Return protocol version, identity, used bytes, free bytes, state, failure domains, and the number of uploads."""
        used, free = self.usage()
        state = "draining" if self.is_draining else "read-only" if self._options.read_only else "serving"
        labels = [list(label) for label in self._options.labels]
        return [wire.PROTOCOL_VERSION, self.identity, used, free, state, labels, len(self.uploads)]

    @contextmanager
    def _open_descriptors(self, verb: str, argument: str) -> Iterator[list[int]]:
        """A context with the descriptors by which a client on this host reads an object or writes an upload."""
        self.add_to_metric("calls", f"near.{verb}")
        if verb == "open":
            failpoint("node.get")
            fd = self._device.store.descriptor(argument)
            try:
                yield [fd]
            finally:
                os.close(fd)
        elif verb == "append":
            failpoint("node.append")
            with self.uploads.descriptors(argument) as found:
                yield found
        else:
            raise InvalidArgument(f"this node has no descriptors for {verb!r}; use 'open' or 'append'")


def _handlers_of(source: object) -> dict[str, Callable[..., object]]:
    """Return the methods that answer calls, by verb: `_verb_a_b` answers a.b. One that yields sends several messages."""
    names = [name for name in dir(source) if name.startswith("_verb_")]
    return {name.removeprefix("_verb_").replace("_", "."): getattr(source, name) for name in names}


def _log_and_convert_error(verb: str, error: Exception) -> CkptError:
    """Log the error of a call, except NotFound, and return the error that the client gets."""
    if isinstance(error, NotFound):
        return error
    if isinstance(error, CkptError | ValueError | TypeError):  # the last two mean arguments that the protocol does not have
        client_error = (
            error
            if isinstance(error, CkptError)
            else InvalidArgument(f"{verb} has invalid arguments ({error}); {wire.SAME_VERSION_ADVICE}")
        )
        log.info("%s refused: %s", verb, client_error)
        return client_error
    log.error("%s failed: %s", verb, error, exc_info=error)
    return StoreError(f"the node failed in {verb}: {error}; see its log")
