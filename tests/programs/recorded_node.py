"""`python recorded_node.py LEFT_OUT OPTIONS`: ckpt-node with these options, in which a function makes nothing durable.

LEFT_OUT: see `helpers.crash_states.leave_out`; "nothing" changes nothing.
"""

from __future__ import annotations

import sys

from helpers.crash_states import leave_out

from ckpt.storage.base import fsync
from ckpt.storage.local import directory, durable_writer
from ckpt.storage.member import device
from ckpt.storage.registers import sqlite
from ckpt.tools.node import main

leave_out(sys.argv.pop(1), directory, durable_writer, fsync, device, sqlite)
main()
