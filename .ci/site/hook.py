"""Hooks of mkdocs: add the generated pages, and point links to files outside docs/ to their pages."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import pages


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are generated from the code."""
    from mkdocs.structure.files import File

    for name, text in pages.all_pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to SECURITY.md and CHANGELOG.md, which pages write as paths in the repository."""
    up = "../" * page.file.src_uri.count("/")
    for file, target in pages.OUTSIDE.items():
        markdown = re.sub(rf"\]\((?:\.\./)*{re.escape(file)}", f"]({up}{target}", markdown)
    return markdown
