"""Draws docs/design/save-and-load.svg. Run `python .ci/site/picture.py` after a change; a test compares the two."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "docs/design/save-and-load.svg"

WIDTH, HEIGHT = 960, 430
BLUE, GREEN, RED, TEXT, FAINT = "#34568b", "#2e7d44", "#a8443f", "#1b2a4a", "#44546a"
FONT = "font-family='Helvetica, Arial, sans-serif'"


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle with a title and a line of text. x and y are those of its upper left corner."""

    x: int
    y: int
    width: int
    title: str
    line: str
    color: str = BLUE

    def draw(self) -> str:
        middle = self.x + self.width / 2
        fill = "#eaf7ee" if self.color == GREEN else "#edf2fb"
        return (
            f"<rect x='{self.x}' y='{self.y}' width='{self.width}' height='72' rx='8' fill='{fill}' stroke='{self.color}' "
            f"stroke-width='2'/>\n{words(middle, self.y + 30, self.title, 17, TEXT, bold=True)}\n"
            f"{words(middle, self.y + 54, self.line, 13, FAINT)}"
        )


def words(x: float, y: float, text: str, size: int, color: str, *, bold: bool = False, anchor: str = "middle") -> str:
    """Return a line of text as SVG."""
    look = f"font-size='{size}' fill='{color}' text-anchor='{anchor}' {FONT}" + (" font-weight='bold'" if bold else "")
    return f"<text x='{x:g}' y='{y:g}' {look}>{escape(text)}</text>"


def arrow(x: float, y: float, to_x: float, to_y: float, color: str = BLUE) -> str:
    """Return an arrow from one point to another as SVG."""
    return (
        f"<line x1='{x:g}' y1='{y:g}' x2='{to_x:g}' y2='{to_y:g}' stroke='{color}' stroke-width='2.5' "
        f"marker-end='url(#{color.strip('#')})'/>"
    )


def head(color: str) -> str:
    """Return the definition of the head of arrows of one color as SVG."""
    return (
        f"<marker id='{color.strip('#')}' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' markerHeight='7' orient='auto'>"
        f"<path d='M0,0 L10,5 L0,10 z' fill='{color}'/></marker>"
    )


SAVE = [
    Box(16, 56, 130, "state", "arrays, values"),
    Box(190, 56, 140, "blocks", "at most 8 MiB"),
    Box(374, 56, 140, "memory", "one copy"),
    Box(574, 56, 160, "digest, encode", "writer threads"),
    Box(780, 56, 164, "packs", "durable on disk"),
]
LOAD = [
    Box(16, 312, 150, "newest step", "its commit record", GREEN),
    Box(206, 312, 150, "match", "names, shapes, types"),
    Box(396, 312, 150, "read", "only what is needed"),
    Box(586, 312, 150, "verify", "every block"),
    Box(776, 312, 168, "your arrays", "filled in place"),
]


def picture() -> str:
    """Return the content of the file."""
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}'>",
        "<title>A save goes from the state to packs and a commit record; a load goes the other way</title>",
        f"<defs>{head(BLUE)}{head(GREEN)}{head(RED)}</defs>",
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>",
        words(16, 34, "save", 21, BLUE, bold=True, anchor="start"),
        words(16, 292, "load", 21, BLUE, bold=True, anchor="start"),
    ]
    for row in (SAVE, LOAD):
        parts += [box.draw() for box in row]
        for left, right in zip(row, row[1:], strict=False):
            parts.append(arrow(left.x + left.width + 4, left.y + 36, right.x - 4, right.y + 36))
    parts += [
        f"<line x1='544' y1='48' x2='544' y2='140' stroke='{RED}' stroke-width='2' stroke-dasharray='6 4'/>",
        words(544, 38, "the training continues from here", 13, RED),
        Box(780, 172, 164, "manifest, tree", "rows with digests").draw(),
        Box(574, 172, 160, "commit record", "written last", GREEN).draw(),
        arrow(862, 132, 862, 168),
        arrow(776, 208, 738, 208, GREEN),
        words(556, 204, "now the step exists", 15, GREEN, bold=True, anchor="end"),
        words(556, 224, "a crash before that leaves earlier steps untouched", 13, FAINT, anchor="end"),
        arrow(660, 400, 92, 400, RED),
        words(376, 420, "damaged: file and leaf are named, and the step before is loaded", 13, RED),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    FILE.write_text(picture())
