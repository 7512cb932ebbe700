"""``help()`` of every public method shows its parameters by name and says what they are."""

import importlib
import inspect
import pydoc
import re
from functools import cached_property

import pytest

MODULES = [
    "rlstore",
    "rlstore.data",
    "rlstore.ray",
    "rlstore.fast_td3",
    "rlstore.rsl_rl",
    "rlstore.sb3",
    "rlstore.torchrl",
]
CATCH_ALL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def public(module_name):
    """The public functions and the public methods of public classes, by name."""
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return  # an optional library is not installed
    for name in module.__all__:
        value = getattr(module, name)
        yield from public_of(value, f"{module_name}.{name}")


def public_of(value, name):
    if inspect.isfunction(value):
        yield name, value
    if not inspect.isclass(value):
        return
    if "Args:" in (inspect.getdoc(value) or ""):  # else it is made by something else
        yield name, value
    for member in dir(value):
        found = inspect.getattr_static(value, member)
        is_own = getattr(inspect.unwrap(getattr(found, "__func__", found)), "__module__", "") or ""
        if member.startswith("_") or not is_own.startswith("rlstore"):
            continue
        if inspect.isclass(found):
            yield from public_of(found, f"{name}.{member}")
        elif inspect.isroutine(getattr(value, member)) and not isinstance(found, cached_property):
            yield f"{name}.{member}", getattr(value, member)


CALLABLES = dict(found for module in MODULES for found in public(module))


def parameters_of(value):
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:
        return []  # an exception, made by Python
    return [parameter for parameter in parameters if parameter.name not in ("self", "cls")]


def documented(value, name):
    """What is written about a parameter: in the docstring, or in that of the method of a base class."""
    return re.search(rf"(\*\*?|``|\b){name}(``|:|=|\b)", inspect.getdoc(value) or "")


def test_there_is_something_to_look_at():
    assert len(CALLABLES) > 200
    assert "rlstore.RolloutStorage.from_spaces" in CALLABLES


@pytest.mark.parametrize("name", CALLABLES)
def test_help_shows_and_explains_every_parameter(name):
    value = CALLABLES[name]
    text = pydoc.plain(pydoc.render_doc(value))
    assert inspect.getdoc(value)
    for parameter in parameters_of(value):
        assert parameter.name in text
        if parameter.kind in CATCH_ALL:
            assert f"*{parameter.name}:" in inspect.getdoc(value), "what it takes is not said"
        assert documented(value, parameter.name), f"{parameter.name} is not explained"
