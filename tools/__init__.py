"""The commands: ckpt-inspect, ckpt-restore, ckpt-import, ckpt-node, ckpt-mount and ckpt-run.

A command parses its options, calls the layers below and prints. Exit codes and messages are in `common`.

Guarantees: a wrong option ends a command with an error before anything is written. Used by people and scripts; no other layer
imports it. Start with the file that has the name of the command; that of ckpt-import is `import_step`.
"""

import ckpt
from ckpt.support.other_package import require_this_package

require_this_package(ckpt)
