"""The diagrams of a report: blocks and their tables, the queue in time, shares of work."""

from collections.abc import Sequence
from typing import Any

from billfish.compare.figures import Figure, say
from billfish.compare.svg import mark, svg, text

Json = dict[str, Any]


def blocks(picture: Json, width: float) -> str:
    """Block tables above, the pool below, a line from each place to its block."""
    size = int(picture["block_size"])
    longest = max(len(r["table"]) for r in picture["requests"])
    wide = width > 500
    per_row = 12 if wide else 8
    name, gap = 46, 5
    cell = (width - name - 12) / longest - gap
    height, row = (34, 58) if wide else (32, 54)
    parts: list[str] = [
        text(0, 14, "block tables: logical blocks, in order", "start", "small-title")
    ]
    pool_top = 34 + row * len(picture["requests"]) + (54 if wide else 44)
    box = (width - gap * (per_row - 1)) / per_row
    tall = 46 if wide else 42
    at = {}
    for block in range(1, int(picture["num_blocks"]) + 1):
        column, line = (block - 1) % per_row, (block - 1) // per_row
        at[block] = (column * (box + gap), pool_top + line * (tall + gap))
    lines, boxes = [], []
    for number, request in enumerate(picture["requests"]):
        y = 30 + row * number
        boxes.append(text(0, y + height / 2 + 5, request["name"], "start", f"request r{number}"))
        for place, block in enumerate(request["table"]):
            x = name + place * (cell + gap)
            filled = min(size, max(0, int(request["tokens"]) - place * size))
            boxes.append(_logical(request, place, block, x, y, cell, height, filled, size, number))
            bx, by = at[int(block)]
            lines.append(
                f'<path d="M{x + cell / 2:.1f} {y + height}C{x + cell / 2:.1f} {y + height + 46},'
                f'{bx + box / 2:.1f} {by - 42},{bx + box / 2:.1f} {by}" class="wire r{number}"/>'
            )
    parts += lines + boxes
    parts.append(text(0, pool_top - 9, "physical blocks, in the pool", "start", "small-title over"))
    for block, (x, y) in at.items():
        parts.append(_physical(picture, block, x, y, box, tall))
    bottom = max(y for _, y in at.values()) + tall + 2
    return svg(
        width, bottom, "".join(parts), "Block tables of three sequences, and the pool of blocks"
    )


def _logical(
    request: Json,
    place: int,
    block: Figure,
    x: float,
    y: float,
    cell: float,
    height: float,
    filled: int,
    size: int,
    number: int,
) -> str:
    slot = (cell - 8) / size
    inside = (
        f'<rect x="{x:.1f}" y="{y}" width="{cell:.1f}" height="{height}" rx="5" '
        f'class="logical r{number}"/>'
    )
    for token in range(size):
        kind = "slot full" if token < filled else "slot"
        inside += (
            f'<rect x="{x + 4 + token * slot:.1f}" y="{y + height - 11}" width="{slot - 2:.1f}" '
            f'height="6" rx="1.5" class="{kind} r{number}"/>'
        )
    inside += text(x + cell / 2, y + 16, f"→ {int(block)}", "middle", "id")
    said = say(
        f"{request['name']}, logical block {place}: physical block {{}}; "
        f"{{}} tokens in the request",
        block,
        request["tokens"],
    )
    return mark(inside, said)


def _physical(picture: Json, block: int, x: float, y: float, box: float, tall: float) -> str:
    state, references = picture["state"][block], picture["references"][block]
    holders = [
        n for n, r in enumerate(picture["requests"]) if block in [int(b) for b in r["table"]]
    ]
    kind = f"physical {state}"
    inside = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{box:.1f}" height="{tall}" rx="5" class="{kind}"/>'
    )
    part = (box - 8) / max(1, len(holders))
    for order, number in enumerate(holders):
        inside += (
            f'<rect x="{x + 4 + order * part:.1f}" y="{y + tall - 12:.1f}" width="{part - 2:.1f}" '
            f'height="8" rx="2" class="slot full r{number}"/>'
        )
    inside += text(x + box / 2, y + 18, str(block), "middle", "id tick")
    names = " and ".join(picture["requests"][n]["name"] for n in holders)
    words = {
        "used": f"held by {names}, {{}} references",
        "cached": "cached, {} references: its content may be found again",
        "free": "free, {} references",
    }
    return mark(inside, say(f"block {block}: " + words[state], references))


LANES = {"load": "loads (TMA)", "dequantize": "dequantize", "multiply": "tensor cores"}


def timeline(picture: Json, width: float) -> str:
    """Loads, dequantization and products in time: with a deep queue, and with one stage."""
    end = max(picture["with"]["end"], picture["without"]["end"])
    wide = width > 500
    left = 108 if wide else 0
    parts, y = [], 8.0
    for key, words in (
        ("with", "stages in the ring, double buffering"),
        ("without", "stage, one thing after the other"),
    ):
        run = picture[key]
        said = say(f"{{}} {words}: the last product ends at {{}}", run["depth"], run["end"])
        parts.append(
            mark(text(0, y + 12, f"{int(run['depth'])} {words}", "start", "small-title tick"), said)
        )
        y += 24
        lanes: list[tuple[str, int | None]] = [
            ("load", stage) for stage in range(int(run["depth"]))
        ]
        lanes += [("dequantize", None), ("multiply", None)]
        for lane, stage in lanes:
            label = LANES[lane] if stage is None else f"stage {stage}"
            if wide:
                parts.append(text(left - 10, y + 14, label, "end", "row-name tick"))
            parts.append(
                f'<rect x="{left}" y="{y}" width="{width - left}" height="20" rx="3" class="lane"/>'
            )
            for event in run["events"]:
                if event["lane"] == lane and stage in (None, int(event["stage"])):
                    parts.append(_event(event, y, left, (width - left) / end))
            y += 23
        y += 20
    return svg(
        width, y - 8, "".join(parts), "Loads, dequantization and products of a queue in time"
    )


def _event(event: Json, y: float, left: float, unit: float) -> str:
    x, w = left + event["start"] * unit, (event["end"] - event["start"]) * unit
    step = int(event["step"])
    inside = (
        f'<rect x="{x + 0.5:.1f}" y="{y + 1.5}" width="{max(w - 1, 1):.1f}" height="17" rx="3" '
        f'class="event {event["lane"]} s{step % 3}"/>'
    )
    if w > 13:
        inside += text(x + w / 2, y + 14, str(step), "middle", "event-id tick")
    words = {"load": "loaded", "dequantize": "dequantized", "multiply": "multiplied"}
    said = say(
        f"step {{}}, stage {{}}: {words[event['lane']]} from {{}} to {{}}",
        event["step"],
        event["stage"],
        event["start"],
        event["end"],
    )
    return mark(inside, said)


def shares(division: Json, height_of: int, width: float, words: str) -> str:
    """Steps of every thread block, in the colour of the tile they belong to."""
    blocks: Sequence[Any] = division["blocks"]
    slots = int(division["slots"])
    left, tall = 0, 104
    unit, step = (width - left) / slots, tall / height_of
    parts = [text(0, 14, words, "start", "small-title")]
    top = 26
    parts.append(
        f'<rect x="{left}" y="{top}" width="{width - left}" height="{tall}" rx="3" class="lane"/>'
    )
    for pid, pieces in enumerate(blocks):
        y = float(top + tall)
        for tile, count in pieces:
            h = count * step
            y -= h
            inside = (
                f'<rect x="{left + pid * unit + 0.4:.2f}" y="{y:.2f}" width="{unit - 0.8:.2f}" '
                f'height="{max(h - 0.6, 0.6):.2f}" class="share s{int(tile) % 4}"/>'
            )
            said = say(f"thread block {pid}: {{}} steps of tile {{}}", count, tile)
            parts.append(mark(inside, said))
    return svg(width, top + tall + 4, "".join(parts), f"Steps of every thread block: {words}")
