"""All steps of one run under one URL: which exist, what each holds, which are kept, and who may write.

It promises that a committed step is whole or named as damaged, that two writers never mix their steps, and that nothing is
deleted on the strength of a record that could not be read. It imports `block_io`, `groups` and what is below. Start with
`repository`, then `writer_lease` and `retention`.
"""
