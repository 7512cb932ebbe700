"""rlstore without Ray."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import rlstore
assert "ray" not in sys.modules
sys.modules["ray"] = None  # as if it were not installed
try:
    import rlstore.ray
except ImportError as error:
    assert "pip install rlstore[ray]" in str(error), error
else:
    raise SystemExit("rlstore.ray was imported without Ray")
"""


def test_ray_is_asked_for_only_by_what_needs_it():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=120)
