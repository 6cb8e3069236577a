"""The drawings of the documents: `python -m docs.site.pictures` writes them into docs/pictures.

What benchmarks measure is drawn elsewhere, by `bench.paper`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
INK, PALE, BLUE, GREEN, ORANGE, RED = (
    "#24292f",
    "#6e7781",
    "#2f6db5",
    "#2c8a4b",
    "#c4671a",
    "#c0392b",
)
FILL = {
    BLUE: "#e3eefa",
    GREEN: "#e2f4e7",
    ORANGE: "#fcefe0",
    RED: "#fbe4e1",
    PALE: "#f3f4f6",
    INK: "#ffffff",
}


class Picture:
    """A drawing of boxes, arrows and words; positions are of pixels, from the upper left corner."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        colour: str = PALE,
        *,
        dashed: bool = False,
    ) -> None:
        """Draw a box with round corners."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" '
            f'fill="{FILL[colour]}" stroke="{colour}" stroke-width="1.5"{dash}/>'
        )

    def words(
        self,
        x: float,
        y: float,
        text: str,
        colour: str = INK,
        *,
        size: float = 14,
        anchor: str = "middle",
        style: str = "",
    ) -> None:
        """Write lines; the first one stands on y."""
        for number, line in enumerate(text.split("\n")):
            self._parts.append(
                f'<text x="{x:g}" y="{y + number * size * 1.3:g}" fill="{colour}" font-size="{size:g}" '
                f'text-anchor="{anchor}"{style} xml:space="preserve">{escape(line)}</text>'
            )

    def title(
        self, x: float, y: float, text: str, colour: str = INK, *, anchor: str = "middle"
    ) -> None:
        """Write a name."""
        self.words(x, y, text, colour, anchor=anchor, style=' font-weight="bold"')

    def code(self, x: float, y: float, text: str, *, size: float = 13) -> None:
        """Write lines of a program."""
        self.words(
            x,
            y,
            text,
            size=size,
            anchor="start",
            style=' font-family="DejaVu Sans Mono, monospace"',
        )

    def arrow(
        self, points: Sequence[tuple[float, float]], colour: str = INK, *, dashed: bool = False
    ) -> None:
        """Draw a line through points, with a head at its end."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash} '
            f'marker-end="url(#head-{colour[1:]})"/>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float, colour: str = PALE) -> None:
        """Draw a thin line."""
        self._parts.append(
            f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{colour}" stroke-width="1"/>'
        )

    def devices(
        self, x: float, y: float, count: int, colour: str = INK, *, size: float = 26
    ) -> None:
        """Draw devices side by side."""
        for number in range(count):
            self.box(x + number * (size + 6), y, size, size, colour)

    def svg(self) -> str:
        """Return the file."""
        heads = "".join(
            f'<marker id="head-{colour[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            f'markerHeight="7" orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="{colour}"/></marker>'
            for colour in FILL
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}" '
            f'viewBox="0 0 {self.width:g} {self.height:g}" font-family="DejaVu Sans, Arial, sans-serif">\n'
            f"<defs>{heads}</defs>\n"
            f'<rect width="{self.width:g}" height="{self.height:g}" rx="10" fill="#ffffff"/>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )


def _host(picture: Picture, x: float, y: float, name: str, count: int, colour: str) -> None:
    """Draw a host of 4 devices, of which the first ones have a colour."""
    picture.box(x, y, 150, 66, PALE)
    picture.words(x + 75, y + 18, name, size=12)
    picture.devices(x + 14, y + 28, count, colour)
    picture.devices(x + 14 + count * 32, y + 28, 4 - count, PALE)


def overview() -> Picture:
    """The picture at the top of the README: a script, its cluster, and what goes between them."""
    picture = Picture(860, 330)
    picture.box(14, 40, 300, 250, INK)
    picture.title(164, 30, "one ordinary Python process")
    picture.code(
        28,
        66,
        "encode = pw.jit(f, devices=a)\n"
        "score  = pw.jit(g, devices=b)\n\n"
        "@pw.program\n"
        "def step(x):\n"
        "    return score(encode(x))\n\n"
        "y = step(x)   # at once\n"
        "print(y)      # waits",
    )
    picture.words(164, 248, "or plain JAX, as it is:", PALE, size=12)
    picture.code(28, 270, "JAX_PLATFORMS=pw python train.py", size=12.5)

    picture.box(384, 110, 110, 110, BLUE)
    picture.title(439, 140, "controller", BLUE)
    picture.words(439, 164, "one order of\nlaunches on\neach island", size=12)
    picture.arrow([(314, 150), (384, 150)], BLUE)
    picture.words(349, 140, "1 message", BLUE, size=11)
    picture.arrow([(384, 185), (314, 185)], PALE, dashed=True)
    picture.words(349, 204, "futures", PALE, size=11)

    for y, name, colour in ((14, "island east", GREEN), (186, "island west", ORANGE)):
        picture.box(560, y, 286, 130, colour)
        picture.title(703, y + 22, name, colour)
        for host in range(2):
            x = 574 + host * 134
            picture.box(x, y + 34, 124, 84, INK)
            picture.words(x + 62, y + 52, f"host {host}", size=12)
            picture.devices(x + 14, y + 66, 3, colour)
    picture.arrow([(494, 140), (527, 140), (527, 80), (560, 80)], BLUE)
    picture.arrow([(494, 190), (527, 190), (527, 250), (560, 250)], BLUE)
    picture.words(521, 62, "gangs", BLUE, size=11)
    picture.arrow([(640, 132), (640, 220)], RED)
    picture.arrow([(766, 132), (766, 220)], RED)
    picture.words(703, 162, "values go from\nhost to host", RED, size=12)
    return picture


def island() -> Picture:
    """Islands, hosts and devices."""
    picture = Picture(720, 190)
    for number, (name, colour) in enumerate((("island east", GREEN), ("island west", ORANGE))):
        x = 14 + number * 362
        picture.box(x, 14, 330, 150, colour)
        picture.title(x + 165, 38, name, colour)
        _host(picture, x + 10, 76, "host 0", 4, colour)
        _host(picture, x + 170, 76, "host 1", 4, colour)
        picture.words(x + 165, 62, "a fast network, XLA's collectives", size=12)
    picture.arrow([(344, 100), (376, 100)], RED)
    picture.arrow([(376, 122), (344, 122)], RED)
    picture.words(360, 184, "an ordinary network", RED, size=12)
    return picture


def slices() -> Picture:
    """Slices of virtual devices, bound to physical ones, which two of them share."""
    picture = Picture(720, 230)
    picture.title(180, 28, "virtual: what a script has")
    picture.title(540, 28, "physical: what the cluster has")
    for y, name, client, colour in (
        (44, "slice 1", "client A", BLUE),
        (110, "slice 2", "client A", ORANGE),
        (176, "slice 3", "client B", RED),
    ):
        picture.words(14, y + 26, f"{name} of {client}", anchor="start", size=12)
        picture.box(140, y, 150, 44, colour)
        picture.devices(154, y + 9, 4 if colour != RED else 2, colour)
    picture.box(440, 44, 190, 176, GREEN)
    picture.title(535, 64, "island east", GREEN)
    _host(picture, 460, 74, "host 0", 4, INK)
    _host(picture, 460, 146, "host 1", 4, INK)
    picture.arrow([(290, 66), (460, 104)], BLUE)
    picture.arrow([(290, 132), (460, 170)], ORANGE)
    picture.arrow([(290, 198), (460, 184)], RED)
    picture.words(640, 174, "two slices\ntake turns", anchor="start", size=12)
    return picture


def program() -> Picture:
    """A program of three computations on two islands, and its edges."""
    picture = Picture(720, 230)
    picture.box(14, 40, 200, 150, INK)
    picture.code(
        26,
        70,
        "@pw.program\ndef step(x):\n    h = encode(x)\n    k = tokens(x)\n    return score(h, k)",
    )
    picture.arrow([(214, 115), (256, 115)])
    picture.words(234, 104, "traced", size=11)
    picture.words(234, 134, "once", size=11)
    picture.box(256, 14, 200, 202, GREEN, dashed=True)
    picture.title(356, 36, "segment on east", GREEN)
    picture.box(512, 14, 194, 202, ORANGE, dashed=True)
    picture.title(609, 36, "segment on west", ORANGE)
    for x, y, name, colour in (
        (290, 60, "encode", GREEN),
        (290, 144, "tokens", GREEN),
        (550, 100, "score", ORANGE),
    ):
        picture.box(x, y, 120, 48, colour)
        picture.words(x + 60, y + 29, name)
    picture.arrow([(410, 84), (550, 114)], RED)
    picture.arrow([(410, 168), (550, 136)], RED)
    picture.words(483, 86, "edge h", RED, size=12)
    picture.words(483, 176, "edge k", RED, size=12)
    return picture


def edge() -> Picture:
    """One edge between two hosts on each side, whose layouts differ."""
    picture = Picture(720, 224)
    for x, name, colour in (
        (14, "slice 1: rows are divided", GREEN),
        (456, "slice 2: columns are divided", ORANGE),
    ):
        picture.title(x + 125, 28, name, colour)
        for host in range(2):
            y = 42 + host * 76
            picture.box(x, y, 250, 66, PALE)
            picture.words(x + 52, y + 38, f"host {host}", size=12)
    for host in range(2):
        y = 52 + host * 76
        picture.box(124, y, 92, 46, INK)
        picture.box(124, y + host * 23, 92, 23, GREEN)
        picture.box(566, y, 92, 46, INK)
        picture.box(566 + host * 46, y, 46, 46, ORANGE)
    for start in (75, 151):
        for end in (75, 151):
            picture.arrow([(264, start), (456, end)], RED)
    picture.words(360, 60, "each sends what others lack", RED, size=12)
    picture.words(
        360, 212, "the receiver says where the bytes go; the controller sees none of them", size=12
    )
    return picture


def lineage() -> Picture:
    """How a lost value comes back: from a replica, and by running again."""
    picture = Picture(720, 220)
    names = (
        ("x", "uploaded", PALE),
        ("a", "checkpointed", BLUE),
        ("b", "lost", RED),
        ("c", "lost", RED),
    )
    for number, (name, note, colour) in enumerate(names):
        x = 40 + number * 180
        picture.box(x, 50, 70, 50, colour, dashed=colour == RED)
        picture.title(x + 35, 80, name, colour)
        picture.words(x + 35, 40, note, colour, size=12)
        if number:
            picture.arrow([(x - 110, 75), (x, 75)], PALE)
            picture.words(x - 55, 66, f"run {number}", PALE, size=12)
    picture.box(195, 150, 120, 44, BLUE)
    picture.words(255, 170, "replica on\nanother host", size=12)
    picture.arrow([(255, 150), (255, 100)], BLUE)
    picture.arrow([(276, 100), (276, 124), (424, 124), (424, 100)], GREEN)
    picture.arrow([(446, 100), (446, 124), (604, 124), (604, 100)], GREEN)
    picture.words(350, 142, "run 2 again", GREEN, size=12)
    picture.words(525, 142, "run 3 again", GREEN, size=12)
    picture.words(500, 190, "run 1 does not run again: its result is in a replica", size=12)
    return picture


DRAWINGS: dict[str, Callable[[], Picture]] = {
    "overview": overview,
    "island": island,
    "slice": slices,
    "program": program,
    "edge": edge,
    "lineage": lineage,
}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (PICTURES / f"{name}.svg").write_text(draw().svg())
        print(f"docs/pictures/{name}.svg")
