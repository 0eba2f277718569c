"""Checks a built site: a browser that shows it fetches nothing from another host."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

FETCHED = {
    "link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src",
    "object": "data", "embed": "src", "image": "href", "use": "href",
}  # fmt: skip
"""Tags whose attribute a browser fetches by itself. What `a` names is fetched when a reader asks for it."""


class _Fetched(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link" and given.get("rel") in ("canonical", "next", "prev", "alternate"):
            return
        if (url := given.get(FETCHED.get(tag, ""))) is not None:
            self.found.append(url)
        self.found += re.findall(r"url\(([^)]+)\)", given.get("style") or "")


def foreign(site: Path) -> Iterator[str]:
    """What a browser would fetch from elsewhere: by page."""
    for page in sorted(site.rglob("*.html")):
        parser = _Fetched()
        parser.feed(page.read_text())
        yield from (f"{page}: {url}" for url in parser.found if _elsewhere(url))
    for sheet in sorted(site.rglob("*.css")):
        urls = re.findall(r"(?:url\(|@import )[\"']?([^)\"']+)", sheet.read_text())
        yield from (f"{sheet}: {url}" for url in urls if _elsewhere(url))


def _elsewhere(url: str) -> bool:
    return url.startswith(("http:", "https:", "//"))


def main() -> None:
    found = list(foreign(Path(sys.argv[1])))
    print("\n".join(found), end="\n" if found else "")
    sys.exit(f"{len(found)} things would be fetched from another host" if found else 0)


if __name__ == "__main__":
    main()
