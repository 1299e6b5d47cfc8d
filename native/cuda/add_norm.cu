// The all-reduce of a model, with what always follows it: x += sum over the ranks of y, in rank order, h = norm(x). The sum is
// fp32 and goes into the fp32 residual stream unrounded, so all transports give the same bits. Bound by memory: a row of 7,168
// is 14 KB of y and h and twice 28 KB of x. Over NVLink by the time of a word's way to the other GPU, about 1 us, and by the
// bytes sent: (ranks - 1) * 14 KB a row in one shot, in two (ranks - 1) / ranks * (14 KB + 28 KB of sums).
#include "add_norm.h"

#include <type_traits>

#include "comm.h"
#include "launch.h"
#include "ops.h"
#include "row.h"

namespace kd::cuda {

namespace {

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

// ---- peers: one kernel that sends and takes (peers.h) ----------------------------------------------------------------------

// Where ranks put what they send, in a half of each rank's memory: for each sending rank its parts, then its sums. In one shot a
// part is all of a row and nobody sends sums. In two, a rank is sent those pieces of a row that it adds up, and sends the sums.
struct Places {
    int most;    // rows
    int pieces;  // of a row
    int share;   // most of them that a rank adds up; 0: one shot

    __host__ __device__ int first(int rank, int ranks) const { return pieces * rank / ranks; }
    __host__ __device__ int owner(int piece, int ranks) const { return ((piece + 1) * ranks - 1) / pieces; }
    __host__ __device__ size_t of_rank() const {
        return static_cast<size_t>(most) * (share ? 3 * share : pieces) * sizeof(uint4);
    }
    __device__ uint4* parts(char* half, int from, int r) const {
        return reinterpret_cast<uint4*>(half + from * of_rank()) + static_cast<size_t>(r) * (share ? share : pieces);
    }
    __device__ uint4* sums(char* half, int from, int r) const {  // two a piece
        return reinterpret_cast<uint4*>(half + from * of_rank()) + static_cast<size_t>(most + 2 * r) * share;
    }
};

// Bits of elements i .. i + 7; those past the row are 0.
template <bool kVector>
__device__ __forceinline__ uint4 read_bits(const bf16* row, int i, int width) {
    if constexpr (kVector) return load16(row + i);
    const uint16_t* bits = reinterpret_cast<const uint16_t*>(row);
    const auto pair = [&](int j) {
        const uint32_t low = j < width ? bits[j] : 0, high = j + 1 < width ? bits[j + 1] : 0;
        return low | high << 16;
    };
    return make_uint4(pair(i), pair(i + 2), pair(i + 4), pair(i + 6));
}

// The blocks of a cluster as one: the same threads with the same pieces, so the same sums, on several multiprocessors.
template <int kThreads, int kSplit>
struct ClusterTeam {
    static constexpr int kHere = kThreads / kSplit;
    static __device__ __forceinline__ int thread() { return static_cast<int>(blockIdx.y * kHere + threadIdx.x); }
    // Once a kernel, after cluster_arrive().
    static __device__ __forceinline__ float sum(float v) {
        __shared__ float part[kThreads / kWarp];
        v = warp_sum(v);
        cluster_wait();  // all blocks have started
        if (threadIdx.x % kWarp < kSplit) store_to_block(part + thread() / kWarp, threadIdx.x % kWarp, v);
        cluster_barrier();
        v = part[0];
#pragma unroll
        for (int w = 1; w < kThreads / kWarp; w++) v += part[w];
        return v;
    }
};

constexpr int kSplitRow = 4;  // blocks of two ranks' kernels that share a row, where all rows can have so many

// kSplit blocks share a row; if more than one, there is a cluster for every row.
template <bool kVector, int kThreads, int kRanks, bool kTwoShots, int kSplit>
__global__ void __launch_bounds__(kThreads / kSplit, 1)
    all_reduce_norm_kernel(const __grid_constant__ Result to, RowsPtr y, const __grid_constant__ Peers peers,
                           const __grid_constant__ Places places) {
    // Of two ranks registers last for pieces that are waited for together, and in a cluster for weights meanwhile.
    constexpr bool kPair = kRanks == 2, kSplits = kSplit > 1;
    using Team = std::conditional_t<kSplits, ClusterTeam<kThreads, kSplit>, BlockTeam<kThreads>>;
    const int width = to.width, ranks = peers.ranks, me = peers.rank, step = gridDim.x;
    Norm<kVector, kThreads, kSplits, Team> norm(to.w, width);
    if constexpr (kSplits) {
        cluster_arrive();
        norm.ask_weights();
    } else {
        prefetch_row(to.w, width);
    }
    wait_for_kernel_before();
    let_next_kernel_start();
    const uint32_t turn = peers.next_turn();
    const int rows = to.n_rows();
    char* const mine = peers.half_of(me, turn);

#pragma unroll 1
    for (int r = blockIdx.x; r < rows; r += step) {
        for (int q = Team::thread(); q < places.pieces; q += kThreads) {
            const uint4 bits = read_bits<kVector>(y[r], q * kPiece, width);
            if constexpr (kTwoShots) {
                const int owner = places.owner(q, ranks);
                if (owner != me)
                    send(places.parts(peers.half_of(owner, turn), me, r) + q - places.first(owner, ranks), bits);
            } else {
#pragma unroll
                for (int k = 0; k < kRanks; k++)
                    if (k < ranks && k != me) send(places.parts(peers.half_of(k, turn), me, r) + q, bits);
            }
        }
        if constexpr (!kSplits) prefetch_row(to.x_row(r), width);
    }
    __syncthreads();
    const bool last = threadIdx.x == 0 && last_to_ask(peers);

    // The sum in rank order of pieces q[..] of row r, which the others sent to places 0 .. of `at`; a piece < 0 is not there.
    const auto sums_of = [&]<int kN>(Piece(&total)[kN], const int (&q)[kN], int r, int at) {
        // Places a piece that are looked at together: the other's, or those of some ranks, of which mine stays empty.
        constexpr int kAtOnce = kPair ? 1 : 4;
#pragma unroll
        for (int first = 0; first < (kPair ? 1 : kRanks); first += kAtOnce) {
            const auto rank_of = [&](int i) { return kPair ? 1 - me : first + i % kAtOnce; };
            uint4 got[kN * kAtOnce];
            const auto place = [&](int i) {
                const int c = i / kAtOnce, k = rank_of(i);
                return q[c] >= 0 && k < ranks && k != me ? places.parts(mine, k, r) + q[c] - at : nullptr;
            };
            take(got, place, peers, turn, rank_of);
#pragma unroll
            for (int c = 0; c < kN; c++) {
                if (q[c] < 0) continue;
                const uint4 own = read_bits<kVector>(y[r], q[c] * kPiece, width);
#pragma unroll
                for (int k = first; k < first + (kPair ? 2 : kAtOnce); k++)
                    if (k < ranks) {
                        const Piece part = piece_of(k == me ? own : got[c * kAtOnce + (kPair ? 0 : k - first)]);
                        total[c] = k == 0 ? part : total[c] + part;
                    }
            }
        }
    };

    if constexpr (kTwoShots) {
        const int begin = places.first(me, ranks), end = places.first(me + 1, ranks);
#pragma unroll 1
        for (int r = blockIdx.x; r < rows; r += step)
            for (int q = begin + threadIdx.x; q < end; q += kThreads) {
                Piece total[1];
                sums_of(total, {q}, r, begin);
                const float* const v = total[0].v;
#pragma unroll 1  // registers
                for (int k = 0; k < ranks; k++) {
                    uint4* const there = places.sums(peers.half_of(k, turn), me, r) + 2 * (q - begin);
                    send(there, words_of(v));
                    send(there + 1, words_of(v + 4));
                }
            }
    }

    // The sums of pieces of row r that whoever adds them up has sent.
    const auto sent_sums = [&]<int kN>(Piece(&total)[kN], const int (&q)[kN], int r) {
        uint4 got[2 * kN];
        const auto owner = [&](int i) { return places.owner(q[i / 2], ranks); };
        const auto place = [&](int i) {
            const int piece = q[i / 2], from = owner(i);
            return piece >= 0 ? places.sums(mine, from, r) + 2 * (piece - places.first(from, ranks)) + i % 2 : nullptr;
        };
        take(got, place, peers, turn, owner);
#pragma unroll
        for (int c = 0; c < kN; c++) total[c] = piece_of(got[2 * c], got[2 * c + 1]);
    };

#pragma unroll 1
    for (int r = blockIdx.x; r < rows; r += step) {
        float* const x = to.x_row(r);
        const auto add = [&]<int kN>(Piece(&sum)[kN], const int (&q)[kN]) {
            Piece before[kN], total[kN];
#pragma unroll
            for (int c = 0; c < kN; c++)
                if (q[c] >= 0) before[c] = read_piece<kVector>(x, q[c] * kPiece, width);
            if constexpr (kTwoShots)
                sent_sums(total, q, r);
            else
                sums_of(total, q, r, 0);
#pragma unroll
            for (int c = 0; c < kN; c++)
                if (q[c] >= 0) {
                    sum[c] = before[c] + total[c];
                    write_piece<kVector>(x, q[c] * kPiece, width, sum[c]);
                }
        };
        const auto piece = [&](int c) {
            const int q = Team::thread() + c * kThreads;
            return q < places.pieces ? q : -1;
        };
        if constexpr (kPair) {
            add(norm.kept, {piece(0), piece(1)});
        } else {
#pragma unroll
            for (int c = 0; c < kKept; c++) {
                Piece sum[1];
                add(sum, {piece(c)});
                norm.kept[c] = sum[0];
            }
        }
        const auto beyond = [&](int i) {
            Piece sum[1];
            add(sum, {i / kPiece});
            return sum[0];
        };
        norm.finish(
            to.h[r], to.eps, beyond, [](int, const Piece&) {}, [&](int i) { return read_piece<kVector>(x, i, width); });
    }

    const int peer = Team::thread();
    if (rows == 0 && blockIdx.x == 0 && peer < ranks && peer != me) {
        send(places.parts(peers.half_of(peer, turn), me, 0), {});
        uint4 nothing[1];
        take(nothing, [&](int) { return places.parts(mine, peer, 0); }, peers, turn, [&](int) { return peer; });
    }
    if (last) ended_here(peers, turn);
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

Places places_of(int rows, int width, int ranks, bool two_shots) {
    const int pieces = (width + kPiece - 1) / kPiece;
    return {std::max(rows, 1), pieces, two_shots ? (pieces + ranks - 1) / ranks : 0};
}

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

size_t sent_bytes(int rows, int width, int ranks, bool two_shots) {
    return places_of(rows, width, ranks, two_shots).of_rank() * static_cast<size_t>(ranks);
}

void add_norm_among(const Peers& peers, const AddNorm& a, bool two_shots) {
    const int rows = std::max(1, a.n_rows.most), most = most_waiting(), blocks = std::max(1, std::min(rows, most));
    by_shape(aligned(a) && aligned16(a.y), a.width, [&]<bool kVector, int kThreads>() {
        const auto go = [&]<int kRanks, bool kTwoShots, int kBlocks>() {
            launch_as<all_reduce_norm_kernel<kVector, kThreads, kRanks, kTwoShots, kBlocks>>(
                {.early = true, .cluster = kBlocks}, dim3(blocks, kBlocks), kThreads / kBlocks, result(a), raw(a.y),
                peers, places_of(a.n_rows.most, a.width, peers.ranks, two_shots));
        };
        const auto by_shots = [&]<int kRanks>() {
            if (two_shots) return go.template operator()<kRanks, true, 1>();
            if constexpr (kRanks == 2 && kVector && kThreads == kWideThreads)
                if (bound().major >= 9 && kSplitRow * rows <= most)
                    return go.template operator()<kRanks, false, kSplitRow>();
            go.template operator()<kRanks, false, 1>();
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
    const bool two_shots = static_cast<size_t>(n_rows.most) * static_cast<size_t>(width) >= two_shots_from();
    const size_t bytes = sent_bytes(n_rows.most, width, tp(), two_shots);
    if (waits_to_be_recorded()) peers(bytes);
    switch (transport()) {
        case Transport::host: return meeting_on_the_host(a);
        case Transport::nccl: return through_nccl(a);
        case Transport::peers: add_norm_among(peers(bytes), a, two_shots);
    }
}

}  // namespace kd::ops
