"""What arrays of steps are called, here and in the datasets of d4rl, Minari and Gymnasium."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlstore.engine.calls import did_you_mean
from rlstore.engine.rows.step_fields import StepFields
from rlstore.errors import InvalidInputError

TERMINATED = ("terminated", "terminations", "terminals", "terminateds")
TRUNCATED = ("truncated", "truncations", "timeouts", "truncateds")
_SAME: dict[Any, str] = {
    **dict.fromkeys(TERMINATED, "terminated"),
    **dict.fromkeys(TRUNCATED, "truncated"),
}
_NEEDED = ("observations", "actions", "rewards")
_OBSERVED = ("next_observations", "final_observations")
# What datasets hold beside the steps.
_IGNORED = ("infos", "metadata")
_JOINED = ("done", "dones", "episode_ends", "ends")

_NO_ENDS = (
    f"no end flags: give {', '.join(TERMINATED[:-1])} or {TERMINATED[-1]}, True where an episode terminated, and "
    f"{', '.join(TRUNCATED[:-1])} or {TRUNCATED[-1]}, True where it was cut off. For data without ends give truncated "
    "with False everywhere"
)
_OWN = 'Fields of your own have to be declared: extra_fields={"costs": ((), "float32")}, by name a shape and a dtype.'


def by_name(given: Any, fields: StepFields | None) -> dict[str, Any]:
    """The values of a mapping by the names of the vocabulary; those that are None are left out.

    Args:
        given: The mapping.
        fields: The fields of the storage; None if they are not known yet, and any name may be one of its own.

    Raises:
        InvalidInputError: If it is no mapping, has names that are not known, has one twice, or lacks one.
    """
    if not isinstance(given, Mapping):
        raise InvalidInputError(f"it is a {type(given).__name__}; give a dict of arrays. {NOTHING}")
    found: dict[str, Any] = {}
    own = () if fields is None else fields.named
    known = (*_NEEDED, *_OBSERVED, *TERMINATED, *TRUNCATED, *own)
    for key in given:
        if _is_beside(key):
            continue
        if key not in known and (fields is not None or key in _JOINED):
            raise _unknown(key, known, fields)
        name, value = str(_SAME.get(key, key)), given[key]
        if value is None:
            continue
        if name in found:
            other = next(k for k in given if _SAME.get(k, k) == name and given[k] is not None)
            raise InvalidInputError(f"{other!r} and {key!r} are the same flags; give one of them. {NOTHING}")
        found[name] = value
    missing = [name for name in (*_NEEDED, *own) if name not in found]
    if missing:
        _refuse_misspelt(given, missing, known, fields)
        raise InvalidInputError(f"it lacks {missing}; it has {list(given)}. {NOTHING}")
    if "terminated" not in found and "truncated" not in found:
        _refuse_misspelt(given, (*TERMINATED, *TRUNCATED), known, fields)
        raise InvalidInputError(f"there are {_NO_ENDS}. {NOTHING}")
    return found


@contextmanager
def told_of(what: str) -> Iterator[None]:
    """Let errors say what they are about: "arrays", "episode 3"."""
    try:
        yield
    except InvalidInputError as error:
        told = str(error).replace(" of environment 0", "")  # as errors about a single step say
        raise InvalidInputError(f"{what}: {told}") from error


NOTHING = "Nothing was written."


def _is_beside(key: Any) -> bool:
    return isinstance(key, str) and key.partition("/")[0] in _IGNORED


def _refuse_misspelt(
    given: Mapping[Any, Any], missing: Iterable[str], known: tuple[str, ...], fields: StepFields | None
) -> None:
    """Name what is there under a name that is almost a missing one."""
    wanted = tuple(missing)
    for key in given:
        if key not in known and not _is_beside(key) and did_you_mean(key, wanted):
            raise _unknown(key, known, fields)


def _unknown(key: Any, known: tuple[str, ...], fields: StepFields | None) -> InvalidInputError:
    if key in _JOINED:
        hint = (
            " It does not tell whether an episode terminated (no value after it) or was truncated (bootstrap from the "
            "next observation): give terminated or truncated."
        )
    else:
        hint = f"{did_you_mean(key, known)} {_OWN}"
        if fields is not None:
            hint += f" This storage has {list(fields.extra_names) or 'none'}."
    return InvalidInputError(f"{key!r} is not known; it takes {list(known)}.{hint} {NOTHING}")
