"""transformers imports torchvision, whose operators are built for CUDA."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from cpu_sglang import declare_operators

declare_operators()
