"""The names of leaves in an export: `--strip` removes a prefix, and `--rename` replaces by regular expressions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckpt.storage.base.errors import CkptError


@dataclass(frozen=True, slots=True)
class ExportNames:
    """Maps names of a step to names of an export."""

    strip: str = ""
    """Only names that begin with this are exported, without it."""
    rename: tuple[tuple[str, str], ...] = ()
    """Regular expressions and replacements as of `re.sub`, applied one after the other to what `strip` leaves."""

    @property
    def changes(self) -> bool:
        """Whether any name may change."""
        return bool(self.strip or self.rename)

    def selects(self, name: str) -> bool:
        """Return whether a leaf of this name is exported."""
        return name.startswith(self.strip)

    def __call__(self, name: str) -> str:
        """Return the name in the export of a leaf that is selected."""
        new = name.removeprefix(self.strip)
        for pattern, replacement in self.rename:
            new = re.sub(pattern, replacement, new)
        if not new:
            raise CkptError(f"--strip and --rename leave nothing of the name {name}; change them, or leave it out with --only")
        return new


SAME_NAMES = ExportNames()
