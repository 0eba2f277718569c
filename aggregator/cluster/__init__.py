"""The members of a namespace: their configuration, the connection to each, and what they report.

It imports `placement`. Start with `config`; `fanout` calls many members at once.
"""
