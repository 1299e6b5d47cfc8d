// Times the ways a matrix product can be dealt out to blocks (linear_tile.h) on the shapes of a rank, and what the
// library chooses, and checks that all give the same bits. Prints one line of JSON a way. Not part of any library:
//   nvcc <flags of build/make.sh> bench/linear_tiles.cu native/cuda/{linear,rows,device,comm}.cu native/meeting.cpp
// An argument is a regular expression of shapes' names. "live": of so many rows, as many as there were in a launch made for them.
// Weights are read from memory, not from the L2 cache: each launch of the timed graph has its own copy of them.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <regex>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda/linear_tile.h"
#include "ops.h"

namespace {

using namespace kd;
using namespace kd::cuda;

constexpr size_t kRotate = size_t{512} << 20;  // bytes of weights a replay reads at least
constexpr int kReplays = 12;

__global__ void random_kernel(uint16_t* p, size_t n, uint32_t seed) {
    for (size_t i = blockIdx.x * size_t{256} + threadIdx.x; i < n; i += size_t{256} * gridDim.x) {
        uint64_t v = (i + 1) * 0x9E3779B97F4A7C15ull + seed;
        v = (v ^ v >> 31) * 0xBF58476D1CE4E5B9ull;
        p[i] = static_cast<uint16_t>((v >> 40 & 0x807F) | (120 + (v >> 20) % 8) << 7);  // +-2^-7 .. 2
    }
}

// Every result once more, in double.
__global__ void reference_kernel(double* y, RowsPtr x, const bf16* w, int n, int k) {
    const int j = blockIdx.x * 256 + threadIdx.x;
    if (j >= n) return;
    double sum = 0;
    for (int i = 0; i < k; i++)
        sum += static_cast<double>(__bfloat162float(x[blockIdx.y][i])) * __bfloat162float(w[size_t(j) * k + i]);
    y[size_t(blockIdx.y) * n + j] = sum;
}

struct Chosen {  // by the library
    static constexpr int kBlocks = 1, kStages = 0;
};

struct Weights {
    const char* name;
    int n, k;
};

struct Bench {
    Weights shape;
    int rows, live, copies;
    int32_t* count;  // `live`, as data
    uint16_t *w, *x, *x2, *x3;
    float *y, *norm;
    std::vector<float> first;

    // Launches of distinct weights in one graph, each after a norm of x if `chained`; us a launch.
    template <class T>
    double time_once(How how, bool chained) {
        device::Context& c = bound();
        const Rows in{chained ? x3 : x, shape.k, 0};
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        check(cudaStreamBeginCapture(c.stream, cudaStreamCaptureModeThreadLocal), "capture");
        for (int i = 0; i < copies; i++) {
            if (chained) ops::rms_norm(in, Rows{x2, shape.k, 0}, Vec(norm), rows, shape.k, 1e-5f);
            launch_of<T>(i, in, how);
        }
        check(cudaStreamEndCapture(c.stream, &graph), "capture");
        check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
        cudaEvent_t from, to;
        cudaEventCreate(&from);
        cudaEventCreate(&to);
        float best = 1e9f;
        for (int i = 0; i < kReplays; i++) {
            cudaEventRecord(from, c.stream);
            check(cudaGraphLaunch(exec, c.stream), "replay");
            cudaEventRecord(to, c.stream);
            check(cudaEventSynchronize(to), "replay");
            float ms = 0;
            cudaEventElapsedTime(&ms, from, to);
            best = i < 2 ? best : std::min(best, ms);
        }
        cudaGraphExecDestroy(exec);
        cudaGraphDestroy(graph);
        return best * 1e3 / copies;
    }

    template <class T>
    void launch_of(int i, Rows in, How how) {
        const Mat weights{Dev<const uint16_t>(w + size_t(i) * shape.n * shape.k), shape.n, shape.k};
        const Count n(rows, Dev<const int32_t>(count));
        if constexpr (std::is_same_v<T, Chosen>)
            ops::logits(Dev<float>(y), shape.n, in, weights, n);
        else
            run<T, true>(Product<float>{y, size_t(shape.n), in, weights, n}, how);
    }

    template <class T>
    void time(const char* name) {
        const size_t values = size_t(live) * shape.n;
        bool same = true;
        for (bool cluster : {true, false}) {
            check(cudaMemsetAsync(y, 0xAA, values * 4, bound().stream), "memset");
            launch_of<T>(0, Rows{x, shape.k, 0}, {false, cluster});
            std::vector<float> got(values);
            device::download(got.data(), Dev<float>(y), values);
            same = same && (first.empty() || !std::memcmp(first.data(), got.data(), values * 4));
            if (first.empty()) first = got;
        }
        const double floor = 2.0 * shape.n * shape.k / 4.0e6;
        const double us = time_once<T>({false, true}, false);
        std::printf(
            "{\"shape\": \"%s\", \"rows\": %d, \"live\": %d, \"tile\": \"%s\", \"stages\": %d, \"us\": %.2f, "
            "\"floor\": %.2f, "
            "\"of_floor\": %.3f, \"same\": %s",
            shape.name, rows, live, name, T::kStages, us, floor, floor / us, same ? "true" : "false");
        if (T::kBlocks > 1) std::printf(", \"memory\": %.2f", time_once<T>({false, false}, false));
        if (rows == live && (rows == 16 || rows == 64))
            std::printf(", \"after_norm\": %.2f, \"after_norm_early\": %.2f", time_once<T>({false, true}, true),
                        time_once<T>({true, true}, true));
        std::printf("}\n");
    }
};

#define WARPS(...) b.time<Tile<__VA_ARGS__>>("warps " #__VA_ARGS__)
#define GROUPS(...) b.time<Tile<__VA_ARGS__, 16, 1, Way::groups>>("groups " #__VA_ARGS__)
void all_ways(Bench& b) {
    b.time<Chosen>("chosen");
    if (b.rows <= 8) {
        WARPS(1, 8, 1, 8);
        WARPS(1, 4, 1, 8);
        WARPS(2, 4, 2, 8);
    } else if (b.rows <= 16) {
        WARPS(1, 4, 1, 16);
        WARPS(4, 2, 2, 16);
    } else if (b.rows <= 32) {
        WARPS(2, 2, 1, 32);
        WARPS(2, 2, 4, 32);
        WARPS(8, 1, 2, 32);
        GROUPS(4, 2, 1, 32);
        GROUPS(4, 4, 1, 32);
        GROUPS(4, 2, 4, 32);
    } else if (b.rows <= 128) {
        WARPS(2, 2, 1, 64);
        WARPS(2, 2, 2, 64);
        WARPS(4, 1, 2, 64, 16, 2);
        GROUPS(4, 1, 1, 64);
        GROUPS(4, 2, 1, 64);
        GROUPS(4, 2, 2, 64);
        GROUPS(4, 4, 1, 64);
        GROUPS(4, 2, 4, 64);
    }
    if (b.rows <= 16) {
        GROUPS(4, 2, 1, 16);
        GROUPS(4, 4, 1, 16);
        GROUPS(4, 2, 4, 16);
    }
    if (b.rows >= 128) {
        if (b.rows > 128) WARPS(4, 1, 2, 64, 16, 2);
        if (b.rows > 128) {
            GROUPS(4, 2, 4, 64);
        }
        GROUPS(4, 2, 2, 128);
    }
}

}  // namespace

int main(int argc, char** argv) {
    const std::regex wanted(argc > 1 ? argv[1] : ".*");
    const Weights shapes[] = {{"qkv_a", 2112, 7168},         {"q_b", 1536, 1536},        {"o", 7168, 1024},
                              {"shared_gate_up", 512, 7168}, {"shared_down", 7168, 256}, {"dense_gate_up", 4608, 7168},
                              {"dense_down", 7168, 2304},    {"lm_head", 20480, 7168}};
    const auto group = device::open_group({1, 0, KD_ISA_AUTO, true});
    device::bind(device::context(*group, 0));
    uint16_t* w = static_cast<uint16_t*>(device::alloc(3 * kRotate));
    uint16_t* x = static_cast<uint16_t*>(device::alloc(1024 * 8192 * 2));
    uint16_t* x2 = static_cast<uint16_t*>(device::alloc(1024 * 8192 * 2));
    uint16_t* x3 = static_cast<uint16_t*>(device::alloc(1024 * 8192 * 2));
    float* norm = static_cast<float*>(device::alloc(8192 * 4));
    float* y = static_cast<float*>(device::alloc(size_t{1024} * 20480 * 4));
    double* reference = static_cast<double*>(device::alloc(size_t{64} * 20480 * 8));
    random_kernel<<<1024, 256, 0, bound().stream>>>(w, 3 * kRotate / 2, 1);
    random_kernel<<<1024, 256, 0, bound().stream>>>(x, size_t{1024} * 8192, 2);
    random_kernel<<<1024, 256, 0, bound().stream>>>(x2, size_t{1024} * 8192, 3);
    int32_t* count = static_cast<int32_t*>(device::alloc(4));
    for (const Weights& s : shapes) {
        if (!std::regex_search(s.name, wanted)) continue;
        const size_t bytes = size_t(s.n) * s.k * 2;
        // The engine's launches for decoding have room for 64 or 256 rows, of which some are there.
        for (const auto& [rows, live] : {std::pair{1, 1},
                                         {8, 8},
                                         {16, 16},
                                         {32, 32},
                                         {64, 64},
                                         {64, 8},
                                         {64, 24},
                                         {128, 128},
                                         {256, 256},
                                         {256, 96},
                                         {640, 640}}) {
            const int copies =
                static_cast<int>(std::min<size_t>(128, std::max<size_t>(4, (kRotate + bytes - 1) / bytes)));
            const int32_t there = live;
            device::upload(Dev<int32_t>(count), &there, 1);
            device::settle();
            Bench b{s, rows, live, copies, count, w, x, x2, x3, y, norm, {}};
            all_ways(b);
            if (rows > 64 || rows != live) continue;
            reference_kernel<<<dim3(ceil_div(s.n, 256), rows), 256, 0, bound().stream>>>(
                reference, RowsPtr{reinterpret_cast<bf16*>(x), s.k}, reinterpret_cast<const bf16*>(w), s.n, s.k);
            std::vector<double> want(size_t(rows) * s.n);
            device::download(want.data(), reference, want.size() * 8);
            double error = 0, size = 0, worst = 0;
            for (size_t i = 0; i < want.size(); i++) {
                const double d = want[i] - b.first[i];
                error += d * d, size += want[i] * want[i], worst = std::max(worst, d * d);
            }
            std::printf("{\"shape\": \"%s\", \"rows\": %d, \"rms_error\": %.3g, \"worst_error\": %.3g}\n", s.name, rows,
                        std::sqrt(error / size), std::sqrt(worst / size * double(want.size())));
        }
        std::fflush(stdout);
    }
    return 0;
}
