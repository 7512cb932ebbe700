"""rlstore stores the experience of reinforcement-learning agents and serves it to learners."""

import importlib
import sys
from typing import TYPE_CHECKING

# Asked before the native module is imported, which would switch the GIL on for the whole process.
if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "rlstore does not support free-threaded Python: it relies on the GIL, which is off in this process. Use an "
        "ordinary build of Python, or switch the GIL on with PYTHON_GIL=1 or python -X gil=1."
    )

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rlstore._public import *  # noqa: F403
else:
    # The first public name that is used imports all of them, and torch. `rlstore doctor` starts without: it is asked
    # when torch cannot be imported.
    def __getattr__(name: str) -> object:
        if not name.startswith("__") or name == "__all__":
            public = importlib.import_module("rlstore._public")
            globals().update({known: getattr(public, known) for known in ("__all__", *public.__all__)})
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        hidden = {"TYPE_CHECKING", "importlib", "sys"}
        return sorted({*globals(), *importlib.import_module("rlstore._public").__all__} - hidden)
