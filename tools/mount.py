"""The command ckpt-mount: shows a namespace as a directory, through FUSE.

Each byte of a file is written once, in any order. It is durable and visible when the file is closed or renamed, or when fsync
returns. So the usual sequence of write, fsync and rename is safe. Changing existing bytes is refused (EOPNOTSUPP); replacing a
file and appending to it are allowed. Close, fsync and rename report write errors.
"""

from __future__ import annotations

import codecs
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import click

import ckpt
from ckpt.aggregator.file_io.namespace import open_namespace
from ckpt.storage.base.errors import CkptError
from ckpt.storage.base.fd_io import convert_os_errors
from ckpt.tools import common
from ckpt.tools.mount_operations import MountOperations, Ownership
from ckpt.tools.unmount_signals import unmount_on_signals

_CODEC_NAME = "ckpt_names"


def _find_codec(encoding: str) -> codecs.CodecInfo | None:
    """Return a codec for names: UTF-8; other bytes become surrogates, which no valid name has (EINVAL)."""
    if encoding != _CODEC_NAME:
        return None
    return codecs.CodecInfo(
        lambda text, _="strict": codecs.utf_8_encode(text, "surrogateescape"),
        lambda data, _="strict": codecs.utf_8_decode(data, "surrogateescape", True),
        name=_CODEC_NAME,
    )


def serve_mount(url: str, folder: Path, options: dict[str, Any], ownership: Ownership | None = None) -> None:
    """Mount the namespace and serve it until an unmount or a signal ends it.

    options: those of fusepy.
    ownership: the owner and mode of all files; None: this user, and umask 022.

    Raises CkptError if FUSE is not installed, if the folder can't be mounted, or if writes are lost when it is unmounted.
    """
    try:
        import fuse
    except (ImportError, OSError) as error:
        raise CkptError(
            f'mounting needs FUSE ({error}): run pip install "ckpt-store[mount]", and install libfuse2 and fuse3'
        ) from error
    codecs.register(_find_codec)
    unmount_on_signals(folder.absolute())
    fuse.signal = lambda number, _: signal.getsignal(number)  # otherwise fusepy replaces our handler of SIGINT
    namespace, root = open_namespace(url)
    _ = namespace.ring  # raises now if the nodes can't be reached
    operations = MountOperations(namespace, root, ownership)
    try:
        fuse.FUSE(operations, str(folder), encoding=_CODEC_NAME, **options)
    except RuntimeError as error:
        # An unmount during a request makes libfuse fail, too (ECONNABORTED), although it has unmounted the folder.
        if not operations.was_mounted:
            message = f"mounting {url} at {folder} failed; see the messages of FUSE above, and check that you may use /dev/fuse"
            raise CkptError(message) from error
    if lost := operations.unsynced_files():
        raise CkptError(
            f"{folder} is unmounted, and writes that were not synced are lost (files: {len(lost)}, such as {lost[0]}): write "
            "them again"
        )


class _OctalMask(click.ParamType):  # type: ignore[type-arg]
    """The type of an option with a permission mask, as an octal number."""

    name = "octal"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        if not re.fullmatch("0?[0-7]{1,3}", value):
            self.fail(f"{value} is not a permission mask; write an octal number, such as 022 or 077", param, context)
        return int(value, 8)


@click.command(
    "ckpt-mount",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  ckpt-mount ckpt://host1:7070,host2:7070/ /mnt/ckpt
  fusermount3 -u /mnt/ckpt                      unmount; SIGTERM and Ctrl-C do the same""",
)
@click.argument("url")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--background", is_flag=True, help="Return when the folder is mounted, and serve in the background.")
@click.option(
    "--log",
    type=click.Path(dir_okay=False, path_type=Path),
    help="With --background: append the later messages to this file, such as that of lost writes.  [default: none]",
)
@click.option(
    "--allow-other",
    is_flag=True,
    help="Let other users use the mount, as --umask allows. Unless root mounts, /etc/fuse.conf must have the line "
    "user_allow_other.",
)
@click.option("--uid", type=click.IntRange(0), help="Owner of all files, by number.  [default: this user]")
@click.option("--gid", type=click.IntRange(0), help="Group of all files, by number.  [default: that of this user]")
@click.option(
    "--umask",
    type=_OctalMask(),
    default=0o022,
    metavar="OCTAL",
    help="The permissions that are removed: with 022 others can only read, with 077 they can't read.  [default: 022]",
)
@click.version_option(ckpt.__version__, package_name="ckpt-store")
def command(
    url: str, folder: Path, background: bool, log: Path | None, allow_other: bool, uid: int | None, gid: int | None, umask: int
) -> int:  # fmt: skip
    """Show the namespace at URL as the directory FOLDER.

    Each byte of a file is written once, and is durable when the file is closed or renamed, or when fsync returns. Files can be
    replaced, renamed, deleted and appended to. Changing bytes that are durable is refused (EOPNOTSUPP).
    """
    if background:
        given = {"--uid": uid, "--gid": gid, "--umask": f"{umask:o}"}
        options = [f"{name}={value}" for name, value in given.items() if value is not None]
        return _mount_in_background(url, folder, [*options, *(["--allow-other"] if allow_other else [])], log)
    if log is not None:
        raise click.UsageError("--log needs --background: in the foreground, messages are written to stderr")
    # default_permissions: the kernel checks owner and mode. Without it, every user with access to the mount could write.
    # attr_timeout: the kernel asks for the length of a file when it is opened. It cuts or fills up what it reads to that
    # length, and an append begins there, so a length from before another client's write would be wrong.
    fuse_options = {
        "foreground": True, "fsname": "ckpt", "subtype": "ckpt", "big_writes": True, "default_permissions": True,
        "attr_timeout": 0,
    }  # fmt: skip
    if allow_other:
        fuse_options["allow_other"] = True
    ownership = Ownership(os.getuid() if uid is None else uid, os.getgid() if gid is None else gid, umask)
    serve_mount(url, folder, fuse_options, ownership)
    return 0


def _mount_in_background(url: str, folder: Path, options: list[str], log: Path | None) -> int:
    """Start this command in the foreground, and return its exit status if it ends, or 0 when the folder is mounted.

    options: for the started command.
    log: the file to which its messages are appended; None discards those that come after the folder is mounted.
    """
    again = [sys.executable, "-P", "-m", "ckpt.tools.mount", *options, "--", url, str(folder)]
    before = os.stat(folder).st_dev
    with ExitStack() as files:
        if log is None:
            stderr_file: IO[bytes] = files.enter_context(tempfile.TemporaryFile())
        else:
            with convert_os_errors("opening", str(log)):
                stderr_file = files.enter_context(log.open("ab+"))
        begin = stderr_file.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            again, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr_file, start_new_session=True
        )
        while process.poll() is None:
            if os.stat(folder).st_dev != before:
                return 0
            time.sleep(0.05)
        stderr_file.seek(begin)
        sys.stderr.write(stderr_file.read().decode(errors="replace"))
        return process.returncode


def main() -> None:
    """Run the command as a console script."""
    common.run(command)


if __name__ == "__main__":
    main()
