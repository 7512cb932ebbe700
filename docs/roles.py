"""For the API reference: roles and literal blocks of reStructuredText as Markdown, signatures without private names."""

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
    """Rewrites the docstring and the signature of each object that has been read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one."""
        if obj.docstring is not None:
            obj.docstring.value = _LITERAL.sub(":", _ROLE.sub(_markdown, obj.docstring.value))

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Show no private names in a signature: type variables as what they stand for, constants as their values."""
        for parameter in func.parameters:
            parameter.annotation = _public(parameter.annotation)
            constant = func.module.members.get(str(parameter.default))
            if isinstance(constant, griffe.Attribute) and constant.is_private:
                parameter.default = constant.value
        func.returns = _public(func.returns)


def _public(annotation: Any) -> Any:
    """``_AnyStorage`` is the type of the class itself, ``_Batch`` that of the batches."""
    for part in annotation.iterate(flat=True) if isinstance(annotation, griffe.Expr) else ():
        if isinstance(part, griffe.ExprName) and part.name.startswith("_"):
            part.name = "Self" if part.name.startswith("_Any") else part.name.lstrip("_")
    return annotation
