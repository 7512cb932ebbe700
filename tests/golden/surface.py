"""The public surface as data: names, parameters with their defaults, and the attributes of instances."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any, get_args

MODULES = (
    *("rlstore", "rlstore.engine.returns", "rlstore.ray", "rlstore.data"),
    *("rlstore.torchrl", "rlstore.fast_td3", "rlstore.rsl_rl"),
    *(("rlstore.sb3",) if importlib.util.find_spec("stable_baselines3") else ()),  # it inherits from its classes
)


def public_surface(instances: dict[str, Any]) -> dict[str, Any]:
    """What a user can import and call, by module and name.

    Args:
        instances: By class name an instance, whose public attributes are part of the surface.
    """
    surface: dict[str, Any] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        names = getattr(module, "__all__", None) or [
            key
            for key, value in vars(module).items()
            if not key.startswith("_") and getattr(value, "__module__", None) == name
        ]
        surface[name] = {key: _describe(getattr(module, key), instances.get(key)) for key in sorted(names)}
    return surface


def _describe(thing: Any, instance: Any) -> Any:
    if not inspect.isclass(thing):
        return _parameters(thing) if callable(thing) else type(thing).__name__
    if issubclass(thing, BaseException):
        return {"bases": [base.__name__ for base in thing.__mro__[1:-1]]}
    members: dict[str, Any] = {"__init__": _parameters(thing)}
    for key in dir(thing):
        if key.startswith("_") or key in dir(tuple) or key in dir(dict):
            continue
        found = inspect.getattr_static(thing, key)
        if isinstance(found, (staticmethod, classmethod)):
            members[key] = _parameters(getattr(thing, key))
        elif inspect.isfunction(found):
            members[key] = _parameters(found)
        elif inspect.isclass(found):
            members[key] = _describe(found, None)
        else:
            members[key] = "attribute"
    if instance is not None:
        members.update({key: "attribute" for key in vars(instance) if not key.startswith("_")})
    return dict(sorted(members.items()))


def _parameters(function: Any) -> list[str]:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return ["?"]
    described: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD and "Unpack" in str(parameter.annotation):
            described += [f"{option} (by keyword)" for option in _options(function, parameter)]
            continue
        mark = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        by_keyword = " (by keyword)" if parameter.kind is parameter.KEYWORD_ONLY else ""
        described.append(f"{mark}{parameter.name}{default}{by_keyword}")
    return described


def _options(function: Any, parameter: inspect.Parameter) -> list[str]:
    """The names behind ``**options: Unpack[SomeTypedDict]``."""
    annotation = parameter.annotation
    if isinstance(annotation, str):
        module = inspect.getmodule(inspect.unwrap(function))
        annotation = eval(annotation, vars(module))
    (typed,) = get_args(annotation)
    return sorted(typed.__required_keys__ | typed.__optional_keys__)
