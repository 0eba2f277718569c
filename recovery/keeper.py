"""A process that serves folders in the memory of this host as storage nodes, to the ranks of all hosts of a run.

Each node is a folder that is named by its port. What is in it outlives the process, and its caller: the next one serves the
same folders at the same ports. It is told what to do by lines on its standard input, and ends with it.

    in   fresh               one node more, empty
         drop HOST:PORT      end it, and remove what it holds
    out  serves HOST:PORT    of a folder that was there
         ready               these are all
         fresh HOST:PORT     the one that was asked for
         fails REASON
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ckpt.recovery import host
from ckpt.storage.access import is_loopback
from ckpt.storage.errors import CkptError, StoreError
from ckpt.storage.failpoints import failpoint

if TYPE_CHECKING:
    from ckpt.storage.device import Device
    from ckpt.storage.server import NodeOptions, NodeServer

log = logging.getLogger("ckpt.run")

_AGAIN_SECONDS = 1.0
"""After it has ended by itself."""
_COMES_SECONDS = 20.0
"""Who is not ready after so long is not waited for."""
_LOCKED_SECONDS = 2.0
"""The process before may take so long to end."""


@dataclass(frozen=True, slots=True)
class Guard:
    """What keeps strangers out of nodes that other hosts can reach. The token is that of the clients, in the environment."""

    token: bool = False
    """Whether there is one."""
    certificate: str = ""
    """File of the chain, PEM; `key` belongs to it."""
    key: str = ""
    authority: str = ""
    """File of who has signed the certificates of all hosts: clients speak TLS then."""
    insecure: bool = False

    def lacks(self, address: str) -> str:
        """The options that are missing for nodes at this address; "" none."""
        tls = {"--tls-cert": self.certificate, "--tls-key": self.key, "--ca-file": self.authority}
        lacking = [name for name, file in tls.items() if not file]
        if self.insecure or is_loopback(address):  # all of it, or nothing
            return ", ".join(lacking) if len(lacking) < len(tls) else ""
        return ", ".join(lacking if self.token else ["--token-file", *lacking])


class Keeper:
    """Its caller's side; all but `look` and `close` may be read at any time. Nothing here waits but `close`."""

    def __init__(self, folder: Path, address: str, guard: Guard) -> None:
        self.nodes: tuple[str, ...] = ()
        """HOST:PORT of all that are served."""
        self.fresh = ""
        """One of them, that is empty."""
        self.folder = folder
        """In the memory of this host, with all that the nodes hold."""
        self._at = f"[{address}]" if ":" in address else address
        self._told = json.dumps([str(folder), address, guard.certificate, guard.key])
        self._ready = self._asked = False
        self._lacks_since = time.monotonic()
        self._not_before = 0.0
        self._said = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    @property
    def state(self) -> Literal["off", "coming", "ready"]:
        """Whether there is a fresh node, or will be in a moment."""
        if self._ready and self.fresh in self.nodes:
            return "ready"
        return "coming" if time.monotonic() - self._lacks_since < _COMES_SECONDS else "off"

    def look(self, named: Collection[str]) -> None:
        """Hear what it says, and see to it that one node is fresh, and no node is there for nothing. Call it often.

        named: the nodes that are in use, or may be.
        """
        now = time.monotonic()
        self._listen()
        if self._process is None:
            if now >= self._not_before:
                self._start()
            return
        if not self._ready:
            return
        if self.fresh in named:
            self.fresh, self._lacks_since = "", now
        for at in self.nodes:
            if at not in named and at != self.fresh:
                self._tell(f"drop {at}")
        self.nodes = tuple(at for at in self.nodes if at in named or at == self.fresh)
        if self.fresh not in self.nodes and not self._asked and now >= self._not_before:
            self._asked = True
            self._tell("fresh")

    def node_at(self, path: Path) -> str:
        """HOST:PORT of the node whose folder this is."""
        return f"{self._at}:{path.name}"

    def close(self, free: bool) -> None:
        """End it. free: and remove all that it holds."""
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(_LOCKED_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if free:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        command = [sys.executable, "-m", "ckpt.recovery.keeper"]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, preexec_fn=host.die_with_parent
            )
        except OSError as error:
            self._failed(f"can't be started: {error.strerror}")
            return
        assert self._process.stdout is not None
        host.own(self._process.pid)
        os.set_blocking(self._process.stdout.fileno(), False)
        self._heard, self._ready, self._asked = b"", False, False
        self._tell(self._told)

    def _listen(self) -> None:
        if self._process is None:
            return
        assert self._process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._process.stdout.fileno(), 65536):
                self._heard += data
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            kind, _, what = line.decode().partition(" ")
            if kind == "ready":
                self._ready = True
            elif kind == "fails":
                self._say(what)
                self._asked, self._not_before = False, time.monotonic() + _AGAIN_SECONDS
            else:
                self.nodes = tuple(sorted({*self.nodes, what}))
            if kind == "fresh":
                self.fresh, self._asked = what, False
        if (status := self._process.poll()) is not None:
            self._failed(f"has ended with status {status}")

    def _failed(self, what: str) -> None:
        now = time.monotonic()
        if self._ready:  # it may come back as it went
            self._lacks_since = now
        self._process, self.nodes, self._ready = None, (), False
        self._not_before = now + _AGAIN_SECONDS
        self._say(f"the process that serves it {what}; it is started again")

    def _say(self, what: str) -> None:
        if what != self._said:
            log.warning("the memory of this host: %s", what)
        self._said = what

    def _tell(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, and is started again
            os.write(self._process.stdin.fileno(), f"{line}\n".encode())


# --- the other side ----------------------------------------------------------------------------------------------


class _Nodes:
    def __init__(self, folder: Path, address: str, options: NodeOptions) -> None:
        self._folder = folder
        self._address = address
        self._at = f"[{address}]" if ":" in address else address
        self._options = options
        self._servers: dict[str, tuple[NodeServer, Device]] = {}

    def serve_what_is_there(self) -> None:
        for path in sorted(self._folder.glob("*")):  # none where nothing was kept yet
            if path.name.isdigit():
                try:
                    print("serves", self._serve(path, time.monotonic() + _LOCKED_SECONDS), flush=True)
                except (CkptError, OSError) as error:
                    print(f"fails {path} can't be served: {_line(error)}", flush=True)

    def fresh(self) -> str:
        for _ in range(20):
            with socket.create_server((self._address, 0), family=self._family) as found:
                path = self._folder / str(found.getsockname()[1])
            if not path.exists():  # else one that could not be served had this port
                return self._serve(path)
        raise StoreError(f"no port of {self._address} is free")

    def drop(self, at: str) -> None:
        """Without waiting for its callers."""
        server, device = self._servers.pop(at)
        threading.Thread(target=_end, args=(server, Path(device.path)), daemon=True).start()

    @property
    def _family(self) -> int:
        return socket.AF_INET6 if ":" in self._address else socket.AF_INET

    def _serve(self, path: Path, until: float = 0.0) -> str:
        from ckpt.storage.device import Device
        from ckpt.storage.server import NodeServer

        port = int(path.name)
        while True:
            try:
                with socket.create_server((self._address, port), family=self._family):
                    pass  # gRPC would share the port with whoever else of this user listens there
                device = Device(path)
                server = NodeServer(device, self._at, port, self._options)
                break
            except (StoreError, OSError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
        at = f"{self._at}:{server.port}"
        self._servers[at] = server, device
        failpoint("keeper.serves")
        return at


def nodes_with_objects(folder: Path) -> list[Path]:
    """The nodes in the memory of this host that hold any object. Raises StoreError where that can't be read."""
    from ckpt.storage.device import OBJECTS
    from ckpt.storage.local import LocalStore

    with contextlib.suppress(FileNotFoundError):
        nodes = [path for path in sorted(folder.iterdir()) if path.name.isdigit()]
        return [path for path in nodes if next(iter(LocalStore(path / OBJECTS).list()), None) is not None]
    return []


def _end(server: NodeServer, path: Path) -> None:
    server.drain(0.0)
    server.shutdown()
    shutil.rmtree(path, ignore_errors=True)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def keep() -> None:
    """Serve until the standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)

    from ckpt.aggregator.members import token_told
    from ckpt.storage.server import NodeOptions

    folder, address, certificate, key = json.loads(sys.stdin.readline())
    token = token_told()
    options = NodeOptions(
        tokens=(lambda: (token,)) if token else None,
        certificate=(Path(certificate).read_bytes(), Path(key).read_bytes()) if certificate else None,
    )
    nodes = _Nodes(Path(folder), address, options)
    nodes.serve_what_is_there()
    print("ready", flush=True)
    for line in sys.stdin:
        kind, _, what = line.strip().partition(" ")
        try:
            if kind == "fresh":
                print("fresh", nodes.fresh(), flush=True)
            else:
                nodes.drop(what)
        except (CkptError, OSError) as error:
            print(f"fails {_line(error)}", flush=True)
    os._exit(0)  # what is half-written is no more when its folder is served again


if __name__ == "__main__":
    keep()
