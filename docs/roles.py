"""Docstrings as Markdown: the roles and literal blocks of reStructuredText, for the API reference."""

from __future__ import annotations

import re
from typing import Any

import griffe

# :class:`~rlstore.Journal`, :meth:`save` and :meth:`Storage.save <rlstore.Storage.save>`; what is given with its whole
# name is linked.
_ROLE = re.compile(r":(?:class|func|meth|attr|mod|exc|data):`(?:([\w.]+) <)?~?([\w.]+)>?`")
_LITERAL = re.compile(r"::$", flags=re.MULTILINE)


def _markdown(match: re.Match[str]) -> str:
    label, name = match.groups()
    short = label or name.rpartition(".")[2]
    return f"[`{short}`][{name}]" if name.startswith("rlstore.") else f"`{short}`"


class Roles(griffe.Extension):
    """Rewrites each docstring when its object has been read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one."""
        if obj.docstring is not None:
            obj.docstring.value = _LITERAL.sub(":", _ROLE.sub(_markdown, obj.docstring.value))
