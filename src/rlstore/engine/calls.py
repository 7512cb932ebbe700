"""What callers are told: of names that a function does not know, of what was probably meant, and warnings."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import Any, ParamSpec, TypeVar

from rlstore.errors import InvalidCallError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_PACKAGE = __name__.partition(".")[0]

# What other libraries call it, and what storages of this one do: the first that a function knows was meant.
_SIZES = ("storage_size", "num_transitions_per_env", "size", "num_steps", "num_storages")
_STEPS = ("num_steps", "num_transitions_per_env", "n_step", "sequence_length", "size")
_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("buffer_size", "capacity", "max_size", "maxlen", "replay_size", "memory_size", "size"), _SIZES),
    **dict.fromkeys(("n_steps", "num_steps", "rollout_length", "unroll_length", "horizon"), _STEPS),
    **dict.fromkeys(("n_envs", "n_env", "num_environments", "nenvs"), ("num_envs",)),
    **dict.fromkeys(("gamma", "discount", "discount_factor"), ("discount", "gamma")),
    **dict.fromkeys(("lam", "lambda_", "lmbda", "gae_lambda", "gae_lam"), ("gae_lambda", "lam")),
    **dict.fromkeys(("obs_space", "obs_shape", "observation_shape", "observation_space"), ("observation_space", "obs")),
    **dict.fromkeys(("act_space", "action_shape", "action_space"), ("action_space", "actions_shape")),
    **dict.fromkeys(("seq_len", "length", "sequence_len"), ("sequence_length",)),
    **dict.fromkeys(("num_buffers", "num_slots", "n_slots"), ("num_storages",)),
    **dict.fromkeys(("obs", "observation", "state"), ("observations",)),
    **dict.fromkeys(("next_obs", "next_observation", "next_state"), ("next_observations",)),
    **dict.fromkeys(("done", "dones", "terminateds"), ("terminated", "dones")),
    **dict.fromkeys(("prefetch", "prefetch_factor"), ("num_workers",)),
}


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A question with the known name that is near ``name``, after a space; "" if none is."""
    names = list(known)
    near = [other for other in _OTHER_NAMES.get(str(name), ()) if other in names] or get_close_matches(str(name), names)
    return f" Did you mean {near[0]!r}?" if near else ""


def explained(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """The same function. The error for arguments that it does not take says which it takes, and what was meant."""

    @wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            # Python refuses arguments before the function begins: then the traceback ends here.
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            hint = spaces_hint(args[0], (*args, *kwargs.values())) if args else ""
            raise _explanation(function, kwargs, str(error), hint) from None

    return call


def spaces_hint(owner: object, given: Iterable[object]) -> str:
    """Where to give Gymnasium spaces, after a space, if some were given to a constructor that takes none; else ""."""
    kind = type(owner)
    if hasattr(kind, "from_spaces") and any(hasattr(value, "contains") for value in given):
        return f" To create a storage from spaces, call {kind.__name__}.from_spaces()."
    return ""


def warn_caller(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn of the line outside of this package that led here, however deep it is."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def check_keywords(kind: type, given: Iterable[str]) -> None:
    """Refuse keywords that the constructor of a class does not take."""
    parameters = signature(kind).parameters
    if all(parameter.kind is not Parameter.VAR_KEYWORD for parameter in parameters.values()):
        check_known(f"{kind.__name__}()", given, list(parameters))


def check_known(owner: str, given: Iterable[str], known: list[str]) -> None:
    """Refuse arguments with names that are not known."""
    for name in given:
        if name not in known:
            raise _unknown(owner, name, known)


def _explanation(function: Callable[..., Any], given: Iterable[str], problem: str, hint: str) -> InvalidCallError:
    owner = f"{function.__qualname__.removesuffix('.__init__')}()"
    known = [name for name in signature(function).parameters if name not in ("self", "cls", "arguments")]
    unknown = [name for name in given if name not in known]
    if unknown:
        return _unknown(owner, unknown[0], known, hint)
    told = problem.replace(f"{function.__qualname__}()", owner)
    return InvalidCallError(f"{told}. It takes {', '.join(known)}.{hint}")


def _unknown(owner: str, name: str, known: list[str], hint: str = "") -> InvalidCallError:
    meant = did_you_mean(name, known)
    return InvalidCallError(f"{owner} has no argument {name!r}.{meant} It takes {', '.join(known)}.{hint}")
