"""A progress bar in the terminal, drawn by rich."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

_Part = TypeVar("_Part")


class Bar:
    """Shows how many of some parts are done, or nothing.

    Args:
        shown: Whether to show it.

    Raises:
        ImportError: If it is to be shown and rich is not installed.
    """

    def __init__(self, *, shown: bool) -> None:
        self._track: Any = None
        if shown:
            try:
                from rich.progress import track
            except ImportError as error:
                raise ImportError(
                    f"progress=True needs rich, which cannot be imported ({error}): pip install 'rlstore[data]'. "
                    "Nothing was written."
                ) from error
            self._track = track

    def over(self, parts: Iterable[_Part], title: str, count: int) -> Iterator[_Part]:
        """The parts, while it is shown how many of ``count`` were taken; 0 if that is not known."""
        if self._track is None:
            yield from parts
        else:
            yield from self._track(parts, title, total=count or None)
