#!/bin/sh
# Runs the CUDA tests and benchmarks on a machine that has a GPU, torch, Triton and numpy, but no network.
#
#   tools/gpu.sh WHEELS_DIR [tests|bench|profile|all] [OUT_DIR [NAME ...]]
#
# WHEELS_DIR was filled by tools/gpu_wheels.sh, for the Python of this machine ($PYTHON, else python3). tests.xml, gpu.json and
# gpu.md are written to OUT_DIR (default: out/gpu). `bench` times and profiles, `profile` only counts launches, without times.
# NAMEs are passed to pytest instead of all CUDA tests, or are the benchmark groups to run instead of all of them.
# Tests run in $JOBS processes (default: one per processor).
# The Python files are those of this tree; the native module is that of the wheel: fill the folder again when csrc changes.
set -eu

if [ $# -lt 1 ] || [ ! -d "$1" ]; then
    sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
wheels=$(cd "$1" && pwd)
work=${2:-all}
case $work in
    tests | bench | profile | all) ;;
    *)
        echo "tests, bench, profile or all; not $work" >&2
        exit 2
        ;;
esac
if ! ls "$wheels"/*.whl > /dev/null 2>&1; then
    echo "no wheels in $wheels; tools/gpu_wheels.sh fills it" >&2
    exit 2
fi
mkdir -p "${3:-out/gpu}"
out=$(cd "${3:-out/gpu}" && pwd)
python=${PYTHON:-python3}
[ $# -lt 3 ] && shift $# || shift 3
cd "$(dirname "$0")/.."

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
cp -r src/rlstore/. "$site/rlstore/"
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" GIT_PYTHON_REFRESH=quiet PYTHONUNBUFFERED=1 CI=1
export RLSTORE_TEST_DEVICE=cuda  # the device of the tests of the contract and of the adapters
"$python" -c 'import torch, triton, rlstore
assert torch.cuda.is_available(), "no CUDA device"
print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__, rlstore.__file__)'

tests() {
    [ $# -gt 0 ] || set -- tests/cuda tests/test_cuda.py tests/compat tests/contract tests/data/test_data_on_cuda.py
    # Without the plugin pytest-benchmark, which some machines have installed and which does not run with xdist.
    "$python" -m pytest -p no:cacheprovider -p no:benchmark --numprocesses "${JOBS:-$(nproc)}" --dist worksteal \
        --junitxml="$out/tests.xml" "$@"
}

benchmarks() {
    "$python" -m benchmarks.gpu --out "$out/gpu.json" "$@"
}

status=0
case $work in
    tests) tests "$@" || status=$? ;;
    bench) benchmarks "$@" || status=$? ;;
    profile) benchmarks --profile-only "$@" || status=$? ;;
    all)
        tests || status=$?
        benchmarks || status=$?
        ;;
esac
exit $status
