"""What a page holds, read as the browser reads it."""

from __future__ import annotations

import base64
import json
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np


class Page(HTMLParser):
    """A page, taken apart.

    Attributes:
        tags: Its elements, each with its attributes.
        scripts: The texts of scripts by id; those without one have "".
        title: Its title.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.title, self._inside, self._id = "", "", ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside, self._id = tag, dict(attrs).get("id") or ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[self._id] = self.scripts.get(self._id, "") + data
        elif self._inside == "title":
            self.title += data

    @property
    def storage(self) -> Any:
        """What it knows of the storage."""
        return json.loads(self.scripts["storage"])

    @property
    def listed(self) -> dict[str, list[Any]]:
        """The columns of the list of episodes."""
        return {name: array_of(array).tolist() for name, array in self.storage["episodes"]["arrays"].items()}

    def episode(self, place: int) -> Any:
        """An episode that can be opened; the arrays of its fields by name, in ``arrays``."""
        episode = json.loads(self.scripts[f"episode-{place}"])
        episode["arrays"] = {}
        for field in episode["fields"]:
            if field["kind"] == "frames":
                shape = (field["count"], field["height"], field["width"], field["channels"])
                values = array_of(field["data"]).reshape(shape).cumsum(0, dtype=np.uint8)
            else:
                values = array_of(field["data"]).reshape(field["entries"], field["count"]).T
            episode["arrays"][field["name"]] = values
        return episode

    @property
    def episodes(self) -> list[int]:
        """The places of those that can be opened."""
        return sorted(int(name.removeprefix("episode-")) for name in self.scripts if name.startswith("episode-"))


def array_of(packed: Any) -> Any:
    """An array that was written as planes of bytes."""
    dtype = np.dtype(packed["type"])
    planes = np.frombuffer(zlib.decompress(base64.b64decode(packed["data"])), np.uint8)
    return np.ascontiguousarray(planes.reshape(dtype.itemsize, -1).T).reshape(-1).view(dtype)
