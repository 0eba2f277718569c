"""A TCP proxy that delays all bytes, as a long distance does, and limits the speed of each connection.

    python benchmarks/slow_proxy.py HOST:PORT --delay-ms 10 --mb-per-second 100

It prints the port on which it listens, and ends when its standard input is closed. It needs no privilege, unlike `tc netem`,
which many kernels do not have.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import suppress

CHUNK_BYTES = 256 << 10
MAX_CHUNKS = 64
"""The most chunks of one direction that are under way: a limit of memory, like the window of TCP."""


async def forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_seconds: float, bytes_per_second: float
) -> None:
    """Pass the bytes of one direction on, each after the delay and not faster than the limit."""
    clock = asyncio.get_running_loop().time
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_CHUNKS)

    async def receive() -> None:
        sent = 0.0
        while True:
            data = await reader.read(CHUNK_BYTES)
            sent = max(sent, clock()) + len(data) / bytes_per_second
            await under_way.put((sent + delay_seconds, data))
            if not data:
                return

    async def deliver() -> None:
        while True:
            due, data = await under_way.get()
            if (wait := due - clock()) > 0:
                await asyncio.sleep(wait)
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(receive())
        tasks.create_task(deliver())


async def serve(host: str, port: int, delay_seconds: float, bytes_per_second: float) -> None:
    """Serve until standard input is closed."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ExceptionGroup):  # either side may drop its connection
            other_reader, other_writer = await asyncio.open_connection(host, port)
            try:
                await asyncio.gather(
                    forward(reader, other_writer, delay_seconds, bytes_per_second),
                    forward(other_reader, writer, delay_seconds, bytes_per_second),
                )
            finally:
                writer.close()
                other_writer.close()

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    """Run the proxy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--delay-ms", type=float, default=10, help="of each direction")
    parser.add_argument("--mb-per-second", type=float, default=float("inf"), help="of each connection and direction")
    args = parser.parse_args()
    host, _, port = args.address.rpartition(":")
    asyncio.run(serve(host, int(port), args.delay_ms / 1e3, args.mb_per_second * 1e6))


if __name__ == "__main__":
    main()
