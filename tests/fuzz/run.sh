#!/usr/bin/env bash
# Fuzz what reads model folders:  tests/fuzz/run.sh SECONDS [SEED]   (a quarter of the time for each target)
# With clang++ the targets are libFuzzer's; without it they are built with g++ and driver.cpp. AddressSanitizer and
# UndefinedBehaviorSanitizer watch both. Ends with 0 if nothing was found. All output goes to build/out/fuzz.
set -euo pipefail
cd "$(dirname "$0")/../.."
seconds=${1:?usage: tests/fuzz/run.sh SECONDS [SEED]}
seed=${2:-1}
out=build/out/fuzz
mkdir -p "$out"
flags=(-std=c++20 -O1 -g1 -pthread -Wall -Wextra -Werror -Iinclude -Inative -Itests/fuzz -fno-omit-frame-pointer
       -fsanitize=address,undefined -fno-sanitize-recover=all)
parts=(native/model/{json,safetensors,config,config_reader,files,hash,plan}.cpp)
fuzzer= # libFuzzer's compiler, if there is one that links with it
for clang in clang++ clang++-{19..14}; do
    if command -v "$clang" >/dev/null && echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' |
        "$clang" -x c++ -fsanitize=fuzzer,address,undefined -o "$out/probe" - 2>/dev/null; then fuzzer=$clang; break; fi
done
if [ -n "$fuzzer" ] && [ -z "${KD_FUZZ_DRIVER:-}" ]; then
    cxx=$fuzzer; out=$out/clang; mkdir -p "$out"
else
    cxx=${CXX:-g++}; fuzzer=; parts+=(tests/fuzz/driver.cpp)
fi

for source in "${parts[@]}" tests/fuzz/fuzz_{json,safetensors,config,drafter}.cpp; do
    object=$out/$(basename "$source").o
    if [ ! -e "$object.d" ] || [ tests/fuzz/run.sh -nt "$object" ] ||
        [ -n "$(find $(sed 's/^[^:]*://; s/\\$//' "$object.d") -newer "$object" -print -quit 2>&1)" ]; then
        extra=(); [ -n "$fuzzer" ] && extra=(-fsanitize=fuzzer-no-link)
        "$cxx" "${flags[@]}" "${extra[@]}" -c "$source" -o "$object" -MMD -MF "$object.d"
    fi
done
objects=(); for source in "${parts[@]}"; do objects+=("$out/$(basename "$source").o"); done
for target in json safetensors config drafter; do
    extra=(); [ -n "$fuzzer" ] && extra=(-fsanitize=fuzzer)
    "$cxx" "${flags[@]}" "${extra[@]}" -o "$out/fuzz_$target" "$out/fuzz_$target.cpp.o" "${objects[@]}"
done

# Seeds: the files of the embedded model, and a small header.
nano=models/nano
kimi=tests/data/kimi-k2.5-config.json
seeds=$out/seeds
rm -rf "$seeds"
mkdir -p "$seeds"/{json,safetensors,config,drafter}
cp $nano/config.json $nano/generation_config.json $kimi "$seeds/json/"
cp $nano/draft/config.json "$seeds/json/draft.json"
head -c 20000 $nano/model.safetensors.index.json >"$seeds/json/cut-index.json"
cp $kimi "$seeds/config/kimi"
{
    cat $nano/config.json && printf '\0'
    cat $nano/generation_config.json && printf '\0'
    cat $nano/draft/config.json
} >"$seeds/config/nano"
{
    printf '\1........{"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[3,1],"data_offsets":[0,6]},'
    printf '"b":{"dtype":"I16","shape":[2,2],"data_offsets":[6,14]},'
    printf '"c":{"dtype":"F32","shape":[],"data_offsets":[14,18]}}'
} >"$seeds/safetensors/small"
{ printf '\0' && head -c 3000 $nano/draft/model.safetensors; } >"$seeds/safetensors/draft"
printf '\2{"metadata":{"total_size":8},"weight_map":{"a":"m-1.safetensors","b":"m-2.safetensors"}}' \
    >"$seeds/safetensors/index"

cp $nano/draft/config.json "$seeds/drafter/nano"
# What earlier runs found worth keeping, made small: each ended in a way, or reached code, that nothing before it did.
for target in json safetensors config drafter; do
    [ ! -d "tests/fuzz/corpus/$target" ] || cp "tests/fuzz/corpus/$target"/* "$seeds/$target/"
done

each=$(awk "BEGIN { printf \"%.2f\", $seconds / 4 }")
for target in json safetensors config drafter; do
    if [ -n "$fuzzer" ]; then
        "$out/fuzz_$target" -seed="$seed" -max_total_time="${each%.*}" -max_len=65536 "$seeds/$target"
    else
        printf '%-12s ' "$target"
        "$out/fuzz_$target" "$each" "$seed" "$seeds/$target"/*
    fi
done
