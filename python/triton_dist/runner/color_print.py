"""Print functions that scripts for triton-runner import."""

from __future__ import annotations

import functools

import rich
from rich.markup import escape


def _print(color: str, text: object) -> None:
    rich.print(f"[{color}]{escape(str(text))}[/]")


blue_print = functools.partial(_print, "blue")
yellow_print = functools.partial(_print, "yellow")
red_print = functools.partial(_print, "red")
