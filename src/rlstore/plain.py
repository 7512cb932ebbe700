"""Text that any terminal takes: what a file says, and what a file is called, may hold anything."""

from __future__ import annotations


def plain(text: object) -> str:
    """One line, with what is not printable written out: control characters, and bytes that are no text."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def plain_lines(text: str) -> str:
    """Several lines, likewise."""
    return "\n".join(map(plain, text.split("\n")))
