// The all-reduce of a model, with what always follows it: x += sum over the ranks of y, in rank order, h = norm(x). The sum is
// fp32 and goes into the fp32 residual stream unrounded, so all transports give the same bits. Bound by memory: a row of 7,168
// is 14 KB of y and h and twice 28 KB of x; over NVLink by the time of a flag's way there and back, about 2 us.
#include "add_norm.h"

#include "comm.h"
#include "launch.h"
#include "ops.h"
#include "row.h"

namespace kd::cuda {

namespace {

// Elements i .. i + 7 of the sum of row_of(rank) of `ranks` ranks, at most kRanks. As many rows are asked for at once as fit into
// registers on every architecture.
template <bool kVector, int kRanks, class RowOf>
__device__ __forceinline__ Piece sum_of_ranks(RowOf row_of, int ranks, int i, int width) {
    constexpr int kAtOnce = kRanks == 4 && kVector ? 4 : 2;
    Piece total;
#pragma unroll
    for (int first = 0; first < kRanks; first += kAtOnce) {
        Piece part[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; k++)
            if (first + k < ranks) part[k] = read_piece<kVector>(row_of(first + k), i, width);
#pragma unroll
        for (int k = 0; k < kAtOnce; k++)
            if (first + k < ranks)
#pragma unroll
                for (int j = 0; j < kPiece; j++) total.v[j] = first + k == 0 ? part[k].v[j] : total.v[j] + part[k].v[j];
    }
    return total;
}

struct Result {
    RowsPtr h;
    float* x;
    const float* w;
    int width;
    float eps;
    Number n_rows;
    __device__ float* x_row(int r) const { return x + static_cast<size_t>(r) * static_cast<size_t>(width); }
};

// The rest of a row whose first pieces norm has asked for: x += total(i), h = norm(x). sum(i): x + total.
template <bool kVector, int kThreads, bool kEarly, class Sum>
__device__ __forceinline__ void finish_row(Norm<kVector, kThreads, kEarly>& norm, const Result& to, int r, Sum sum) {
    float* const x = to.x_row(r);
    norm.finish(
        to.h[r], to.eps, sum, [&](int i, const Piece& p) { write_piece<kVector>(x, i, to.width, p); },
        [&](int i) { return read_piece<kVector>(x, i, to.width); });
}

// ---- what is summed lies where this kernel can read it: one rank, or the host transport ----------------------------------

struct PartsOfRanks {
    RowsPtr of_rank[KD_MAX_TP];
};

// Below, x was written an operation ago or longer, and its row may have left the cache.
template <bool kVector, int kThreads, bool kAlone>
__global__ void __launch_bounds__(kThreads, 1)
    add_norm_kernel(const __grid_constant__ Result to, const __grid_constant__ PartsOfRanks parts, int ranks) {
    const int r = blockIdx.x;
    float* const x = to.x_row(r);
    const auto sum = [&](int i) {
        Piece total = ask_piece<kVector>(parts.of_rank[0][r], i, to.width);
#pragma unroll 1
        for (int rank = 1; !kAlone && rank < ranks; rank++)
            total = total + read_piece<kVector>(parts.of_rank[rank][r], i, to.width);
        return ask_piece<kVector>(x, i, to.width) + total;
    };
    Norm<kVector, kThreads, kAlone> norm(to.w, to.width);
    if constexpr (kAlone)
        norm.ask_weights();
    else
        prefetch_row(to.w, to.width);
    const bool likely = to.n_rows.likely(r);
    if (likely) prefetch_row(x, to.width);
    wait_for_kernel_before();
    let_next_kernel_start();
    if (!likely && r >= to.n_rows()) return;
    const int n = to.n_rows();
    norm.ask(sum);
    if (r >= n) return;
    finish_row(norm, to, r, sum);
}

// ---- peers: one kernel that meets ------------------------------------------------------------------------------------------

// Pieces of a row that a rank adds up where there are two shots: first_piece(rank) .. first_piece(rank + 1) - 1.
__host__ __device__ constexpr int first_piece(int rank, int ranks, int pieces) { return pieces * rank / ranks; }
__host__ __device__ constexpr int rank_of_piece(int piece, int ranks, int pieces) {
    return ((piece + 1) * ranks - 1) / pieces;
}

// What a rank shows: its rows [most][stride], then, where there are two shots, sums of its pieces [most][stride].
struct Shown {
    int most, stride;
    __host__ __device__ size_t rows_bytes() const { return static_cast<size_t>(most) * stride * sizeof(bf16); }
    __host__ __device__ size_t sums_bytes() const { return static_cast<size_t>(most) * stride * sizeof(float); }
};

template <bool kVector, int kThreads, int kRanks, bool kTwoShots>
__global__ void __launch_bounds__(kThreads, 1) meet_add_norm_kernel(const __grid_constant__ Result to, RowsPtr y,
                                                                    const __grid_constant__ Peers peers, Shown shown) {
    prefetch_row(to.w, to.width);
    wait_for_kernel_before();
    let_next_kernel_start();
    const uint32_t turn = peers.next_turn();
    const int rows = to.n_rows(), width = to.width, step = gridDim.x;
    const auto part_of = [&](int rank, int r) {
        return rank == peers.rank ? y[r] : peers.shown<bf16>(rank, turn) + static_cast<size_t>(r) * shown.stride;
    };
    const auto add_row = [&](int r, auto total) {
        float* const x = to.x_row(r);
        Norm<kVector, kThreads, false> norm(to.w, width);
        const auto add = [&](int i) {
            const Piece more = total(i), sum = read_piece<kVector>(x, i, width) + more;
            write_piece<kVector>(x, i, width, sum);
            return sum;
        };
        norm.ask(add);
        norm.finish(
            to.h[r], to.eps, add, [](int, const Piece&) {}, [&](int i) { return read_piece<kVector>(x, i, width); });
    };
    const auto sums_of = [&](int rank, int r) {
        return reinterpret_cast<float*>(peers.shown<char>(rank, turn) + shown.rows_bytes()) +
               static_cast<size_t>(r) * shown.stride;
    };
    if (static_cast<int>(blockIdx.x) < rows || blockIdx.x == 0) {
        for (int r = blockIdx.x; r < rows; r += step) {
            prefetch_row(to.x_row(r), width);  // comes while the ranks meet
            copy_bits<kVector>(peers.shown<bf16>(peers.rank, turn) + static_cast<size_t>(r) * shown.stride, y[r],
                               width);
        }
        bool here = meet(peers, 0, turn);
        if constexpr (kTwoShots) {
            const int pieces = (width + kPiece - 1) / kPiece;
            if (here)
                for (int r = blockIdx.x; r < rows; r += step) {
                    const auto row_of = [&](int rank) { return part_of(rank, r); };
                    const int end = first_piece(peers.rank + 1, peers.ranks, pieces);
                    for (int q = first_piece(peers.rank, peers.ranks, pieces) + threadIdx.x; q < end; q += kThreads)
                        write_piece<true>(sums_of(peers.rank, r), q * kPiece, shown.stride,
                                          sum_of_ranks<kVector, kRanks>(row_of, peers.ranks, q * kPiece, width));
                }
            here = meet(peers, 1, turn) && here;
            if (here)
                for (int r = blockIdx.x; r < rows; r += step)
                    add_row(r, [&](int i) {
                        const int owner = rank_of_piece(i / kPiece, peers.ranks, pieces);
                        return read_piece<true>(sums_of(owner, r), i, shown.stride);
                    });
        } else if (here) {
            for (int r = blockIdx.x; r < rows; r += step) {
                const auto row_of = [&](int rank) { return part_of(rank, r); };
                add_row(r, [&](int i) { return sum_of_ranks<kVector, kRanks>(row_of, peers.ranks, i, width); });
            }
        }
    }
    leave(peers, turn);
}

// ---- nccl: the rows of each rank are added up by that rank -----------------------------------------------------------------

// parts [ranks][rows][width] -> sums [rows][width]
__global__ void __launch_bounds__(kWideThreads)
    sum_kernel(float* sums, const bf16* parts, int ranks, size_t rows, int width) {
    wait_for_kernel_before();
    let_next_kernel_start();
    const size_t r = blockIdx.x;
    for (int i = threadIdx.x * kPiece; i < width; i += kWideThreads * kPiece) {
        Piece total = read_piece<false>(parts + r * width, i, width);
        for (int rank = 1; rank < ranks; rank++)
            total = total + read_piece<false>(parts + (rank * rows + r) * width, i, width);
        write_piece<false>(sums + r * width, i, width, total);
    }
}

template <bool kVector, int kThreads>
__global__ void __launch_bounds__(kThreads) add_sums_kernel(const __grid_constant__ Result to, const float* sums) {
    wait_for_kernel_before();
    let_next_kernel_start();
    const int r = blockIdx.x;
    if (r >= to.n_rows()) return;
    const float* const row = sums + static_cast<size_t>(r) * static_cast<size_t>(to.width);
    const auto sum = [&](int i) {
        return read_piece<kVector>(to.x_row(r), i, to.width) + read_piece<kVector>(row, i, to.width);
    };
    Norm<kVector, kThreads> norm(to.w, to.width);
    norm.ask_weights();
    norm.ask(sum);
    finish_row(norm, to, r, sum);
}

// ---- host ------------------------------------------------------------------------------------------------------------------

// go<vectors, threads>() as the width and the alignment ask.
template <class Go>
void by_shape(bool aligned, int width, Go go) {
    if (!(vectors(width) && aligned))
        go.template operator()<false, kWideThreads>();
    else if (width <= kNarrow)
        go.template operator()<true, kNarrowThreads>();
    else
        go.template operator()<true, kWideThreads>();
}

Result result(const AddNorm& a) { return {raw(a.h), raw(a.x), raw(a.w), a.width, a.eps, number(a.n_rows)}; }
bool aligned(const AddNorm& a) { return aligned16(a.h) && aligned16(a.x) && aligned16(a.w); }

Shown shown_by(int rows, int width) { return {rows, (width + kPiece - 1) / kPiece * kPiece}; }

void add_parts(const AddNorm& a, const PartsOfRanks& parts, int ranks, bool parts_aligned) {
    by_shape(aligned(a) && parts_aligned, a.width, [&]<bool kVector, int kThreads>() {
        const auto go = [&]<bool kAlone>() {
            launch_as<add_norm_kernel<kVector, kThreads, kAlone>>({.early = true}, a.n_rows.most, kThreads, result(a),
                                                                  parts, ranks);
        };
        ranks == 1 ? go.template operator()<true>() : go.template operator()<false>();
    });
}

void meeting_on_the_host(const AddNorm& a) {
    const size_t bytes = static_cast<size_t>(a.n_rows.most) * static_cast<size_t>(a.width) * sizeof(bf16);
    const Rows mine{share_buffer(bytes), a.width, 0};
    ops::copy_rows(mine, {}, a.y, {}, a.n_rows, a.width);
    const Shared all = share_filled(bytes);
    PartsOfRanks parts;
    for (int i = 0; i < tp(); i++)
        parts.of_rank[i] = {const_cast<bf16*>(static_cast<const bf16*>(all.of_rank[i])), a.width};
    add_parts(a, parts, tp(), true);
}

void through_nccl(const AddNorm& a) {
    const int ranks = tp(), each = ceil_div(a.n_rows.most, ranks);
    if (each == 0) return;
    const size_t some = static_cast<size_t>(each) * static_cast<size_t>(a.width),
                 all = some * static_cast<size_t>(ranks);
    bf16* const mine = scratch<bf16>(Use::all_reduce, 2 * all);
    bf16* const parts = mine + all;
    float* const sums = scratch<float>(Use::sums, all);
    float* const own = sums + some * static_cast<size_t>(rank());
    ops::copy_rows({mine, a.width, 0}, {}, a.y, {}, a.n_rows, a.width);
    all_to_all(parts, mine, some * sizeof(bf16));
    launch<sum_kernel>(each, kWideThreads, own, parts, ranks, static_cast<size_t>(each), a.width);
    all_gather(sums, own, some * sizeof(float));
    by_shape(aligned(a), a.width, [&]<bool kVector, int kThreads>() {
        launch<add_sums_kernel<kVector, kThreads>>(a.n_rows.most, kThreads, result(a), sums);
    });
}

}  // namespace

void add_norm_alone(const AddNorm& a) { add_parts(a, {{raw(a.y)}}, 1, aligned16(a.y)); }

size_t shown_bytes(int rows, int width, bool two_shots) {
    const Shown shown = shown_by(rows, width);
    return shown.rows_bytes() + (two_shots ? shown.sums_bytes() : 0);
}

void add_norm_among(const Peers& peers, const AddNorm& a, bool two_shots) {
    const int blocks = std::max(1, std::min(a.n_rows.most, most_waiting()));
    by_shape(aligned(a) && aligned16(a.y), a.width, [&]<bool kVector, int kThreads>() {
        const auto go = [&]<int kRanks, bool kTwoShots>() {
            launch_as<meet_add_norm_kernel<kVector, kThreads, kRanks, kTwoShots>>(
                {.early = true}, blocks, kThreads, result(a), raw(a.y), peers, shown_by(a.n_rows.most, a.width));
        };
        const auto by_shots = [&]<int kRanks>() {
            two_shots ? go.template operator()<kRanks, true>() : go.template operator()<kRanks, false>();
        };
        if (peers.ranks <= 2)
            by_shots.template operator()<2>();
        else if (peers.ranks <= 4)
            by_shots.template operator()<4>();
        else
            by_shots.template operator()<8>();
    });
}

}  // namespace kd::cuda

namespace kd::ops {

void add_norm(Rows h, Dev<float> x, Rows y, Vec w, Count n_rows, int width, float eps) {
    using namespace cuda;
    const AddNorm a{h, x, y, w, n_rows, width, eps};
    if (tp() == 1) return add_norm_alone(a);
    const bool two_shots = n_rows.most >= two_shots_from();
    if (waits_to_be_recorded()) peers(shown_bytes(n_rows.most, width, two_shots));
    switch (transport()) {
        case Transport::host: return meeting_on_the_host(a);
        case Transport::nccl: return through_nccl(a);
        case Transport::peers: add_norm_among(peers(shown_bytes(n_rows.most, width, two_shots)), a, two_shots);
    }
}

}  // namespace kd::ops
