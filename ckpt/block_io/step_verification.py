"""Read blocks only to verify them: all of a manifest, or those of some rows."""

from __future__ import annotations

from collections.abc import Iterable

from ckpt.block_io.block_reader import BlockReader
from ckpt.block_io.read_plan import BlockRead, RowPiece
from ckpt.block_io.tuned_read_threads import run_reads
from ckpt.format.manifest import Manifest, Row
from ckpt.state.boxes import Box
from ckpt.state.leaves.base import ArrayLeaf, Bytes
from ckpt.storage.base.errors import IntegrityError
from ckpt.storage.base.store import ByteProgress, Store
from ckpt.support.runtime import collector_paused


def verify_blocks(store: Store, manifest: Manifest, where: str, progress: ByteProgress | None = None) -> int:
    """Read every block of a manifest and check it as stored and as decoded; return the number of bytes read."""
    done = 0
    for rows in manifest.in_pack_order():
        with collector_paused():
            blocks: dict[tuple[str | None, int], BlockRead] = {}
            for row in rows:
                if (block := blocks.get((row.pack, row.position))) is None:
                    block = blocks[row.pack, row.position] = BlockRead(row, bypass_cache=True)
                block.pieces.append(RowPiece(row, _NO_DESTINATION, row.box, row.box))
        order = list(blocks.values())

        def work(job: Iterable[BlockRead]) -> None:
            BlockReader(store, manifest.digest_algorithm, where, progress, "whole").verify(job)

        run_reads(store, "whole", order, work)
        done += sum(block.row.whole_read_bytes for block in order)
    return done


def find_bad_blocks(
    store: Store, algorithm: str, rows: Iterable[Row], where: str, progress: ByteProgress | None = None
) -> list[tuple[Row, IntegrityError]]:
    """Read the block of each row and check it as stored and as decoded; return the bad ones with their errors."""
    bad: list[tuple[Row, IntegrityError]] = []  # the threads append without a lock; it is read after they have ended

    def work(job: Iterable[BlockRead]) -> None:
        worker = BlockReader(store, algorithm, where, progress, "whole")
        for block in job:
            try:
                worker.verify([block])
            except IntegrityError as error:
                bad.append((block.row, error))

    run_reads(store, "whole", [BlockRead(row, bypass_cache=True) for row in rows], work)
    return bad


class _NoDestination(ArrayLeaf):
    """The leaf of a piece that is verified and not copied."""

    kind = "none"
    __slots__ = ()

    def read(self, box: Box, out: Bytes) -> None:
        raise AssertionError("never read")

    def write(self, box: Box, data: Bytes) -> None:
        raise AssertionError("never written")


_NO_DESTINATION = _NoDestination()
