#!/usr/bin/env bash
# The CPU twin under AddressSanitizer with UndefinedBehaviorSanitizer, then under ThreadSanitizer. Native programs only:
# examples/embed.c and stress.c, with one rank and with two. Everything it builds is below build/out.
#   tests/sanitize/run.sh [asan] [tsan]      REQUESTS=60 requests each
set -euo pipefail
cd "$(dirname "$0")/../.."
requests=${REQUESTS:-60}

for kind in "${@:-asan tsan}"; do for name in $kind; do
    case $name in
        asan) flags="-O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer" ;;
        tsan) flags="-O1 -Wno-tsan -fsanitize=thread -fno-omit-frame-pointer" ;;
        *) echo "tests/sanitize/run.sh: no sanitizer '$name' (asan, tsan)" >&2; exit 64 ;;
    esac
    out=build/out/$name
    echo "$name: building"
    BUILD_OUT=$out FLAGS=$flags build/make.sh cpu
    for program in examples/embed.c tests/sanitize/stress.c; do
        # shellcheck disable=SC2086
        gcc -std=c11 -O1 -g $flags -pthread -Iinclude "$program" -o "$out/$(basename "$program" .c)" \
            -L"$out" -lkd_cpu "-Wl,-rpath,$PWD/$out"
    done
    export ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1
    echo "$name: embed";  "$out/embed" models/nano >/dev/null
    echo "$name: stress, one rank";  "$out/stress" models/nano "$requests" 1
    echo "$name: stress, two ranks"; "$out/stress" models/nano "$requests" 2
    echo "$name: clean"
done; done
