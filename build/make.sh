#!/usr/bin/env bash
# Builds the native libraries with plain g++ and nvcc:  build/make.sh [cpu] [test] [cuda] [cuda-test]
#   cpu        build/out/libkd_cpu.so        the release library: exports the functions of include/kd.h and nothing else
#   test       build/out/libkd_cpu_test.so   the same objects and the probes, everything visible; for tests only
#   cuda, cuda-test                          libkd_cuda.so, libkd_cuda_test.so: the same with native/cuda for native/cpu
# ARCHS="90a 120f" names the GPUs to make machine code for (all: every one we support); without it, those present, or, where
# there is none, 90a and 120f. What ptxas says of each kernel is left in build/out/*.ptxas.
# Objects are rebuilt when a source, a header they include or this script is newer. Nothing outside build/out is written.
# BUILD_OUT=build/out/asan FLAGS="-fsanitize=address" build/make.sh ... builds the same with more flags into a folder of its own:
# FLAGS are for g++, CUDA_FLAGS for nvcc.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
out=${BUILD_OUT:-build/out}
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
object() { # of a CUDA source: one for each choice of architectures
    local obj="$out/${1//\//.}.o"
    [[ $1 != *.cu ]] || obj="$out/${1//\//.}.$(IFS=_; echo "${archs[*]}").o"
    echo "$obj"
}
page_flags() { # the pages call operations by way of native/stages.cpp, which tells when each was done
    case $1 in native/forward.cpp | native/drafter.cpp | native/round.cpp) echo -Dops=staged ;; esac
}
compile() {
    local obj; obj=$(object "$1")
    if [[ $1 == *.cu ]]; then compile_cuda "$1" "$obj"; return; fi
    # shellcheck disable=SC2046
    "$CXX" "${flags[@]}" $(isa_flags "$1") $(page_flags "$1") -c "$1" -o "$obj.tmp" -MMD -MF "$obj.d" && mv "$obj.tmp" "$obj"
}
choose_archs() { # what to make machine code for: only the CUDA targets ask
    local wanted all=(80 89 90a 100f 120f) arch
    local known=' 80 86 87 88 89 90 90a 100 100a 100f 103 103a 103f 110 110a 110f 120 120a 120f 121 121a 121f '
    archs=()
    read -ra wanted <<<"${ARCHS:-}"
    for arch in ${wanted[@]+"${wanted[@]}"}; do
        if [ "$arch" = all ]; then archs+=("${all[@]}"); continue; fi
        [[ $known == *" $arch "* ]] || { echo "build/make.sh: ARCHS=\"$ARCHS\": '$arch' is no architecture that kd can be built for; give some of these, with spaces between:$known(90a: an H200; 120f: an RTX PRO 6000), or all" >&2; exit 64; }
        archs+=("$arch")
    done
    if [ ${#archs[@]} = 0 ] && command -v nvidia-smi >/dev/null; then # 9.0 -> 90a, 12.0 -> 120f; without a driver it prints sentences
        mapfile -t archs < <(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sed -n 's/^\([0-9]*\)\.\([0-9]\)$/\1\2/p' |
                                 sed 's/^90$/90a/; s/^10[03]$/100f/; s/^12[01]$/120f/')
        for arch in ${archs[@]+"${archs[@]}"}; do
            [[ $known == *" $arch "* ]] || { echo "build/make.sh: a GPU here is of compute capability ${arch%?}.${arch: -1}, which kd has no kernels for; ARCHS=\"90a\" builds for an H200, ARCHS=all for every GPU that kd knows" >&2; exit 69; }
        done
    fi
    [ ${#archs[@]} -gt 0 ] || archs=(90a 120f)
    mapfile -t archs < <(printf '%s\n' "${archs[@]}" | awk '!seen[$0]++')
}
nvcc_flags() {
    local a
    for a in "${archs[@]}"; do echo "-gencode arch=compute_$a,code=sm_$a"; done
    # -fmad=false: a product is only fused with a sum where the source says so, as -ffp-contract=off does for g++
    # 554: Dev<const T> inherits a conversion to itself
    echo "-std=c++20 -O3 -fmad=false -diag-suppress 554 -lineinfo -Xptxas -v -Werror all-warnings -Iinclude -Inative --threads 1 ${CUDA_FLAGS:-}"
    echo "-Xcompiler -fPIC,-fvisibility=hidden,-ffp-contract=off,-pthread,-Wall,-Wextra,-ffile-prefix-map=$root=."
}
compile_cuda() { # $1 source, $2 object
    # shellcheck disable=SC2046
    "$NVCC" $(nvcc_flags) -DKD_CUDA_ARCHS="\"$(printf ' sm_%s' "${archs[@]}" | cut -c2-)\"" \
        -c "$1" -o "$2.tmp" -MMD -MF "$2.d" >"$2.ptxas" 2>&1 || { grep -v '^ptxas info' "$2.ptxas" >&2; return 1; }
    sed -i "s#^[^:]*:#$2:#" "$2.d"
    mv "$2.tmp" "$2"
}
compile_and_tell() { # kernels take minutes: each that is done is named
    compile "$1" && { [[ $1 != *.cu ]] || echo "  $1"; }
}
compile_all() { # sources; at most $jobs at once, the first failure ends it
    local todo=() kernels=0 source
    for source in "$@"; do
        stale "$source" "$(object "$source")" || continue
        todo+=("$source")
        [[ $source != *.cu ]] || kernels=$((kernels + 1))
    done
    [ $kernels = 0 ] || echo "compiling $kernels CUDA sources for$(printf ' sm_%s' "${archs[@]}"), $jobs at once: minutes where these are many"
    for source in ${todo[@]+"${todo[@]}"}; do
        while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n || exit 1; done
        compile_and_tell "$source" &
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
            "-Wl,--version-script,$lib.map" -o "$lib.tmp" "${objects[@]}" ${libraries[@]+"${libraries[@]}"} \
            -Wl,--no-undefined && mv "$lib.tmp" "$lib"
    fi
}

need_cuda() {
    choose_archs
    NVCC=${NVCC:-$(command -v nvcc || ls .venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc 2>/dev/null || true)}
    [ -n "$NVCC" ] || { echo "build/make.sh: no CUDA compiler (nvcc) here, so the CUDA twin is not built; the CPU twin needs none" >&2; exit 69; }
    command -v "$NVCC" >/dev/null || { echo "build/make.sh: NVCC=\"$NVCC\" is no program; name the CUDA compiler, or leave NVCC out to have it looked for" >&2; exit 69; }
    cudart=$("$NVCC" --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p') # nvcc may be a script that calls another
}
link_cuda() { # library, what it exports, sources...
    local stamp="$out/$(basename "$1").archs"
    [ "$(cat "$stamp" 2>/dev/null)" = "${archs[*]}" ] || { rm -f "$1"; echo "${archs[*]}" >"$stamp"; }
    for folder in lib64 lib targets/x86_64-linux/lib; do
        [ ! -e "$cudart/$folder/libcudart_static.a" ] || libraries=("$cudart/$folder/libcudart_static.a" -ldl -lrt)
    done
    [ ${#libraries[@]} -gt 0 ] || { echo "build/make.sh: no libcudart_static.a under $cudart: install the CUDA runtime's development files" >&2; exit 69; }
    link "$@"
}

libraries=()
mapfile -t pages < <(find native -name '*.cpp' -not -name 'probe*' -not -path 'native/cpu/*' -not -path 'native/cuda/*' | sort)
mapfile -t cpu < <(find native/cpu -name '*.cpp' -not -name 'probe*' | sort)
mapfile -t cuda < <(find native/cuda -maxdepth 1 -name '*.cu' -not -name 'probe*' | sort)
mapfile -t probes < <(find native -maxdepth 1 -name 'probe*.cpp' | sort)
mapfile -t cpu_probes < <(find native/cpu -name 'probe*.cpp' | sort)
mapfile -t cuda_probes < <(find native/cuda -maxdepth 1 -name 'probe*.cu' | sort)
for target in "${@:-cpu}"; do
    libraries=()
    case $target in
        cpu) compile_all "${pages[@]}" "${cpu[@]}"
             link "$out/libkd_cpu.so" "global: kd_*; local: *;" "${pages[@]}" "${cpu[@]}" ;;
        test) compile_all "${pages[@]}" "${cpu[@]}" "${probes[@]}" "${cpu_probes[@]}"
              link "$out/libkd_cpu_test.so" "global: *;" "${pages[@]}" "${cpu[@]}" "${probes[@]}" "${cpu_probes[@]}" ;;
        cuda) need_cuda; compile_all "${pages[@]}" "${cuda[@]}"
              link_cuda "$out/libkd_cuda.so" "global: kd_*; local: *;" "${pages[@]}" "${cuda[@]}" ;;
        cuda-test) need_cuda; compile_all "${pages[@]}" "${cuda[@]}" "${probes[@]}" "${cuda_probes[@]}"
                   link_cuda "$out/libkd_cuda_test.so" "global: *;" "${pages[@]}" "${cuda[@]}" "${probes[@]}" "${cuda_probes[@]}" ;;
        *) echo "build/make.sh: no target '$target' (cpu, test, cuda, cuda-test)" >&2; exit 64 ;;
    esac
done
