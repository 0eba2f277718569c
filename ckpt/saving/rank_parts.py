"""The rank parts: files in the store by which the ranks of a group make one step, which rank 0 commits.

A part is a file `steps/<step>/part/<rank>-<generation>-<serial>-<number>-<digest>.arrow`. It contains the manifest rows of the
rank, with its tree and its packs in the metadata. It is written when those packs are durable. Rank 0 waits for the parts of all
ranks, of its own generation and of the same attempt, merges them and commits. The others wait for the commit record. A rank
that fails writes `…-failed.json` with the reason instead, so that the committer stops waiting for it. From rank 0, that file
means that the attempt is abandoned. The same report goes through the group as a note, because the store itself may fail.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ckpt.errors import StepRefused
from ckpt.format.digest import digest
from ckpt.format.pack import file_lengths
from ckpt.repository.attempt import Attempt
from ckpt.repository.group_lease import GroupLease
from ckpt.repository.repository import Repository
from ckpt.saving.rank_part_files import part_stem, signed_bytes
from ckpt.saving.replica_check import PublishedDigests, describe_leaves, describe_sharers
from ckpt.state.tree import FlatState
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.store import Store


def part_metadata(
    tree: bytes, flat: FlatState, packs: Mapping[str, int], written_bytes: int, lease: GroupLease, digests: PublishedDigests
) -> dict[str, str]:
    """Return the metadata of a part: the tree, descriptions of the leaves, the packs and the digests of replicas."""
    return {
        "tree": tree.decode(),
        "held": describe_leaves(flat),
        "sharers": describe_sharers(flat),
        "packs": json.dumps(dict(packs)),
        "written_bytes": str(written_bytes),
        "world_size": str(lease.size),
        **digests.metadata(flat),
    }


def publish_part(repo: Repository, attempt: Attempt, table: bytes) -> None:
    """Write a part into the store. The packs that it names must be durable."""
    failpoint("ranks.part")
    stem = part_stem(attempt)
    signature = repo.keys.sign("part", signed_bytes(stem, table))
    named = digest("xxh3-128", table).hex() if signature is None else signature.hmac_sha256
    repo.store.put(f"{stem}-{named}.arrow", table)


def require_packs(store: Store, step: int, packs: Mapping[str, int]) -> None:
    """Raise StepRefused if a pack that the step would name is missing or has another length."""
    stored_bytes = file_lengths(store, packs)
    for name, nbytes in packs.items():
        if stored_bytes.get(name) != nbytes:
            raise StepRefused(
                f"step {step} refers to {store.url}/{name}, which is missing or has another length; save the step again"
            )
