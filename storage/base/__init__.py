"""The interface of a store, and what all stores share: errors, checksums, buffers, direct I/O, fail points.

Guarantees: a store is a flat space of named objects, each written once or replaced as a whole. Used by all packages, and by
third parties, which implement `Store`, `Reader` and `Writer` and test them with `ckpt.storage.testing.StoreContract`. It
imports nothing else of the project. Start with `store`.
"""

from ckpt.storage.base.store import ALIGNMENT as ALIGNMENT
from ckpt.storage.base.store import Buffer as Buffer
from ckpt.storage.base.store import Entry as Entry
from ckpt.storage.base.store import Reader as Reader
from ckpt.storage.base.store import Store as Store
from ckpt.storage.base.store import Writer as Writer
