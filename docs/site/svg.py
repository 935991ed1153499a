"""A few words to draw with: boxes, arrows and text on a white card, as SVG that GitHub and browsers show alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

SANS = "font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\""
MONO = "font-family=\"ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace\""
INK, MUTED, LINE = "#1f2937", "#6b7280", "#4b5563"
# fill and edge
GREY, BLUE, GREEN, AMBER, VIOLET = (
    ("#f3f4f6", "#9ca3af"),
    ("#dbeafe", "#3b82f6"),
    ("#dcfce7", "#16a34a"),
    ("#fef3c7", "#d97706"),
    ("#ede9fe", "#7c3aed"),
)
HEAD = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    f'<path d="M0 0 L8 4 L0 8 z" fill="{LINE}"/></marker></defs>'
)


@dataclass
class Drawing:
    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(
        self, x: float, y: float, w: float, h: float, label: str = "", colour: tuple[str, str] = GREY, *,
        note: str = "", mono: bool = False, size: int = 13, dashed: bool = False,
    ) -> None:  # fmt: skip
        """A rounded box; `label` in its middle, `note` smaller below it."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{min(5, w / 7):g}" '
            f'fill="{colour[0]}" stroke="{colour[1]}"{dash}/>'
        )
        middle = y + h / 2 + size * 0.36
        if label:
            self.text(x + w / 2, middle - (8 if note else 0), label, size=size, mono=mono, anchor="middle")
        if note:
            self.text(x + w / 2, middle + 9, note, size=11, colour=MUTED, anchor="middle")

    def text(
        self, x: float, y: float, words: str, *, size: int = 13, colour: str = INK, mono: bool = False,
        anchor: str = "start", bold: bool = False,
    ) -> None:  # fmt: skip
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{weight} '
            f"{MONO if mono else SANS}>{escape(words)}</text>"
        )

    def arrow(self, *points: tuple[float, float], dashed: bool = False, colour: str = LINE) -> None:
        """Along the points, with a tip at the last."""
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.4"{dash} marker-end="url(#tip)"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str = "#d1d5db") -> None:
        self.parts.append(f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" stroke="{colour}" stroke-width="1" fill="none"/>')

    def svg(self) -> str:
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(self.title)}</title>'
        card = f'<rect width="{self.width}" height="{self.height}" rx="8" fill="#ffffff"/>'
        return "\n".join([head, HEAD, card, *self.parts, "</svg>\n"])
