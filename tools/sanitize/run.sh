#!/bin/sh
# Runs tests with the C++ module compiled for sanitizers of GCC.
#
#   tools/sanitize/run.sh address,undefined|thread PYTHON PYTEST_ARGUMENT ...
#
# PYTHON has the package and its tests installed. The module is built in build/sanitize and loaded by every Python process of
# the tests (sitecustomize.py); only it is instrumented, not Python, torch or numpy. An error aborts the process.
set -eu
sanitizers=$1 python=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
build=$PWD/build/sanitize/$sanitizers
"$python" -m pip install --quiet --upgrade --no-deps --target "$build/tree" --config-settings=build-dir="$build/cmake" \
    --config-settings=cmake.build-type=Debug --config-settings=cmake.define.RLSTORE_SANITIZE="$sanitizers" .

preload=
for sanitizer in $(echo "$sanitizers" | tr , ' '); do
    case $sanitizer in
        address) name=libasan.so ;;
        undefined) name=libubsan.so ;;
        thread) name=libtsan.so ;;
        *) echo "address, undefined or thread; not $sanitizer" >&2 && exit 2 ;;
    esac
    library=$("${CXX:-g++}" -print-file-name=$name)
    [ -e "$library" ] || { echo "${CXX:-g++} has no $name" >&2 && exit 2; }
    preload="$preload $library"
done

SANITIZED_NATIVE=$(echo "$build"/tree/rlstore/kernels/_native*.so)
export SANITIZED_NATIVE PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" PYTHONMALLOC=malloc
# Python and torch are not instrumented and free little on exit; tests of memory that cannot be allocated expect an error.
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:allocator_may_return_null=1
export UBSAN_OPTIONS=print_stacktrace=1:abort_on_error=1
export TSAN_OPTIONS=abort_on_error=1:halt_on_error=1:suppressions=$here/races.txt
LD_PRELOAD=$preload exec "$python" -m pytest -p no:faulthandler "$@"
