"""The contract of a store, and what all stores share: errors, checksums, buffers, direct I/O, fail points.

A store is a flat space of named bytes, written once or replaced whole. Third parties implement `Store`, `Reader` and `Writer`
and prove them with `ckpt.storage.testing.StoreContract`. It imports nothing else of the project. Start with `store`.
"""

from ckpt.storage.base.store import ALIGNMENT as ALIGNMENT
from ckpt.storage.base.store import Buffer as Buffer
from ckpt.storage.base.store import Entry as Entry
from ckpt.storage.base.store import Reader as Reader
from ckpt.storage.base.store import Store as Store
from ckpt.storage.base.store import Writer as Writer
