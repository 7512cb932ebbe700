"""Draws the pictures of the documentation: ``python docs/pictures/draw.py``.

A picture follows the color scheme of the page and has a background of its own, so it can be read on any page. The
figures of the chart are read from docs/benchmarks.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
BENCHMARKS = FOLDER.parent / "benchmarks.md"

STYLE = """
.back { fill: #ffffff } .ink { fill: #1d2430 } .soft { fill: #5a6473 }
.line { stroke: #8a93a3; stroke-width: 1.3; fill: none } .tip { fill: #8a93a3 }
.cell { fill: #eef1f5; stroke: #b4bcc9 } .ours { fill: #009688 } .peer { fill: #b4bcc9 }
.a { fill: #cdeae6; stroke: #5bb3a8 } .b { fill: #dbe4fb; stroke: #8ba3df } .end { fill: #fbdcc0; stroke: #dd9656 }
.none { fill: none; stroke: #b4bcc9; stroke-dasharray: 4 3 } .link { stroke: #00796b; stroke-width: 1.6; fill: none }
.linktip { fill: #00796b }
text { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 13.5px }
.small { font-size: 12px } .big { font-size: 15px; font-weight: 600 } .code { font-family: ui-monospace, monospace }
@media (prefers-color-scheme: dark) {
.back { fill: #22252f } .ink { fill: #e8eaf0 } .soft { fill: #a9b1c0 }
.line { stroke: #7d8798 } .tip { fill: #7d8798 }
.cell { fill: #2f3440; stroke: #566071 } .ours { fill: #26a69a } .peer { fill: #566071 }
.a { fill: #17504a; stroke: #3d9c91 } .b { fill: #2c3a66; stroke: #6f87c9 } .end { fill: #6a4220; stroke: #d08c4e }
.none { stroke: #566071 } .link { stroke: #4db6ac } .linktip { fill: #4db6ac }
}
"""


class Picture:
    """An SVG picture that is drawn from the back to the front."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="back" width="{width}" height="{height}" rx="8"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, kind: str = "cell", text: str = "") -> None:
        """A rectangle, with a text in its middle."""
        self._parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>')
        if text:
            self.text(x + width / 2, y + height / 2 + 4.5, text, anchor="middle")

    def text(self, x: float, y: float, text: str, kind: str = "ink", anchor: str = "start") -> None:
        """One line of text; y is its base line."""
        self._parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, bend: float = 0, kind: str = "line") -> None:
        """An arrow; ``bend`` moves the middle of it up."""
        middle_x, middle_y = (x1 + x2) / 2, (y1 + y2) / 2 - 2 * bend
        dx, dy = x2 - middle_x, y2 - middle_y
        length = (dx * dx + dy * dy) ** 0.5
        dx, dy = dx / length, dy / length
        tip = "linktip" if kind == "link" else "tip"
        self._parts.append(
            f'<path class="{kind}" d="M{x1:g} {y1:g} Q{middle_x:g} {middle_y:g} {x2 - 5 * dx:.1f} {y2 - 5 * dy:.1f}"/>'
            f'<path class="{tip}" d="M{x2:g} {y2:g} L{x2 - 8 * dx - 4 * dy:.1f} {y2 - 8 * dy + 4 * dx:.1f} '
            f'L{x2 - 8 * dx + 4 * dy:.1f} {y2 - 8 * dy - 4 * dx:.1f} Z"/>'
        )

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])


def path_of_the_data() -> Picture:
    """From environments to the learner."""
    picture = Picture(640, 216, "The path of the data: environments, a storage, a learner")
    for i in range(3):
        picture.box(16, 58 + 42 * i, 108, 32, "b", f"environment {i}")
        picture.arrow(126, 74 + 42 * i, 192, 74 + 42 * i)
    picture.text(158, 48, "add", "ink code", "middle")
    picture.text(328, 30, "storage", "ink big", "middle")
    picture.box(194, 42, 268, 142, "none")
    for lane in range(3):
        for t in range(8):
            kind = "end" if (lane, t) in {(0, 4), (2, 2)} else "a"
            picture.box(202 + 32 * t, 58 + 42 * lane, 28, 32, kind)
    picture.text(328, 203, "a lane for each environment, a row for each step", "soft small", "middle")
    picture.arrow(464, 92, 542, 92)
    picture.text(503, 82, "sample", "ink code", "middle")
    picture.arrow(542, 140, 464, 140)
    picture.text(503, 160, "update", "ink code", "middle")
    picture.box(544, 58, 80, 116, "b", "learner")
    return picture


def lanes_and_rows() -> Picture:
    """Rows of lanes, and the cursor of a ring."""
    picture = Picture(640, 250, "Lanes and rows: a storage of three environments with room for eight steps each")
    picture.text(16, 30, "time", "soft")
    for t in range(8):
        picture.text(110 + 66 * t, 30, str(t if t > 2 else t + 8), "soft", "middle")
    for lane in range(3):
        picture.text(16, 66 + 44 * lane, f"lane {lane}", "ink")
        for t in range(8):
            time = t if t > 2 else t + 8
            picture.box(80 + 66 * t, 44 + 44 * lane, 60, 36, "a" if t > 2 else "b", str(3 * time + lane))
    picture.arrow(308, 202, 308, 174, kind="link")
    picture.text(308, 220, "the next step goes here,", "soft", "middle")
    picture.text(308, 238, "over the oldest", "soft", "middle")
    picture.box(446, 205, 18, 14, "b")
    picture.text(474, 217, "the newest rows", "soft")
    picture.box(446, 226, 18, 14, "a")
    picture.text(474, 238, "older rows", "soft")
    return picture


def episode_ends() -> Picture:
    """One lane with both ends and their reset steps."""
    picture = Picture(640, 186, "The ends of episodes in one lane, with the next-step autoreset of Gymnasium")
    kinds = ["a", "a", "end", "none", "b", "b", "end", "none", "a"]
    for t, kind in enumerate(kinds):
        picture.box(20 + 68 * t, 46, 60, 40, kind, f"o{t}")
    picture.text(20, 30, "first episode", "ink big")
    picture.text(292, 30, "second episode", "ink big")
    picture.text(564, 30, "third", "ink big")
    for t, end in ((2, "terminated"), (6, "truncated")):
        picture.text(50 + 68 * t, 106, end, "ink", "middle")
        picture.text(56 + 68 * (t + 1), 106, "reset", "soft", "middle")
    picture.text(186, 130, "no bootstrap", "soft", "middle")
    picture.arrow(526, 114, 458, 114, -14, kind="link")
    picture.text(492, 152, "bootstrap from V(o7),", "soft", "middle")
    picture.text(492, 170, "the final observation", "soft", "middle")
    return picture


def one_copy() -> Picture:
    """The next observation of a row is the observation of the row after it."""
    picture = Picture(640, 246, "One copy of an observation: the next observation is that of the next row")
    picture.text(16, 72, "rows", "ink")
    kinds = ["a", "a", "a", "end", "b", "b", "b", "none"]
    for t, (name, kind) in enumerate(zip(["o0", "o1", "o2", "o3", "p0", "p1", "p2", "p3"], kinds, strict=True)):
        x = 90 + 68 * t
        picture.box(x, 48, 58, 38, kind, name)
        picture.text(x + 29, 104, "?" if kind == "none" else f"a{t}, r{t}", "soft", "middle")
        if kind not in ("end", "none"):
            picture.arrow(x + 33, 46, x + 93, 46, 9, kind="link")
    picture.text(90, 24, "next observation", "soft")
    picture.text(16, 146, "episodes", "ink")
    picture.box(90, 124, 262, 34, "none", "rows 0 to 3, truncated")
    picture.box(362, 124, 194, 34, "none", "from row 4, open")
    picture.text(16, 208, "kept apart", "ink")
    picture.arrow(323, 112, 323, 182, kind="link")
    picture.box(294, 184, 58, 38, "end", "o4")
    picture.text(362, 208, "final observation", "soft")
    return picture


def speed() -> Picture:
    """The time of rlstore beside that of other libraries."""
    tables = dict(_tables(BENCHMARKS.read_text()))
    ppo = tables["PPO 2048 x 8, observations 17, actions 6, ten epochs of mini-batches of 64"]["whole cycle"]
    replay = tables["Replay of 1M transitions, observations 17, actions 6"]["sample 256 of one environment"]
    by_priority = tables["Prioritized replay of 1M transitions, observations 17, actions 6"]["both"]
    pixels = tables["Replay of 20,000 transitions, observations 4 x 84 x 84 in uint8"]["sample 256"]
    picture = Picture(640, 384, "Time of rlstore and of other libraries; shorter is better")
    picture.text(16, 30, "Time, shorter is better", "ink big")
    picture.text(16, 50, "CPU, one thread. Method and all other rows: Benchmarks", "soft small")
    panels = (
        ("PPO: a whole cycle, 2048 x 8 steps", ppo, 1000, "ms"),
        ("Replay: sample 256 of 1M", replay, 1, "us"),
        ("By priority: sample 256 of 1M, and update", by_priority, 1, "us"),
        ("Pixels 4 x 84 x 84: sample 256", pixels, 1000, "ms"),
    )
    for number, (title, times, divisor, unit) in enumerate(panels):
        x, y = 16 + 316 * (number % 2), 80 + 156 * (number // 2)
        picture.text(x, y, title, "ink")
        named = {name: time / divisor for name, time in times.items() if not name.startswith(("memcpy", "rlstore,"))}
        longest = max(named.values())
        for place, (name, time) in enumerate(sorted(named.items(), key=lambda item: item[1])):
            top = y + 10 + 20 * place
            picture.text(x + 58, top + 12, name, "soft small", "end")
            width = max(1.5, 160 * time / longest)
            picture.box(x + 66, top, width, 15, "ours" if name == "rlstore" else "peer")
            picture.text(x + 72 + width, top + 12, f"{time:.3g} {unit}", "ink small")
    return picture


def _tables(text: str) -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    """The heading of each table in the results, and what it says: work, contender, microseconds."""
    for heading, table in re.findall(r"^### (.*)\n\nMicroseconds;.*\n\n((?:\|.*\n)+)", text, flags=re.MULTILINE):
        head, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
        yield (
            heading,
            {
                line[0]: {
                    name: float(cell.replace(",", "")) for name, cell in zip(head[1:], line[1:], strict=True) if cell
                }
                for line in lines
            },
        )


PICTURES = {
    "path.svg": path_of_the_data,
    "lanes.svg": lanes_and_rows,
    "ends.svg": episode_ends,
    "once.svg": one_copy,
    "speed.svg": speed,
}

if __name__ == "__main__":
    for file, draw in PICTURES.items():
        (FOLDER / file).write_text(str(draw()))
