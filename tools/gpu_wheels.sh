#!/bin/sh
# Fills a folder with everything that tools/gpu.sh needs on a GPU machine without a network, except torch, Triton and numpy.
#
#   tools/gpu_wheels.sh WHEELS_DIR [PYTHON]
#
# Run it on a machine with a network. PYTHON is an interpreter of the same version as that of the GPU machine (default:
# python3); rlstore is built for it. The versions are those of constraints.txt.
set -eu

if [ $# -lt 1 ]; then
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
mkdir -p "$1"
wheels=$(cd "$1" && pwd)
python=${2:-python3}
cd "$(dirname "$0")/.."

# The dependencies of rlstore and of the tests, libraries that adapters are for (of what rsl_rl requires only what it imports,
# as in the Makefile), and what writes the tables.
LIBRARY="tensordict gymnasium safetensors cloudpickle farama-notifications importlib_metadata zipp orjson pyvers"
TESTS="pytest pytest-timeout pytest-xdist execnet iniconfig pluggy pygments hypothesis sortedcontainers lazy-importer packaging"
PEERS="stable-baselines3 rsl-rl-lib tensorboard absl-py protobuf GitPython gitdb smmap"
TABLES="rich markdown-it-py mdurl"

rm -f "$wheels"/*.whl
export PIP_CONSTRAINT="$PWD/constraints.txt" PIP_DISABLE_PIP_VERSION_CHECK=1
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$wheels" .
# shellcheck disable=SC2086  # the names are to be split
"$python" -m pip download --quiet --no-deps --only-binary :all: --dest "$wheels" $LIBRARY $TESTS $PEERS $TABLES
ls -l "$wheels"
du -sh "$wheels"
