"""The records of paths, each agreed by its replica set, and the record ring that defines the replica sets.

Guarantees: an acknowledged record is never lost or replaced by an older one while a quorum of its replica set has its
registers. Used by `file_io` and the packages above it; it imports `cluster` and `placement`. Start with `paxos`, then
`record_ring`, `namespace_records` and `file_record`. `ring_change` moves the records to other members; `tombstone_collection`
removes those of deleted files.
"""
