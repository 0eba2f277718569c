"""The class Checkpoint, one committed step: reads its manifest, its tree, and its leaves or parts of them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.block_io.block_reader import read_leaves
from ckpt.block_io.read_plan import Target
from ckpt.block_io.replicated_store import from_nearest
from ckpt.block_io.step_verification import verify_blocks
from ckpt.errors import DAMAGE_ADVICE, LeafNotFound, bad_sectors_as_damage, damage_text
from ckpt.format.digest import is_cryptographic
from ckpt.format.dtype_text import plain_dtype
from ckpt.format.json_records import MAX_MANIFEST_BYTES, MAX_TREE_BYTES, CommitRecord, StepFile, require_known_format
from ckpt.format.manifest import Manifest, Saved, join_manifests
from ckpt.format.manifest import decode as decode_manifest
from ckpt.format.pack import step_of_file
from ckpt.format.signature import NO_KEYS, Keys
from ckpt.state.boxes import Box
from ckpt.state.dtype_names import numpy_dtype
from ckpt.state.leaves.numpy import NumpyLeaf
from ckpt.state.name_patterns import suggest
from ckpt.state.rank_tree import array_names, has_rank_nodes, resolve_for_rank
from ckpt.state.tree import Node
from ckpt.state.tree_rebuild import refusing_deep_trees
from ckpt.storage.base.checked_decode import parse_json
from ckpt.storage.base.errors import IntegrityError, NotFound
from ckpt.storage.base.store import ByteProgress, Store
from ckpt.support.runtime import collector_paused


@dataclass(frozen=True, slots=True)
class LeafInfo:
    """One array of a checkpoint, as `Checkpoint.leaves` lists it."""

    name: str
    """The keys from the root of the state to the array, joined by dots."""
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    """Its size in memory."""
    stored_bytes: float
    """Its share of the bytes in the packs, after encoding."""
    codec: str | None
    """The configuration of the codec of its first block; None if that is stored as it is."""
    written_in: int | None
    """The step whose packs contain its first block; an earlier step if this one refers to it. None for an empty array."""


class Checkpoint:
    """A committed step. `ckpt.save`, `repo[10]` and `repo.latest()` return it.

        checkpoint = ckpt.open("/data/run").latest()
        rows = checkpoint["model.embed.weight"][0:8]

    It reads its manifest and tree at the first use. Iterating gives the names of the leaves. `checkpoint[name]` is a
    `LazyArray`; it raises LeafNotFound if the step has no such leaf. All methods that read raise IntegrityError for damaged
    bytes, FormatError for files of a newer version, and StoreError if the store failed.
    """

    def __init__(self, store: Store, commit: CommitRecord, rank: int = 0, keys: Keys = NO_KEYS) -> None:
        self.store = store
        self.commit = commit
        self.step = commit.step
        self._manifest: Manifest | None = None
        self._tree: Node = None
        self._layouts: frozenset[str] = frozenset()
        self._rank = rank
        self._keys = keys

    @property
    def where(self) -> str:
        """The step and its repository, for messages."""
        return f"step {self.step} of {self.store.url}"

    def __repr__(self) -> str:
        return f"Checkpoint(step={self.step}, url={self.store.url!r}, leaves={self.commit.leaves})"

    def manifest(self) -> Manifest:
        """Return the manifest with all rows, verified against the commit record."""
        if self._manifest is None:
            files = self.commit.manifests
            parts = [decode_manifest(self.verified(file), f"{self.store.url}/{file.name}") for file in files]
            self._manifest = join_manifests(parts)
        return self._manifest

    def tree(self) -> Node:
        """Return the state tree of this rank, as JSON values, verified against the commit record.

        The file format (docs/reference/format.md) lists its tags.

        Raises:
            IntegrityError: The tree is missing or damaged.
            FormatError: A newer version has written the tree, or it is nested too deeply.
            StoreError: The store failed.
        """
        if self._tree is None:
            file, data, body = self._parsed_tree()
            with collector_paused(), self._raising_integrity_error(file):
                self._layouts = frozenset(map(str, body.get("layouts", ())))
                self._tree = body["tree"]
                if has_rank_nodes(data):
                    self._tree = resolve_for_rank(self._tree, self._rank, max(1, self.commit.world_size))
        return self._tree

    def tree_of_all_ranks(self) -> Node:
        """Return the state tree with the values of each rank where ranks differ. Raises the errors of `tree`."""
        return self._parsed_tree()[2]["tree"]

    def _parsed_tree(self) -> tuple[StepFile, bytes, dict[str, Any]]:
        """Return the file of the tree, its bytes, and its content, verified against the commit record."""
        if not self.commit.trees:
            raise IntegrityError(f"the record of {self.where} names no tree; {DAMAGE_ADVICE}")
        file = self.commit.trees[0]
        data = self.verified(file)
        with collector_paused(), self._raising_integrity_error(file):
            body: dict[str, Any] = parse_json(data)
            require_known_format(body["format"], f"{self.store.url}/{file.name}")
            _ = body["tree"]
        return file, data, body

    @contextmanager
    def _raising_integrity_error(self, file: StepFile) -> Iterator[None]:
        """Turn the errors of a malformed tree file into IntegrityError, and those of a deep one into FormatError."""
        try:
            with refusing_deep_trees(self.where):
                yield
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise IntegrityError(f"{self.store.url}/{file.name} is not a tree ({error!r}); {DAMAGE_ADVICE}") from error

    def layouts(self) -> frozenset[str]:
        """Return how the save divided its arrays among the ranks (`ArrayLeaf.layout`); empty if no buffer differs by rank.

        Only in a load with these layouts does each rank get its own values of buffers.
        """
        self.tree()
        return self._layouts

    def require_complete(self) -> None:
        """Raise IntegrityError if a tree, of any rank, names an array that no manifest has."""
        saved = self.manifest().leaves()
        self.tree()  # raises if it can't be parsed
        for file in self.commit.trees:
            data = self.verified(file)
            with collector_paused(), self._raising_integrity_error(file):
                missing = next((n for n in array_names(parse_json(data)["tree"]) if n not in saved), None)
            if missing is not None:
                raise IntegrityError(
                    f"leaf {missing} is in the tree of {self.where} but in none of its manifests, so that the step can't be "
                    "loaded; load another step"
                )

    def verified(self, file: StepFile) -> bytes:
        """Return the bytes of a manifest or tree of this step, from the nearest tier in which they match the commit record."""
        return from_nearest(self.store, lambda store: self._read_verified(store, file), file.name)

    def _read_verified(self, store: Store, file: StepFile) -> bytes:
        where = f"{store.url}/{file.name} of step {self.step}"
        try:
            most = MAX_TREE_BYTES if file in self.commit.trees else MAX_MANIFEST_BYTES
            with bad_sectors_as_damage(where):
                data = store.get_up_to(file.name, min(most, file.nbytes))
        except NotFound as error:
            raise IntegrityError(f"{where} is missing; {DAMAGE_ADVICE}") from error
        if not file.matches(data):
            raise IntegrityError(damage_text(where, "its digest is not that of the commit record"))
        return data

    @property
    def protection(self) -> str:
        """How the bytes of this step are checked, as text: "xxh3-128 digests; signed with key 1f3a, signature checked".

        Raises:
            IntegrityError: The manifest is missing or damaged.
            StoreError: The store failed.
        """
        algorithm = self.manifest().digest_algorithm
        if (signature := self.commit.signature) is None:
            against = "" if is_cryptographic(algorithm) else ", which detect accidental damage but no forgery"
            return f"{algorithm} digests{against}; not signed"
        checked = "signature checked" if self._keys else "signature not checked, because no key was given"
        return f"{algorithm} digests; signed with key {signature.key}, {checked}"

    # --- leaves ------------------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Saved]:
        """Return type and shape of each array. The caller must not change the dict."""
        return self.manifest().leaves()

    def leaves(self) -> list[LeafInfo]:
        """Return a `LeafInfo` for every array, in the order of the save.

            sizes = {leaf.name: leaf.nbytes for leaf in checkpoint.leaves()}

        Raises:
            IntegrityError: The manifest is missing or damaged.
            StoreError: The store failed.
        """
        found = []
        for name, first, nbytes, stored in self.manifest().totals():
            step = step_of_file(first.pack) if first.pack is not None else None
            found.append(LeafInfo(name, plain_dtype(first.dtype), first.global_shape, nbytes, stored, first.codec, step))
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest().leaves())

    def __contains__(self, name: object) -> bool:
        return name in self.manifest().leaves()

    def __getitem__(self, name: str) -> LazyArray:
        saved = self.manifest().leaves().get(name)
        if saved is None:
            raise LeafNotFound(f"no leaf {name!r} in {self.where}{suggest(str(name), self)}")
        return LazyArray(self, name, saved)

    def read(self, targets: Sequence[Target], progress: ByteProgress | None = None) -> None:
        """Fill arrays with verified leaves or boxes of leaves. The caller has checked that names and shapes match."""
        read_leaves(self.store, self.manifest(), targets, self.where, progress)

    def verify(self, progress: ByteProgress | None = None) -> int:
        """Read and check every stored byte of the step.

            nbytes = checkpoint.verify()

        progress: a function that is called with the number of bytes just read, from several threads.

        Returns:
            The number of bytes that were read.

        Raises:
            IntegrityError: A block is damaged (the first one found), or the tree names an array that no manifest has.
            StoreError: The store failed.
        """
        self.require_complete()
        return verify_blocks(self.store, self.manifest(), self.where, progress)


class LazyArray:
    """An array in a checkpoint. `Checkpoint[name]` returns it.

        weight = checkpoint["model.embed.weight"]
        weight.shape, weight.dtype, weight[0:8], weight[..., 3], numpy.asarray(weight)

    Indexing with integers, slices and `...` returns a numpy array. It reads only the blocks that the smallest box around the
    index touches. It raises IndexError for other indices and for one out of bounds, IntegrityError for damaged bytes, and
    StoreError if the store failed.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, saved: Saved) -> None:
        self._checkpoint = checkpoint
        self._leaf_manifest: Manifest | None = None
        self.name = name
        self.shape = saved.shape
        self.dtype: np.dtype[Any] = numpy_dtype(saved.dtype)

    def __repr__(self) -> str:
        return f"LazyArray({self.name!r}, shape={self.shape}, dtype={self.dtype})"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without axes")
        return self.shape[0]

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.asarray(self[...], dtype)

    def __getitem__(self, index: object) -> Any:
        checkpoint = self._checkpoint
        if self._leaf_manifest is None:
            manifest = checkpoint.manifest().select([self.name])
            manifest.require_whole_leaves(checkpoint.where)  # before memory for the shape is allocated
            self._leaf_manifest = manifest
        box, within = _bounding_box(index, self.shape)
        out = np.empty(box.shape, self.dtype)
        if out.size:
            target = Target(self.name, NumpyLeaf(out), box)
            read_leaves(checkpoint.store, self._leaf_manifest, [target], checkpoint.where)
        return out[within]


def _bounding_box(index: object, shape: tuple[int, ...]) -> tuple[Box, tuple[slice | int, ...]]:
    """Return the smallest box around a basic index, and the index into that box that selects the same elements."""
    items = list(index) if isinstance(index, tuple) else [index]
    ellipses = [at for at, item in enumerate(items) if item is Ellipsis]  # `==` of an array compares its elements
    given = len(items) - len(ellipses)
    if given > len(shape) or len(ellipses) > 1:
        raise IndexError(f"index {index!r} has more axes than shape {shape}")
    at = ellipses[0] if ellipses else len(items)
    items = items[:at] + [slice(None)] * (len(shape) - given) + items[at + 1 :]
    offset: list[int] = []
    extent: list[int] = []
    within: list[slice | int] = []
    for item, length in zip(items, shape, strict=True):
        if isinstance(item, slice):
            picked = range(*item.indices(length))
            low, high = (min(picked[0], picked[-1]), max(picked[0], picked[-1]) + 1) if picked else (0, 0)
            offset.append(low)
            extent.append(high - low)
            step = picked.step
            within.append(slice(None, None, step) if picked else slice(0, 0))
        else:
            i = _integer_index(item)
            if not -length <= i < length:
                raise IndexError(f"index {i} is out of bounds for an axis of {length}")
            offset.append(i % length)
            extent.append(1)
            within.append(0)
    return Box(tuple(offset), tuple(extent)), tuple(within)


def _integer_index(item: Any) -> int:
    """Return an index as an integer. A bool is not an index: numpy gives it another meaning. Raises IndexError."""
    if not isinstance(item, bool | np.bool_):
        with suppress(TypeError):  # an array has __index__, too, which fails if it has more than one element
            return operator.index(item)
    raise IndexError(f"index {item!r} is neither an integer nor a slice; read a slice and index the result")
