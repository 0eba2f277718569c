"""The record of each path, agreed by a majority of the members that keep it, and the ring that says which members those are.

It promises that a record which was acknowledged is never lost or replaced by an older one, whatever fails. It imports
`cluster`. Start with `paxos`, then `record_ring`, `namespace_records` and `file_record`. `ring_change` lets other members keep
the records; `record_collection` removes those of deleted files.
"""
