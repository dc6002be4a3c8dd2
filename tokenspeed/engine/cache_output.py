"""How `tokenspeed cache` prints what it has found: tables, JSON, sizes and ages."""

from __future__ import annotations

import msgspec


def print_json(value: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(head: list[str], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        plain = (cell if cell.isprintable() else ascii(cell) for cell in row)
        cells = (f"{cell:{width}}" for cell, width in zip(plain, widths, strict=True))
        print("  ".join(cells).rstrip())


def size_text(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"


def age_text(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
