"""Makes a Python process, and those that it starts, import the sanitized C++ module in place of the installed one."""

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location


class SanitizedFinder:
    """Finds one module, before the finders of an editable install are asked."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The sanitized file, for the name of the C++ module."""
        if name != "rlstore.kernels._native":
            return None
        return spec_from_file_location(name, os.environ["SANITIZED_NATIVE"])


sys.meta_path.insert(0, SanitizedFinder)  # type: ignore[arg-type]
