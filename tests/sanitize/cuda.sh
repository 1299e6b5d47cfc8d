#!/usr/bin/env bash
# The CUDA twin under compute-sanitizer: every op on small shapes, the paths that only larger ones take, ranks that meet, and rounds
# of a small model, one by one: rounds in a loop end with an illegal address under the tools and nowhere else, which is not understood
# (docs/BENCHMARKS_cuda.md). On a machine with a GPU:
#   tests/sanitize/cuda.sh [racecheck memcheck initcheck synccheck]
# Exit status 0 only if every tool came to its end and found nothing. The tests of a tool are dealt out to SHARES processes
# (default 15), JOBS processes run at once (default: the cores), and each may take SECONDS_EACH (default 480: racecheck takes minutes for
# a test that the others are done with in one). PYTHON names the interpreter (default: .venv/bin/python).
# The libraries are those of build/out; racecheck has its own, in build/out/every-lane: where one lane of a warp arrives at a barrier
# for all, racecheck takes only what that lane did for ordered and reports the others. There every lane arrives for itself, too slow
# to ship, and the rest is the same (native/cuda/bulk.h).
set -euo pipefail
cd "$(dirname "$0")/../.."
export python=${PYTHON:-.venv/bin/python} shares=${SHARES:-15}
export sanitizer=${SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
[ -x "$sanitizer" ] || { echo "compute-sanitizer is missing: it comes with the CUDA toolkit" >&2; exit 69; }
[ $# -gt 0 ] || set -- racecheck memcheck initcheck synccheck # the slowest first
export every_lane=build/out/every-lane
[ "$*" = racecheck ] || BUILD_OUT=build/out build/make.sh cuda cuda-test
[[ " $* " != *" racecheck "* ]] || BUILD_OUT=$every_lane CUDA_FLAGS=-DKD_EVERY_LANE_ARRIVES build/make.sh cuda cuda-test
export logs=build/out/sanitize
rm -rf "$logs"
mkdir -p "$logs"
began=$SECONDS
# Ops whose rows cannot lie oddly are tried once: they have none.
export which="matches_its_spec and 1- and not (odd and (zero or sample or logprobs or plan_ or end_round or tree_)) \
    or few_and_of_many and (300 or 1060) or wild_rows or one_call_after_another and 24 \
    or rank_order and (one_shot-96-3 or two_shots-50-4) or one_by_one and 8- and (chain-3 or device-16 or heap-16)"

one() { # tool, share
    # Children would be followed into compilers and shells; the libraries are built, so there is nothing to follow.
    local log="$logs/$1.$2.log" out=build/out
    [ "$1" != racecheck ] || out=$every_lane
    BUILD_OUT=$out timeout "${SECONDS_EACH:-480}" "$sanitizer" --tool "$1" --error-exitcode 99 --launch-timeout 60 \
        "$python" -m pytest -q -p no:cacheprovider -p no:xdist --device cuda --prebuilt --timeout 0 --durations 3 --share "$2/$shares" \
        tests/test_ops.py tests/test_experts.py tests/test_transports.py tests/test_runs.py -k "$which" \
        >"$log" 2>&1 && grep -Eq 'SUMMARY: 0 (errors|hazards)' "$log"
}
export -f one
{ for tool in "$@"; do for share in $(seq "$shares"); do echo "$tool $share"; done; done; } |
    xargs -P "${JOBS:-$(nproc)}" -L 1 bash -c 'one "$1" "$2" || touch "$logs/$1.failed"' one
for tool in "$@"; do
    if [ -e "$logs/$tool.failed" ]; then
        for log in "$logs/$tool".*.log; do echo "== $log"; tail -n 40 "$log"; done >&2
    else
        echo "$tool: $(cat "$logs/$tool".*.log | sed -n 's/^\([0-9]* passed\).*/\1/p' | paste -sd' '), 0 errors"
    fi
done
[ -z "$(find "$logs" -name '*.failed')" ] || { echo "compute-sanitizer found something: $(ls "$logs" | grep failed)" >&2; exit 1; }
echo "compute-sanitizer: $* clean, $((SECONDS - began)) s"
