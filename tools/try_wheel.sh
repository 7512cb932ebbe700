#!/bin/sh
# Tries rlstore as it is installed: the doctor, the programs in the README, a short demo and the quick tests.
#
#   tools/try_wheel.sh PYTHON
#
# PYTHON is an interpreter with rlstore[examples,ray] and the packages in tools/try_wheel.txt.
set -eu

if [ $# -ne 1 ]; then
    sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
python=$1
cd "${0%/*}/.."

"$python" -c '
import sys, rlstore
assert rlstore.__file__.startswith(sys.prefix), f"{rlstore.__file__} is not the installed one"'
"$python" -m rlstore doctor
"$python" -c '
import re
text = open("README.md", encoding="utf-8").read()
blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
exec("\n".join(blocks), {"__name__": "readme"})
print(f"README.md: {len(blocks)} programs ran")'
"$python" -m rlstore demo ppo --steps 20000
"$python" -m rlstore inspect tests/golden/snapshots/replay --html build/page.html
# shellcheck disable=SC2046  # the names are to be split
CI=1 "$python" -m pytest -p no:cacheprovider --quiet --numprocesses 2 --dist loadgroup -m "not torture and not slow" \
    $(while read -r files; do echo "$files"; done < build/quick-files)
