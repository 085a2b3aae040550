"""Draws the rooms of moe_optim by floor, and the imports between them.

    python -m tools.import_graph [FILE.svg | FILE.png]

Boxes show the lines of a room. Arrows lead from importer to imported and widen with the number of
file pairs: grey downwards, orange between neighbours of a floor, red upwards.
"""

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from tools.rooms import FLOORS, ORDER, own_imports, room_of, sources

WIDTH, HEIGHT = 17.0, 1.35
"""Width of the drawing and height of a floor, in inches."""
COLOURS = {"down": "#9aa7b5", "neighbours": "#e08a1e", "up": "#cc2222"}


def count_lines() -> Counter[str]:
    """Return room -> lines."""
    lines: Counter[str] = Counter()
    for path in sources():
        lines[room_of(path)] += path.read_text(encoding="utf-8").count("\n")
    return lines


def count_imports() -> Counter[tuple[str, str]]:
    """Return (room, imported room) -> number of file pairs."""
    imports: Counter[tuple[str, str]] = Counter()
    for path in sources():
        for other in own_imports(path):
            if room_of(path) != room_of(other):
                imports[room_of(path), room_of(other)] += 1
    return imports


def place_rooms(lines: Counter[str]) -> dict[str, tuple[float, float]]:
    """Return room -> center of its box, the lowest floor at the bottom."""
    places = {}
    for floor, line in enumerate(ORDER):
        rooms = [room for room in line.split() if room in lines]
        for number, room in enumerate(rooms):
            shift = 0.12 * (-1) ** floor  # staggered, because columns of boxes would hide arrows
            places[room] = (WIDTH * ((number + 0.5) / len(rooms) + shift / 4), HEIGHT * floor)
    return places


def draw(path: Path) -> None:
    """Draw the graph into a file."""
    from matplotlib.figure import Figure

    lines, imports = count_lines(), count_imports()
    places = place_rooms(lines)
    figure = Figure(figsize=(WIDTH, HEIGHT * len(ORDER)), layout="constrained")
    axes: Any = figure.add_subplot()
    axes.set_axis_off()
    axes.set_xlim(-0.5, WIDTH + 0.5)
    axes.set_ylim(-HEIGHT, HEIGHT * len(ORDER))
    for (room, other), count in sorted(imports.items(), key=lambda item: -item[1]):
        _draw_arrow(axes, places[room], places[other], _direction(room, other), count)
    for room, (x, y) in places.items():
        text = f"{'moe_optim' if room == '.' else room}\n{lines[room]:,}"
        box = {"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": "#334455"}
        axes.text(x, y, text, ha="center", va="center", fontsize=10, bbox=box, zorder=3)
    figure.suptitle(
        f"{sum(lines.values()):,} lines in {len(lines)} rooms on {len(ORDER)} floors, "
        f"{len(imports)} arrows for {sum(imports.values()):,} imports of files"
    )
    figure.savefig(path)


def _direction(room: str, other: str) -> str:
    if FLOORS[other] == FLOORS[room]:
        return "neighbours"
    return "down" if FLOORS[other] < FLOORS[room] else "up"


def _draw_arrow(
    axes: Any, start: tuple[float, float], end: tuple[float, float], direction: str, count: int
) -> None:
    bend = 0.25 if direction == "neighbours" else 0.06
    style = {
        "arrowstyle": "-|>",
        "color": COLOURS[direction],
        "alpha": 0.45 if direction == "down" else 0.9,
        "linewidth": 0.5 + 0.7 * count**0.5,
        "connectionstyle": f"arc3,rad={bend}",
        "shrinkA": 14,
        "shrinkB": 16,
    }
    axes.annotate("", xy=end, xytext=start, arrowprops=style, zorder=1)


def main() -> None:
    """Run from a command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.import_graph", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", nargs="?", type=Path, default=Path("build/rooms.svg"))
    path = parser.parse_args().file
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(path)
    print(path)


if __name__ == "__main__":
    main()
