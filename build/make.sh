#!/usr/bin/env bash
# Builds the native libraries with plain g++:  build/make.sh [cpu] [test]
#   cpu    build/out/libkd_cpu.so        the release library: exports the functions of include/kd.h and nothing else
#   test   build/out/libkd_cpu_test.so   the same objects and the probes, everything visible; for tests only
# Objects are rebuilt when a source, a header they include or this script is newer. Nothing outside build/out is written.
# OUT=build/out/asan FLAGS="-fsanitize=address" build/make.sh ... builds the same with more flags into a folder of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
out=${OUT:-build/out}
mkdir -p "$out"
exec 9>"$out/.building"
flock 9 # one build at a time in one folder; the second then finds everything built
CXX=${CXX:-g++}
jobs=${JOBS:-$(nproc)}
flags=(-std=c++20 -O2 -g1 -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -pthread
       -Wall -Wextra -Werror -Iinclude -Inative "-ffile-prefix-map=$root=.")
read -ra more <<<"${FLAGS:-}"
flags+=(${more[@]+"${more[@]}"})

isa_flags() { # kernels compiled once per instruction set; chosen at run time
    case $1 in
        *_avx512.cpp) echo "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c" ;;
        *_avx2.cpp) echo "-mavx2 -mfma -mf16c" ;;
    esac
}
stale() { # $1 source, $2 object
    [ ! -e "$2" ] || [ ! -e "$2.d" ] || [ build/make.sh -nt "$2" ] ||
        [ -n "$(find $(sed 's/^[^:]*://; s/\\$//' "$2.d") -newer "$2" -print -quit 2>&1)" ]
}
object() { echo "$out/${1//\//.}.o"; }
compile() {
    local obj; obj=$(object "$1")
    # shellcheck disable=SC2046
    "$CXX" "${flags[@]}" $(isa_flags "$1") -c "$1" -o "$obj.tmp" -MMD -MF "$obj.d" && mv "$obj.tmp" "$obj"
}
compile_all() { # sources; at most $jobs at once, the first failure ends it
    local pids=() source
    for source in "$@"; do
        stale "$source" "$(object "$source")" || continue
        while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n || exit 1; done
        compile "$source" &
    done
    while [ -n "$(jobs -rp)" ]; do wait -n || exit 1; done
    for source in "$@"; do [ -e "$(object "$source")" ] || { echo "not built: $source" >&2; exit 1; }; done
}
link() { # library, what it exports, sources...
    local lib=$1 exports=$2 objects=() source; shift 2
    for source in "$@"; do objects+=("$(object "$source")"); done
    if [ ! -e "$lib" ] || [ -n "$(find "${objects[@]}" build/make.sh -newer "$lib" -print -quit)" ]; then
        # -fvisibility=hidden does not reach the templates of the standard library: the version script does
        echo "{ $exports };" >"$lib.map"
        "$CXX" -shared -pthread ${more[@]+"${more[@]}"} -Wl,-z,relro,-z,now "-Wl,-soname,$(basename "$lib")" \
            "-Wl,--version-script,$lib.map" -o "$lib.tmp" "${objects[@]}" -Wl,--no-undefined && mv "$lib.tmp" "$lib"
    fi
}

mapfile -t sources < <(find native -name '*.cpp' -not -name 'probe*' -not -path 'native/cuda/*' | sort)
mapfile -t probes < <(find native -name 'probe*.cpp' | sort)
for target in "${@:-cpu}"; do
    case $target in
        cpu) compile_all "${sources[@]}"; link "$out/libkd_cpu.so" "global: kd_*; local: *;" "${sources[@]}" ;;
        test) compile_all "${sources[@]}" "${probes[@]}"
              link "$out/libkd_cpu_test.so" "global: *;" "${sources[@]}" "${probes[@]}" ;;
        *) echo "build/make.sh: no target '$target' (cpu, test)" >&2; exit 64 ;;
    esac
done
