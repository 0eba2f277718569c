"""The members of a namespace: their configuration, the connection to each, and what they report.

Guarantees: a member that does not answer is reported as such, and never as one without the data. Used by `records` and the
packages above it; `ckpt`, `recovery` and `tools` use its `config` and its calls to etcd. It imports `placement`. Start with
`config`; `fanout` calls many members at once.
"""
