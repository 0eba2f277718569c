"""Read, verify and merge the parts of all ranks into one step."""

from __future__ import annotations

import hmac
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ckpt.errors import SignatureError, StepRefused
from ckpt.format import json_records
from ckpt.format.digest import digest
from ckpt.groups.base import ranks_text
from ckpt.repository.repository import Repository
from ckpt.saving.buffer_merge import MergedBuffers, merge_buffers
from ckpt.saving.rank_part_files import ListedPart, signed_bytes
from ckpt.saving.replica_check import (
    ReplicaDigest,
    agreed_descriptions,
    missing_copies_text,
    require_equal_replicas,
    require_equal_samples,
)
from ckpt.state.rank_tree import add_own_ranks, keep_stored_arrays, merge_trees
from ckpt.state.tree import Node
from ckpt.storage.base.errors import CkptError, IntegrityError
from ckpt.storage.base.failpoints import failpoint
from ckpt.storage.base.threads import DaemonThreadPool
from ckpt.support import arrow_columns

if TYPE_CHECKING:
    import pyarrow as pa


_READ_THREADS = 8  # parts are read in parallel, because a remote store has a high latency


@dataclass(frozen=True, slots=True)
class MergedStep:
    """A step merged from the parts of all ranks."""

    table: pa.Table
    tree: Node
    packs: dict[str, int]
    """The bytes of each pack, by name."""
    written_bytes: int
    algorithm: str
    part_files: list[str]
    """The files of the parts, which nobody needs after the commit."""
    buffers: MergedBuffers


def merge_parts(repo: Repository, step: int, listed: Sequence[ListedPart]) -> MergedStep:
    """Read, verify and merge the parts; raise StepRefused if they do not make a complete step.

    Raises SignatureError for a part that no key of rank 0 has signed, and IntegrityError for a damaged part.
    """
    with _naming_step(step), _refusing_unknown_parts():
        return _merge_parts(repo, listed)


@contextmanager
def _naming_step(step: int) -> Iterator[None]:
    """Add the number of the step to the message of StepRefused."""
    try:
        yield
    except StepRefused as error:
        raise StepRefused(f"step {step}: {error}") from None


@contextmanager
def _refusing_unknown_parts() -> Iterator[None]:
    """Turn the errors of parts of another structure into StepRefused. The parts themselves are verified."""
    try:
        yield
    except CkptError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StepRefused(
            f"the parts of the ranks can't be merged ({error!r}); run the same version of ckpt-store on all ranks"
        ) from error


def _merge_parts(repo: Repository, listed: Sequence[ListedPart]) -> MergedStep:
    from ckpt.saving.manifest_merge import merge_rows

    failpoint("ranks.merge")
    tables = _read_parts(repo, listed)
    trees: dict[str, tuple[list[int], Node]] = {}
    packs: dict[str, int] = {}
    written = 0
    algorithms: dict[str, int] = {}
    sizes: dict[str, int] = {}
    description_texts: dict[str, int] = {}
    sharer_texts: dict[str, list[int]] = {}
    verify: dict[str, list[int]] = {}
    copies: list[tuple[int, list[ReplicaDigest]]] = []
    samples: dict[tuple[str, str], list[int]] = {}
    buffer_texts: list[tuple[int, str]] = []
    for part, table in zip(listed, tables, strict=True):
        metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
        if metadata["tree"] in trees:
            trees[metadata["tree"]][0].append(part.rank)
        else:
            trees[metadata["tree"]] = ([part.rank], json.loads(metadata["tree"])["tree"])
        packs.update(json.loads(metadata["packs"]))
        written += int(metadata["written_bytes"])
        algorithms.setdefault(metadata["digest"], part.rank)
        sizes.setdefault(metadata["world_size"], part.rank)
        description_texts.setdefault(metadata["held"], part.rank)
        sharer_texts.setdefault(metadata["sharers"], []).append(part.rank)
        verify.setdefault(metadata.get("verify", "false"), []).append(part.rank)
        copies.append((part.rank, [ReplicaDigest(*one) for one in json.loads(metadata.get("copies", "[]"))]))
        samples.setdefault((metadata["held"], metadata.get("samples", "")), []).append(part.rank)
        buffer_texts.append((part.rank, metadata.get("buffers", "")))
    ranks = [part.rank for part in listed]
    _require_same_value("uses the digest", algorithms)
    _require_same_value("has the group size", sizes)
    _require_same_verify(verify)
    descriptions = agreed_descriptions(description_texts)
    require_equal_replicas(copies)
    # Checked before the boxes, because a missing replica may leave a gap in any leaf.
    if cause := missing_copies_text(sharer_texts, lambda names: _ranks_storing(names, ranks, tables)):
        raise StepRefused(cause)
    require_equal_samples(samples)
    buffers = merge_buffers(buffer_texts)
    rows = [(rank, table.replace_schema_metadata(None)) for rank, table in zip(ranks, tables, strict=True)]
    table = merge_rows(rows, descriptions, buffers.left_out)
    tree = add_own_ranks(keep_stored_arrays(merge_trees(list(trees.values())), _leaf_names(table)), buffers.ranks)
    return MergedStep(
        table=table,
        tree=tree,
        packs=packs,
        written_bytes=written,
        algorithm=next(iter(algorithms)),
        part_files=[part.name for part in listed],
        buffers=buffers,
    )


def _read_parts(repo: Repository, listed: Sequence[ListedPart]) -> list[pa.Table]:
    """Read the tables of the parts with several threads."""
    with DaemonThreadPool(min(_READ_THREADS, len(listed) or 1), "ckpt-parts") as pool:
        return list(pool.map(lambda part: _read_part(repo, part), listed))


def _read_part(repo: Repository, part: ListedPart) -> pa.Table:
    from ckpt.format.manifest_parquet import read_part

    where = f"{repo.url}/{part.name}"
    data = repo.store.get_up_to(part.name, json_records.MAX_PART_BYTES)
    stem, _, code = part.name.removesuffix(".arrow").rpartition("-")
    is_signed = len(code) == 64
    if is_signed and not repo.keys:
        raise StepRefused(f"rank {part.rank} signs with a key, and rank 0 has none; give all ranks the same key")
    if not is_signed and repo.keys:
        raise SignatureError(f"{where} has no signature: rank {part.rank} has no key; give all ranks the same key")
    signer = next((key for key in repo.keys if hmac.compare_digest(key.code("part", signed_bytes(stem, data)), code)), None)
    if is_signed and signer is None:
        raise SignatureError(
            f"{where} is not signed with a key of rank 0: rank {part.rank} has another key, or the file was changed; give all "
            "ranks the same key, and save the step again"
        )
    if not is_signed and digest("xxh3-128", data).hex() != code:
        raise IntegrityError(f"{where} is damaged: its digest is not that of its name; save the step again")
    return read_part(data, where)


def _require_same_value(what: str, rank_by_value: dict[str, int]) -> None:
    if len(rank_by_value) > 1:
        (a, first), (b, second) = list(rank_by_value.items())[:2]
        raise StepRefused(f"rank {first} {what} {a}, rank {second} {b}; every rank must save with the same options")


def _require_same_verify(ranks_by_option: Mapping[str, Sequence[int]]) -> None:
    """Raise StepRefused if verify_replicas differs between ranks: digests can be compared only if all ranks made the same."""
    if len(ranks_by_option) > 1:
        options = sorted(ranks_by_option.items(), reverse=True)
        chosen = ", ".join(f"{json.loads(option)} on {ranks_text(ranks)}" for option, ranks in options)
        raise StepRefused(f"verify_replicas={chosen}; every rank must save with the same options")


def _ranks_storing(names: Collection[str], ranks: Sequence[int], tables: Sequence[pa.Table]) -> dict[str, set[int]]:
    """Return, for each of these leaves, the ranks that have stored a part of it."""
    found: dict[str, set[int]] = {}
    for rank, table in zip(ranks, tables, strict=True):
        for name in _leaf_names(table) & set(names):
            found.setdefault(name, set()).add(rank)
    return found


def _leaf_names(table: pa.Table) -> set[str]:
    return set(arrow_columns.compute_function("unique", table["leaf"]).to_pylist())


def totals(table: pa.Table) -> tuple[int, int]:
    """Return the number of leaves of a merged table, and their bytes."""
    return len(_leaf_names(table)), int(np.sum(arrow_columns.numpy_array(table["nbytes"])))


def require_complete_leaves(data: bytes, tree: Node, step: int, where: str) -> int:
    """Return the bytes of the leaves of a single process; raise StepRefused if its shards do not make whole leaves."""
    from ckpt.format.manifest import read_table
    from ckpt.saving.manifest_merge import merge_rows

    with _naming_step(step):
        table = merge_rows([(0, read_table(data, where))])
        keep_stored_arrays(tree, _leaf_names(table))
    return totals(table)[1]
