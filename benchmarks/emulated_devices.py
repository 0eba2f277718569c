"""The devices of `devices.py`: each is made for a `with` block, and removed after it.

A function that makes one raises `Missing` where this machine or this user lacks what it needs.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from disk_limits import CannotLimit, DiskSpeed, LimitedDisk, limited_disk

HERE = Path(__file__).resolve().parent
START_SECONDS = 30.0

CLOUD_DISK = DiskSpeed(read_bytes=200_000_000, write_bytes=200_000_000)
SEEKING_DISK = DiskSpeed(read_bytes=200_000_000, write_bytes=200_000_000, requests=400)
BURST, BASELINE = DiskSpeed(400_000_000, 400_000_000), DiskSpeed(100_000_000, 100_000_000)
BURST_SECONDS, BASELINE_SECONDS = 0.4, 0.6
MOUNT_DELAY_MS = 2.0
WAY_DELAY_MS, WAY_MB_PER_SECOND = 10.0, 50.0
"""The delay and the speed of each direction of a connection between this host and a server."""


class Missing(Exception):
    """The reason why a device can't be made here."""


@dataclass(frozen=True, slots=True)
class Device:
    """A place to which saves and loads go."""

    url: str
    """A folder, or the URL of a store on another host."""
    groups: list[str] = field(default_factory=list)
    """Files of control groups, which limit the processes whose numbers are written there."""
    while_working: Callable[[], AbstractContextManager[None]] = nullcontext
    """What happens to the device while a save or load runs."""
    environment: dict[str, str] = field(default_factory=dict)
    has_parts: bool = False
    """Whether a save uploads parts of objects."""
    is_memory: bool = False
    """Whether nothing can be dropped from the page cache."""

    @property
    def is_remote(self) -> bool:
        return "://" in self.url


MakeDevice = Callable[[Path, int], AbstractContextManager[Device]]
"""Makes a device. Its arguments are a folder on the disk under test, and the MiB that it stores at most."""


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Make a folder for a `with` block.

    The caller chooses its name, so that it is removed whenever an interrupt comes. `tempfile` makes a folder before it
    returns the name.
    """
    try:
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- disks -----------------------------------------------------------------------------------------------------


@contextmanager
def plain_disk(folder: Path, mib: int) -> Iterator[Device]:
    yield Device(str(folder))


def slow_disk(speed: DiskSpeed) -> MakeDevice:
    """Return the function that makes a disk with a limit."""

    @contextmanager
    def make(folder: Path, mib: int) -> Iterator[Device]:
        with _limited(folder, speed) as disk:
            yield Device(str(folder), groups=[str(disk.processes)])

    return make


@contextmanager
def burst_disk(folder: Path, mib: int) -> Iterator[Device]:
    """A disk that is fast at the beginning of each second, as if its budget were used up and filled again."""
    with _limited(folder, BURST) as disk:

        def change(stop: threading.Event) -> None:
            while not stop.wait(BURST_SECONDS):
                disk.set_speed(BASELINE)
                if stop.wait(BASELINE_SECONDS):
                    return
                disk.set_speed(BURST)

        @contextmanager
        def while_working() -> Iterator[None]:
            disk.set_speed(BURST)
            stop = threading.Event()
            thread = threading.Thread(target=change, args=(stop,), name="burst")
            thread.start()
            try:
                yield
            finally:
                stop.set()
                thread.join()

        yield Device(str(folder), groups=[str(disk.processes)], while_working=while_working)


@contextmanager
def _limited(folder: Path, speed: DiskSpeed) -> Iterator[LimitedDisk]:
    try:
        with limited_disk(folder, speed) as disk:
            yield disk
    except CannotLimit as error:
        raise Missing(str(error)) from error


@contextmanager
def memory_disk(folder: Path, mib: int) -> Iterator[Device]:
    if not os.path.ismount("/dev/shm"):
        raise Missing("no tmpfs at /dev/shm")
    with new_folder(Path("/dev/shm", f"ckpt-bench-{os.getpid()}-memory")) as memory:
        yield Device(str(memory), is_memory=True)


@contextmanager
def large_sectors(folder: Path, mib: int) -> Iterator[Device]:
    """ext4 on a loop device with sectors of 4 KiB, so that O_DIRECT refuses shorter reads."""
    _require_root()
    image, mountpoint = folder / "sectors.img", folder / "sectors"
    mountpoint.mkdir()
    with image.open("wb") as file:
        file.truncate((mib + 256) << 20)
    try:
        loop = _run("losetup", "--find", "--show", "--sector-size", "4096", "--direct-io=on", str(image)).strip()
        _run("mkfs.ext4", "-q", "-m", "0", loop)
        _run("mount", loop, str(mountpoint))
        yield Device(str(mountpoint))
    finally:
        if os.path.ismount(mountpoint):
            _clean("umount", str(mountpoint))
        for loop in _run("losetup", "--associated", str(image), "--noheadings", "--output", "NAME").split():
            _clean("losetup", "--detach", loop)
        image.unlink()


@contextmanager
def slow_mount(folder: Path, mib: int) -> Iterator[Device]:
    """A FUSE file system over memory, each read and write of which takes some milliseconds."""
    try:
        import fuse  # noqa: F401
    except (ImportError, OSError) as error:
        raise Missing(f"no FUSE: {error}") from error
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise Missing("no /dev/fuse that this user may open")
    mountpoint = folder / "mount"
    mountpoint.mkdir()
    with memory_disk(folder, mib) as backing:
        command = [sys.executable, str(HERE / "slow_mount.py"), backing.url, str(mountpoint), f"--delay-ms={MOUNT_DELAY_MS}"]
        with _server(command) as server:
            try:
                _wait_until(lambda: os.path.ismount(mountpoint), server, "the mount")
                yield Device(str(mountpoint))
            finally:
                _clean("fusermount3", "-u", str(mountpoint))


# --- servers on another host -----------------------------------------------------------------------------------


@contextmanager
def far_bucket(folder: Path, mib: int) -> Iterator[Device]:
    """A bucket of moto's S3 server behind a slow connection."""
    try:
        import boto3
        import moto.server  # noqa: F401
        import obstore  # noqa: F401
    except ImportError as error:
        raise Missing(f"{error}; install moto[server] and obstore") from error
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with _server([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]) as server:
        _wait_until(lambda: _answers(port), server, "moto")
        access = {
            "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip
        session = boto3.session.Session("test", "test", region_name="us-east-1")
        session.client("s3", endpoint_url=f"http://127.0.0.1:{port}").create_bucket(Bucket="bench")
        with _far(port) as far:
            yield Device("s3://bench", has_parts=True, environment={**access, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{far}"})


@contextmanager
def far_node(folder: Path, mib: int) -> Iterator[Device]:
    """A storage node over memory behind a slow connection; it passes no descriptors."""
    with memory_disk(folder, mib) as memory:
        command = [sys.executable, "-m", "ckpt.tools.node", "--data", memory.url, "--listen", "127.0.0.1:0", "--no-fd-passing"]
        with _server(command, stderr=subprocess.PIPE) as server:
            assert server.stderr is not None
            found = (re.search(r" at 127\.0\.0\.1:(\d+)", line) for line in server.stderr)
            port = next((int(match[1]) for match in found if match), None)
            if port is None:
                raise Missing("the node did not start")
            threading.Thread(target=server.stderr.read, daemon=True).start()  # a full pipe would stop the node
            with _far(port) as far:
                yield Device(f"ckpt://127.0.0.1:{far}/bench")


@contextmanager
def _far(port: int) -> Iterator[int]:
    """Yield a port that forwards to another one over a slow connection."""
    command = [sys.executable, str(HERE / "slow_proxy.py"), f"127.0.0.1:{port}", f"--delay-ms={WAY_DELAY_MS}"]
    with _server([*command, f"--mb-per-second={WAY_MB_PER_SECOND}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as proxy:
        assert proxy.stdout is not None
        yield int(proxy.stdout.readline())


# --- programs --------------------------------------------------------------------------------------------------


@contextmanager
def _server(command: list[str], **streams: int) -> Iterator[subprocess.Popen[str]]:
    """Run a program in a session of its own, so that Ctrl-C does not end it before the code that uses it."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **streams}
    with subprocess.Popen(command, text=True, start_new_session=True, **streams) as server:  # type: ignore[call-overload]
        try:
            yield server
        finally:
            server.terminate()
            try:
                server.wait(5)
            except subprocess.TimeoutExpired:
                server.kill()


def _wait_until(is_ready: Callable[[], bool], server: subprocess.Popen[str], what: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not is_ready():
        if server.poll() is not None or time.monotonic() > deadline:
            raise Missing(f"{what} did not start")
        time.sleep(0.05)


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def _run(*command: str) -> str:
    """Return what a program of the system prints; raise Missing if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise Missing(f"{command[0]} is not installed") from error
    if done.returncode:
        raise Missing(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _clean(*command: str) -> None:
    """Run a program that removes a device; print its error, since nothing else can be done about it."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{' '.join(command)}: {done.stderr.strip()}", file=sys.stderr)


def _require_root() -> None:
    if os.geteuid():
        raise Missing("root is needed")


DEVICES: dict[str, tuple[str, MakeDevice]] = {
    "disk": ("disk", plain_disk),
    "slow": ("disk, 200 MB/s", slow_disk(CLOUD_DISK)),
    "seeking": ("disk, 200 MB/s and 400 requests/s", slow_disk(SEEKING_DISK)),
    "burst": ("disk, 400 and 100 MB/s in turns", burst_disk),
    "memory": ("tmpfs", memory_disk),
    "sectors": ("ext4 on sectors of 4 KiB", large_sectors),
    "fuse": (f"FUSE, {MOUNT_DELAY_MS:g} ms a request", slow_mount),
    "bucket": (f"bucket, {2 * WAY_DELAY_MS:g} ms away", far_bucket),
    "node": (f"node, {2 * WAY_DELAY_MS:g} ms away", far_node),
}
"""Title and function of each device, by the name that --device takes."""
