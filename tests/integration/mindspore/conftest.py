"""MindSpore logs warnings of its own deprecations; the tests run without them, on the host."""

import os

os.environ.setdefault("GLOG_v", "3")
