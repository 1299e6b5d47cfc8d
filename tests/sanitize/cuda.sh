#!/usr/bin/env bash
# The CUDA twin under compute-sanitizer: every op on small shapes, and rounds of a small model. On a machine with a GPU:
#   tests/sanitize/cuda.sh [memcheck racecheck initcheck synccheck]
# Exit status 0 only if every tool found nothing. PYTHON names the interpreter (default: .venv/bin/python).
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
sanitizer=${SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
[ -x "$sanitizer" ] || { echo "compute-sanitizer is missing: it comes with the CUDA toolkit" >&2; exit 69; }
[ $# -gt 0 ] || set -- memcheck racecheck initcheck synccheck
build/make.sh cuda cuda-test
failed=()
for tool in "$@"; do
    echo "== $tool"
    # Children would be followed into compilers and shells; the libraries are built, so there is nothing to follow.
    "$sanitizer" --tool "$tool" --error-exitcode 99 --launch-timeout 60 \
        "$python" -m pytest -q -p no:cacheprovider -p no:xdist --device cuda --prebuilt --timeout 0 \
        tests/test_ops.py tests/test_exact.py -k "matches_its_spec and 1- or chain_of_every_length and 7 or budget and 17" \
        || failed+=("$tool")
done
[ ${#failed[@]} = 0 ] || { echo "compute-sanitizer: ${failed[*]} found something" >&2; exit 1; }
echo "compute-sanitizer: $* clean"
