"""The members of a namespace: from a URL to open members, and what they report of themselves.

It imports `placement`. Start with `config`; `fanout` asks many members at once.
"""
