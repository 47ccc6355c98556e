"""How commands print: messages, tables, listings."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any


def complain(message: str) -> None:
    """Prints one message to the error stream, control characters escaped: names and texts are data."""
    shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in message)
    print(f"ola: {shown}", file=sys.stderr)  # noqa: T201


def say(text: str) -> None:
    """Prints to the output stream."""
    print(text)  # noqa: T201


def print_rows(options: argparse.Namespace, rows: list[dict[str, Any]]) -> int:
    """Prints what a listing found, as a table or with `--json` as a list of objects; returns the exit code 0."""
    if options.json:
        say(json.dumps(rows, indent=1))
    elif not rows:
        say("nothing here yet; `ola materialize --model minilm-l6 --corpus sample` makes something")
    else:
        print_table(tuple(rows[0]), [tuple(map(_join, row.values())) for row in rows])
    return 0


def _join(cell: Any) -> Any:
    return ",".join(map(str, cell)) if isinstance(cell, tuple) else cell


def print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a table; cells are data, so no markup in them counts."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*header, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(f"{cell:,}" if type(cell) is int else escape(str(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else 200).print(table)
