"""The class NodeStore, the client of a node: its objects as a store, and its registers, over Arrow Flight."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from ckpt.storage.base.checked_decode import Malformed, decode
from ckpt.storage.base.checksums import transfer_digest
from ckpt.storage.base.errors import CkptError, IntegrityError, Refused, StoreError, Unavailable, Untrusted
from ckpt.storage.base.fd_io import DescriptorReader, convert_os_errors
from ckpt.storage.base.store import Buffer, Entry, Reader, Store, Writer, check_name, require_length
from ckpt.storage.member.damaged_ranges import ChecksummedRange
from ckpt.storage.member.device import MemberInfo
from ckpt.storage.member.inventory import InventoryPart
from ckpt.storage.node import message_digests, wire
from ckpt.storage.node.client_credentials import NodeCredentials, require_encryption
from ckpt.storage.node.client_registers import CallCancelled, NodeRegisters
from ckpt.storage.node.fd_passing_client import FdPassingClient
from ckpt.storage.node.forked_connections import GRPC, connect
from ckpt.storage.node.inventory_call import inventory_part
from ckpt.storage.node.upload_renewal import UploadRenewal, UploadWriter

_BATCH_BYTES = 2 << 20
"""An append is sent in batches of this size, so that sending and receiving overlap."""

_READ_BYTES = 32 << 20
"""The most bytes of one read: an answer of this size arrives before the deadline even on a slow network."""

_INFO_FIELDS = ("identity", "used_bytes", "free_bytes", "state", "labels", "uploads")
"""The fields of an answer to `info` after the version. A newer node may add fields."""

_CONNECTIONS = 4
"""The number of TCP connections to one node, which calls use in turn. One carries about 2 GB/s."""


class NodeStore(Store):
    """The objects of a node. It may be used from many threads. Every call has a deadline.

    address: host:port of the node.

    Raises InvalidArgument if the token would be sent to another host without encryption.
    """

    def __init__(self, address: str, credentials: NodeCredentials | None = None) -> None:
        self.address = address
        self.url = f"node://{address}"
        self._credentials = credentials or NodeCredentials()
        require_encryption(self._credentials, address)
        self._clients: list[flight.FlightClient | None] = [None] * _CONNECTIONS
        self._last_connection = 0
        self._lock = threading.Lock()
        """Guards `_clients` and `_last_connection`."""
        self.registers = NodeRegisters(self.call, self.url)
        self.upload_renewal = UploadRenewal()
        self._fd_client = FdPassingClient(self, self._credentials.deadline_seconds)

    def info(self, seconds: float | None = None) -> MemberInfo:
        """Return the identity, usage and state that the node reports.

        seconds: the deadline; None for that of the credentials.

        Raises Unavailable if it does not answer, or with another version of the protocol.
        """
        answer = self.call("info", deadline=seconds)
        if not isinstance(answer, list) or not answer:
            raise Unavailable(f"{self.url} does not answer info by this protocol; check that it is a node")
        version, *fields = answer
        if version != wire.PROTOCOL_VERSION:
            raise Unavailable(
                f"{self.url} has version {version} of the protocol, and this client {wire.PROTOCOL_VERSION}; "
                f"{wire.SAME_VERSION_ADVICE}"
            )
        try:
            return decode(MemberInfo, dict(zip(_INFO_FIELDS, fields, strict=False)))
        except Malformed as error:
            raise Unavailable(
                f"{self.url} does not answer info by this protocol ({error}); {wire.SAME_VERSION_ADVICE}"
            ) from error

    # --- objects -----------------------------------------------------------------------------------------------

    def put(self, name: str, data: Buffer) -> None:
        self._put(name, data, False)

    def put_new(self, name: str, data: Buffer) -> None:
        self._put(name, data, True)

    def _put(self, name: str, data: Buffer, new: bool) -> None:
        check_name(name)
        view = memoryview(data).cast("B")
        if new or len(view) <= wire.PUT_BYTES:
            self.call("put", name, bytes(view), new)
            return
        with self.create(name, len(view)) as writer:
            step = 16 << 20
            for start in range(0, len(view), step):
                writer.append(view[start : start + step])
            writer.commit()

    def get(self, name: str) -> bytes:
        return self._get(name, None)

    def get_up_to(self, name: str, limit: int) -> bytes:
        return self._get(name, limit)

    def _get(self, name: str, limit: int | None) -> bytes:
        fd = self.descriptor(name)
        if fd is not None:
            with os.fdopen(fd, "rb") as file, convert_os_errors("reading", f"{self.url}/{name}"):
                require_length(f"{self.url}/{name}", os.fstat(fd).st_size, limit)
                return file.read()
        parts = []
        position = 0
        while True:
            part = b"".join(bytes(c) for c in self.read(check_name(name), position, _READ_BYTES))
            parts.append(part)
            position += len(part)
            require_length(f"{self.url}/{name}", position, limit)
            if len(part) < _READ_BYTES:
                return b"".join(parts)

    def open(self, name: str) -> Reader:
        return _NodeReader(self, check_name(name))

    def create(self, name: str, size_hint: int = 0) -> Writer:
        key = self.call("create", check_name(name), size_hint)
        writer = self._fd_client.create(key, size_hint, f"{self.url}/{name}") or _NodeWriter(self, key)
        self.upload_renewal.add(writer, self._fd_client.lease_seconds)
        return writer

    def descriptor(self, name: str) -> int | None:
        """Return a descriptor of an object, open for reading, if the node is on this host; otherwise None.

        The caller closes it.
        """
        found = self._fd_client.descriptors("open", check_name(name))
        return None if found is None else found[0]

    def list(self, prefix: str = "") -> Iterator[Entry]:
        if prefix:
            check_name(prefix)
        for part in self.call_parts("list", prefix):
            for name, nbytes in part:
                yield Entry(name, nbytes)

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        if prefix:
            check_name(prefix)
        yield from self.call("folders", prefix)

    def delete(self, names: Iterable[str]) -> None:
        every = [check_name(name) for name in names]
        for start in range(0, len(every), wire.NAMES_PER_CALL):
            self.call("delete", every[start : start + wire.NAMES_PER_CALL])

    def exists(self, name: str) -> bool:
        found: bool = self.call("exists", check_name(name))
        return found

    def verify(self, name: str, ranges: Sequence[ChecksummedRange]) -> Sequence[int]:
        """Return the indices of the damaged ranges of an object, which the node reads. Raises NotFound and StoreError."""
        deadline = 10 * self._credentials.deadline_seconds
        encoded = [[each.position, each.nbytes, each.cell_checksums] for each in ranges]
        found: Sequence[int] = self.call("verify", name, encoded, deadline=deadline)
        return found

    def inventory_part(self, after: str = "") -> InventoryPart:
        """Return the objects of the folders after `after` that the node can list in a part of the deadline."""
        return inventory_part(self.call_parts, self.url, after, self._credentials.deadline_seconds / 4)

    def link(self, name: str, to: str) -> None:
        """Give an object a second name, and make that durable. Raises NotFound."""
        self.call("link", check_name(name), check_name(to))

    def quarantine(self, name: str) -> None:
        """Move a damaged object to the quarantine of the node, where no reader finds it."""
        self.call("quarantine", name)

    def close(self) -> None:
        """Drop the connections. Each is closed when the last call that uses it has ended.

        Closing one explicitly, while another thread uses it, frees memory of that call: the process crashes (pyarrow 26).
        """
        with self._lock:
            self._clients = [None] * _CONNECTIONS

    # --- the wire ----------------------------------------------------------------------------------------------

    def call(self, verb: str, *arguments: object, deadline: float | None = None) -> Any:
        """Call a verb of the node and return its only answer. Raises Unavailable without an answer, and the errors of the node.

        deadline: seconds; None for that of the credentials.
        """
        answers = self.call_parts(verb, *arguments, deadline=deadline)
        if not answers:
            raise Unavailable(f"{self.url} does not answer {verb} by this protocol; check that it is a node")
        return answers[0]

    def call_parts(self, verb: str, *arguments: object, deadline: float | None = None) -> Sequence[Any]:
        """Call a verb of the node and return its answers."""
        with self.convert_flight_errors(verb, deadline):
            request = wire.pack(list(arguments))
            options = self.call_options(deadline, message_digests.request_header(verb, request))
            client = self.next_connection()
            bodies = [result.body for result in client.do_action(flight.Action(verb, request), options)]
            return [wire.unpack(body) for body in message_digests.without_digest(bodies, f"{self.url} to {verb}")]

    def read(self, name: str, position: int, nbytes: int) -> Iterator[memoryview]:
        """Yield a range of the bytes of an object in parts; fewer bytes than requested only at its end."""
        with self.convert_flight_errors(f"reading {name}"):
            ticket = wire.pack([name, position, nbytes])
            options = self.call_options(None, message_digests.request_header("get", ticket))
            client = self.next_connection()  # keep a reference: the connection must outlive its streams
            for chunk in client.do_get(flight.Ticket(ticket), options):
                yield wire.from_record_batch(chunk.data)

    def append(self, key: str, data: memoryview) -> int:
        """Append to an upload, and return the position of the data in the object. Raises Unavailable without an answer."""
        with self.convert_flight_errors("an append"):
            command = wire.pack([key, len(data), transfer_digest(data)])
            options = self.call_options(None, message_digests.request_header("put", command))
            client = self.next_connection()
            writer, reader = client.do_put(flight.FlightDescriptor.for_command(command), wire.SCHEMA, options)
            try:
                for start in range(0, len(data), _BATCH_BYTES):
                    writer.write_batch(wire.to_record_batch(data[start : start + _BATCH_BYTES]))
                writer.done_writing()
                answers = list(iter(lambda: reader.read() or b"", b""))
            finally:
                writer.close()  # raises the error of the node
            if not answers:
                raise Unavailable(f"{self.url} closed an append without an answer; check that it runs")
            position: int = wire.unpack(message_digests.without_digest(answers, f"{self.url} to an append")[0])
            return position

    def next_connection(self) -> flight.FlightClient:
        """Return the next of the connections, in turn. Opens it if necessary."""
        GRPC.require_usable(self.url)
        with self._lock:
            self._last_connection = number = (self._last_connection + 1) % _CONNECTIONS
            client = self._clients[number] = self._clients[number] or self._open_connection(number)
            return client

    def _open_connection(self, number: int) -> flight.FlightClient:
        access = self._credentials
        tls: dict[str, bytes] = {}
        if access.ca is not None:
            tls["tls_root_certs"] = access.ca
            if access.certificate is not None:
                tls["cert_chain"], tls["private_key"] = access.certificate
        # gRPC merges channels with equal options into one connection, so each gets a different number.
        options = [
            ("ckpt.connection", number),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        options.append(("grpc.max_receive_message_length", wire.MESSAGE_BYTES + wire.FRAME_BYTES))
        if access.ca is None:  # gRPC uses http_proxy even for loopback, and a proxy would see token and data unencrypted
            options.append(("grpc.enable_http_proxy", 0))
        scheme = "grpc+tls" if access.ca is not None else "grpc+tcp"
        return connect(f"{scheme}://{self.address}", generic_options=options, **tls)

    def call_options(self, seconds: float | None = None, *headers: tuple[bytes, bytes]) -> flight.FlightCallOptions:
        """Return the Flight options of one call: its deadline, the token, and further headers."""
        if self._credentials.token:
            headers = (b"authorization", f"Bearer {self._credentials.token}".encode()), *headers
        return flight.FlightCallOptions(timeout=seconds or self._credentials.deadline_seconds, headers=list(headers))

    @contextmanager
    def convert_flight_errors(self, action: str, deadline: float | None = None) -> Iterator[None]:
        """A context that converts errors of Flight into Unavailable, Refused, Untrusted, the error of the node, or StoreError.

        action: names the call in messages. deadline: of the call, in seconds; None for that of the credentials.
        """
        try:
            yield
        except flight.FlightError as error:
            node_error = wire.decode_error(error.extra_info) if error.extra_info else None
            if node_error is not None:
                raise type(node_error)(f"{self.url}: {node_error}") from error
            text = next(iter(str(error).splitlines()), "")[:300]
            if "Connection refused" in text:  # gRPC repeats this for up to a second, even if the node serves again
                self.close()
            if isinstance(error, flight.FlightUnauthenticatedError | flight.FlightUnauthorizedError):
                raise Refused(f"{self.url} refused {action}: {text}") from error
            if isinstance(error, flight.FlightTimedOutError):
                seconds = deadline or self._credentials.deadline_seconds
                raise Unavailable(f"{self.url} did not answer {action} within {seconds:g} s; check that it runs") from error
            if "Ssl handshake failed" in text or "is not in peer certificate" in text:
                reason = text.rpartition("SSL routines::")[2].rpartition(f"{self.address}: ")[2]
                raise Untrusted(
                    f"{self.url} can't be trusted: {reason}; check its certificate (--tls-cert, CKPT_TLS_CERT_FILE), and the "
                    "authority of this client (CKPT_CA_FILE, ca_file)"
                ) from error
            kind = CallCancelled if isinstance(error, flight.FlightCancelledError) else Unavailable
            raise kind(f"{self.url} failed in {action}: {text}; check that it runs") from error
        except (pa.ArrowException, OSError) as error:  # pyarrow raises OSError for a message that it can't read
            text = next(iter(str(error).splitlines()), "")[:300]
            raise StoreError(f"{self.url}: {action} failed: {text}; see the log of the node") from error
        except ValueError as error:
            if isinstance(error, CkptError):
                raise
            raise Unavailable(
                f"{self.url} does not answer {action} by this protocol ({error}); {wire.SAME_VERSION_ADVICE}"
            ) from error


class _NodeReader(Reader):
    """Reads an object through its descriptor if the node is on this host, otherwise over the wire."""

    def __init__(self, store: NodeStore, name: str) -> None:
        self._store = store
        self._name = name
        self._lock = threading.Lock()
        """Guards changes of `_file`, and `_closed`."""
        self._file: DescriptorReader | None = None
        self._closed = False

    def read_into(self, position: int, buffer: memoryview) -> int:
        file = self._file or self._open_descriptor_reader()
        if file is not None:
            return file.read_into(position, buffer)
        done = 0
        while done < len(buffer):
            requested_bytes = min(_READ_BYTES, len(buffer) - done)
            got = 0
            for piece in self._store.read(self._name, position + done, requested_bytes):
                if got + len(piece) > requested_bytes:
                    raise IntegrityError(
                        f"{self._store.url} sent more bytes of {self._name} than requested; {wire.SAME_VERSION_ADVICE}"
                    )
                buffer[done + got : done + got + len(piece)] = piece
                got += len(piece)
            done += got
            if got < requested_bytes:
                break
        return done

    def _open_descriptor_reader(self) -> DescriptorReader | None:
        """Return a reader of the file itself if the node is on this host; otherwise None."""
        fd = self._store.descriptor(self._name)
        if fd is None:
            return None
        file = DescriptorReader(fd, f"{self._store.url}/{self._name}")
        with self._lock:
            if self._file is None and not self._closed:
                self._file = file
        if self._file is not file:  # another thread was faster, or has closed this
            file.close()
        return self._file

    def close(self) -> None:
        with self._lock:
            file, self._file, self._closed = self._file, None, True
        if file is not None:
            file.close()


class _NodeWriter(UploadWriter):
    """Writes an object over the wire, as an upload of the node."""

    def __init__(self, store: NodeStore, key: str) -> None:
        self._store = store
        self._key = key
        self._open = True

    def append(self, data: memoryview) -> int:
        data = data.cast("B")
        if len(data) <= wire.MESSAGE_BYTES:
            return self._store.append(self._key, data)
        raise StoreError(
            f"{self._store.url}: an append of {len(data)} bytes is too long; append at most {wire.MESSAGE_BYTES} at once"
        )

    def renew(self) -> None:
        self._store.call("reserve", self._key, 0, 0)

    def commit(self) -> int:
        length: int = self._store.call("commit", self._key)
        self._end()
        return length

    def _end(self) -> None:
        self._open = False
        self._store.upload_renewal.remove(self)

    def abort(self) -> None:
        if self._open:
            self._end()
            with suppress(StoreError):  # the node discards the upload when its lease expires
                self._store.call("abort", self._key)
