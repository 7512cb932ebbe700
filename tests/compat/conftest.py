"""Settings that must be in place before the foreign libraries are imported."""

import os

# GitPython refuses to be imported where no git executable is found, unless told that this is fine.
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
