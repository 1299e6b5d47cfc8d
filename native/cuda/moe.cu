// The routed experts. Up to kMostStreamed rows of shapes that stream_experts() is made for go there. Here are more rows of them, with
// the same bits, the other shapes and the other GPUs, in four kernels: who goes where, gate and up with silu, down, and the weighted
// sum.
//
// Floor: the bytes of the experts that have rows at the speed of memory. Products are 2 * 2 * 3 * hidden * inter a pair: nothing
// beside it.
#include <algorithm>

#include "error.h"
#include "launch.h"
#include "mma.h"
#include "moe_lists.h"
#include "moe_slots.h"
#include "moe_stream.h"
#include "ops.h"
#include "raw.h"
#include "w4_layout.h"
#include "w4_math.h"

namespace kd::ops {

namespace {

using namespace kd::cuda;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBlocksPerProcessor = 2;
constexpr int kChunkPairs = 16;
constexpr int kMostStreamed = 256;  // rows; for many, four kernels are faster: chunks of 16 read weights less often

// ---- products -------------------------------------------------------------------------------------------------------

// A warp multiplies strips of 32 matrix rows with up to 16 pairs of one expert. It streams bricks of weights through a
// ring of its own in shared memory, without a stop between one strip and the next; activations come from the caches.
// Where k is long, a team of up to 8 warps shares a strip: each takes a part of k, and the parts are added in their
// order. A weight is 4 bits until it is in registers; there it is nibble - 8, exact in bf16 (and small: w4_math.h), and the
// scale multiplies the fp32 sum over its 32 columns. What a pair gets depends on its row and the weights only: the columns
// of a product do not see one another, absent ones are zero, and the parts of k follow from k.
//
// Woven sums are those of stream_experts(): a part is not a stretch of k but four bricks of every 32, in two chains of every
// other two bricks, so that parts are added in pairs, from 0.
constexpr int kStages = 8;  // a power of two
constexpr int kMostTiles = kChunkPairs / 8;
constexpr int kMostGroup = 4;  // bricks whose activations are fetched at once
constexpr int kRun = 4;        // woven: a warp's bricks that lie side by side
static_assert(kRun == 2 * moe_stream::kChainRun && 2 * kWarps == moe_stream::kChains);
constexpr int kBrickBytes = kWarp * (sizeof(uint4) + sizeof(uint2));  // of the ring: four lanes hold the same scales
constexpr int kRingBytes = kWarps * kStages * kBrickBytes;
constexpr int kValues = 8 * kMostTiles;  // accumulators of a lane
constexpr int kSumBytes = kWarps * kValues * kWarp * sizeof(float);
constexpr int kProductBytes = kRingBytes + kSumBytes;

// Warps that share a strip: at least 8 bricks each, at most a block.
constexpr int parts_of(int groups) {
    int parts = 1;
    while (parts < kWarps && groups / (2 * parts) >= 8) parts *= 2;
    return parts;
}
static_assert(parts_of(moe_stream::kDownBricks) == 1, "stream_experts() has one chain there");

struct Product {
    const uint32_t* q;
    const uint16_t* s;
    int strips, groups;  // of an expert's matrix; bricks of a strip
    int parts;           // of k, one a warp; woven: as many as warps
    int slots;           // pairs that have a row of activations in common
    Lists lists;
};

// Eight bytes; see cp_async_16.
__device__ __forceinline__ void cp_async_8(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;\n" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

// The warps of a team meet; other teams of the block do not.
__device__ __forceinline__ void meet(int team, int warps) {
    asm volatile("bar.sync %0, %1;\n" ::"r"(team + 1), "r"(warps * kWarp) : "memory");
}

// What a team has before it: a strip of a chunk's expert, then the one `teams` further on, and so on.
struct Work {
    int chunk, strip, step_chunk, step_strip;
    __device__ Work(int first, int teams, int strips)
        : chunk(first / strips), strip(first % strips), step_chunk(teams / strips), step_strip(teams % strips) {}
    __device__ void next(int strips) {
        chunk += step_chunk;
        strip += step_strip;
        if (strip >= strips) {
            strip -= strips;
            chunk++;
        }
    }
};

// The next bricks of a warp, strip after strip. Every lane copies what it will read itself, so no barrier is needed.
template <bool kWoven>
struct Feed {
    const Product& p;
    uint4* q_ring;
    uint2* s_ring;
    int begin, bricks, n_chunks;  // of a strip, this warp's part; of the call
    Work work;
    int expert;          // of the work after this
    unsigned brick = 0;  // the next, and how many are left of the strip's
    int left = 0;

    __device__ Feed(const Product& p, uint4* q_ring, uint2* s_ring, int part, int n_chunks, const Work& first)
        : p(p), q_ring(q_ring), s_ring(s_ring), n_chunks(n_chunks), work(first) {
        begin = kWoven ? part * kRun : p.groups * part / p.parts;
        bricks = kWoven ? p.groups / kWarps : p.groups * (part + 1) / p.parts - begin;
        expert = work.chunk < n_chunks ? __ldcg(&p.lists.chunk[work.chunk].expert) : 0;
        open();
    }
    __device__ void open() {
        if (work.chunk >= n_chunks) return;
        brick = (static_cast<unsigned>(expert) * p.strips + work.strip) * p.groups + begin;
        left = bricks;
        work.next(p.strips);
        if (work.chunk < n_chunks) expert = __ldcg(&p.lists.chunk[work.chunk].expert);
    }
    // Start the copy of one more brick, if there is one.
    __device__ void fetch(unsigned slot) {
        if (left > 0) {
            const int lane = threadIdx.x % kWarp;
            const size_t at = brick++;
            cp_async_16(&q_ring[slot * kWarp + lane], reinterpret_cast<const uint4*>(p.q) + at * kWarp + lane);
            cp_async_8(&s_ring[slot * kWarp + lane], reinterpret_cast<const uint2*>(p.s) + at * 8 + lane / 4);
            if (--left == 0)
                open();
            else if (kWoven && left % kRun == 0)
                brick += moe_stream::kLapBricks - kRun;
        }
        cp_async_commit();
    }
};

template <bool kAligned>
__device__ __forceinline__ uint4 load8(const bf16* p) {
    if constexpr (kAligned) return load16(p);
    const auto* half = reinterpret_cast<const uint16_t*>(p);
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = half[2 * i] | static_cast<uint32_t>(half[2 * i + 1]) << 16;
    return {w[0], w[1], w[2], w[3]};
}

// A strip, and the pairs it is multiplied with: first .. first + n - 1 of the order. Past the last there are none.
struct Item {
    int first, n, strip;
    __device__ Item(const Work& work, const Lists& lists, int n_chunks) : first(0), n(0), strip(work.strip) {
        if (work.chunk >= n_chunks) return;
        first = __ldcg(&lists.chunk[work.chunk].first);
        n = __ldcg(&lists.chunk[work.chunk].n);
    }
};

// Activations come from the caches, which take longer than a brick does. They are fetched for several bricks at once
// while those before are worked on (a warp waits for all it has under way, not for the oldest, so one at a time would
// be no use), and those of an item's first bricks while the item before it is still worked on.
template <int kTiles>
constexpr int kGroup = kTiles == 1 ? kMostGroup : 1;

// Which pair of all is number `pair` of the item's.
__device__ __forceinline__ int pair_of(const Product& p, const Item& item, int pair) {
    return __ldcg(p.lists.pair + item.first + pair);
}

// Where the lane's columns of a pair begin.
__device__ __forceinline__ unsigned start_of(const Product& p, const Item& item, int pair, RowsPtr x, int first_brick) {
    if (pair >= item.n) return 0;
    const int r = pair_of(p, item, pair) / p.slots;
    return static_cast<unsigned>(r) * static_cast<unsigned>(x.stride) + first_brick * w4::kBrick + threadIdx.x % 4 * 8;
}

// Of the first eight pairs, the first bricks.
template <bool kAligned>
__device__ __forceinline__ void begin_item(uint4 (&v)[kMostGroup], const Item& item, unsigned from, RowsPtr x,
                                           int bricks) {
    const int g = threadIdx.x % kWarp / 4;
#pragma unroll
    for (int u = 0; u < kMostGroup; u++) {
        v[u] = {};
        if (g < item.n && u < bricks) v[u] = load8<kAligned>(x.p + from + u * w4::kBrick);
    }
}

// As w4::multiply_brick, for 8 * kTiles activations.
template <int kTiles>
__device__ __forceinline__ void multiply_brick(float (&d)[2][kTiles][4], uint4 words, uint2 scales,
                                               const uint4 (&v)[kTiles]) {
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
        uint32_t a[2][4];
        w4::widen(a[0], tile == 0 ? words.x : words.z);
        w4::widen(a[1], tile == 0 ? words.y : words.w);
        const uint32_t both = tile == 0 ? scales.x : scales.y;
        const float low = low_bf16(both), high = high_bf16(both);
#pragma unroll
        for (int i = 0; i < kTiles; i++) {
            float sum[4] = {};
            mma_bf16(sum, a[0], {v[i].x, v[i].y});
            mma_bf16(sum, a[1], {v[i].z, v[i].w});
            d[tile][i][0] = __fmaf_rn(low, sum[0], d[tile][i][0]);
            d[tile][i][1] = __fmaf_rn(low, sum[1], d[tile][i][1]);
            d[tile][i][2] = __fmaf_rn(high, sum[2], d[tile][i][2]);
            d[tile][i][3] = __fmaf_rn(high, sum[3], d[tile][i][3]);
        }
    }
}

// The strip of `feed`'s oldest bricks times the item's pairs, kTiles * 8 of them at most, and store(pair of the item,
// tile of the strip, value of row g, of row g + 8). `from` and `head` are start_of and begin_item of the item; then
// they are those of the next.
template <int kTiles, bool kAligned, bool kWoven, class Store>
__device__ __forceinline__ void multiply(const Product& p, Feed<kWoven>& feed, unsigned& slot, float* sums, int team,
                                         int part, const Item& item, const Item& next, unsigned& from_head,
                                         uint4 (&head)[kMostGroup], RowsPtr x, Store store) {
    constexpr int group = kGroup<kTiles>, turn = kWoven ? kRun : group, chains = kWoven ? 2 : 1;
    const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    unsigned from[kTiles];
    uint4 soon[group][kTiles];                    // of the next bricks
    const int parts = kWoven ? kWarps : p.parts;  // known to the compiler, which has no register left
    const unsigned from_next = start_of(p, next, g, x, feed.begin);
#pragma unroll
    for (int i = 0; i < kTiles; i++) {
        from[i] = i == 0 ? from_head : start_of(p, item, 8 * i + g, x, feed.begin);
#pragma unroll
        for (int u = 0; u < group; u++) {
            soon[u][i] = {};
            if (i == 0)
                soon[u][i] = head[u];
            else if (8 * i + g < item.n && u < feed.bricks)
                soon[u][i] = load8<kAligned>(x.p + from[i] + u * w4::kBrick);
        }
    }
    float chain[chains][2][kTiles][4] = {};
#pragma unroll 1
    for (int left = feed.bricks; left > 0; left -= turn) {
#pragma unroll
        for (int first = 0; first < turn; first += group) {
            uint4 v[group][kTiles];
#pragma unroll
            for (int i = 0; i < kTiles; i++) {
                from[i] += (kWoven && first + group == turn ? moe_stream::kLapBricks - first : group) * w4::kBrick;
#pragma unroll
                for (int u = 0; u < group; u++) {
                    v[u][i] = w4::lift(soon[u][i]);
                    if (((kWoven && first + group < turn) || first + group + u < left) && 8 * i + g < item.n)
                        soon[u][i] = load8<kAligned>(x.p + from[i] + u * w4::kBrick);
                }
            }
#pragma unroll
            for (int u = 0; u < group; u++) {
                if (!kWoven && u >= left) break;
                cp_async_wait<kStages - 2>();
                const uint4 word = feed.q_ring[slot * kWarp + lane];
                const uint2 scale = feed.s_ring[slot * kWarp + lane];
                feed.fetch((slot + kStages - 1) % kStages);  // which was read before this one
                slot = (slot + 1) % kStages;
                multiply_brick(chain[(first + u) / moe_stream::kChainRun % chains], word, scale, v[u]);
            }
        }
    }
    auto& d = chain[0];
#pragma unroll
    for (int tile = 0; kWoven && tile < 2; tile++)
#pragma unroll
        for (int i = 0; i < kTiles; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) d[tile][i][j] += chain[chains - 1][tile][i][j];
#pragma unroll
    for (int tile = 0; tile < 2; tile++)
#pragma unroll
        for (int i = 0; i < kTiles; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) d[tile][i][j] *= w4::lowered(j);
    from_head = from_next;
    begin_item<kAligned>(head, next, from_next, x, feed.bricks);
    if (parts == 1) {
#pragma unroll
        for (int tile = 0; tile < 2; tile++)
#pragma unroll
            for (int i = 0; i < kTiles; i++)
#pragma unroll
                for (int j = 0; j < 2; j++)
                    if (8 * i + 2 * t + j < item.n) store(8 * i + 2 * t + j, tile, d[tile][i][j], d[tile][i][j + 2]);
        return;
    }
    const int warp = threadIdx.x / kWarp;
    meet(team, parts);  // the sums of the strip before this one have been read
#pragma unroll
    for (int tile = 0; tile < 2; tile++)
#pragma unroll
        for (int i = 0; i < kTiles; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                sums[(warp * kValues + (tile * kTiles + i) * 4 + j) * kWarp + lane] = d[tile][i][j];
    meet(team, parts);
    for (int v = part; v < 4 * kTiles; v += parts) {  // tile, eight pairs, one of the lane's two
        const int tile = v / (2 * kTiles), i = v / 2 % kTiles, j = v % 2, pair = 8 * i + 2 * t + j;
        const float* at = sums + (team * parts * kValues + (tile * kTiles + i) * 4 + j) * kWarp + lane;
        const auto of = [&](int part, int half) { return at[part * kValues * kWarp + half * 2 * kWarp]; };
        float low = kWoven ? 0 : of(0, 0), high = kWoven ? 0 : of(0, 1);
        if constexpr (kWoven)
            for (int two = 0; two < kWarps; two += 2) {
                low += of(two, 0) + of(two + 1, 0);
                high += of(two, 1) + of(two + 1, 1);
            }
        else
            for (int other = 1; other < parts; other++) {
                low += of(other, 0);
                high += of(other, 1);
            }
        if (pair < item.n) store(pair, tile, low, high);
    }
}

// Gate and up: to[pair][inter] bf16 = silu(gate x) * up x. Down: to[pair][hidden] fp32.
template <bool kGate, bool kAligned, bool kWoven>
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    expert_product(std::conditional_t<kGate, bf16, float>* to, RowsPtr x, Product p) {
    extern __shared__ uint4 memory[];
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4;
    uint4* const q_ring = memory + warp * kStages * kWarp;
    uint2* const s_ring = reinterpret_cast<uint2*>(memory + kWarps * kStages * kWarp) + warp * kStages * kWarp;
    float* const sums = reinterpret_cast<float*>(reinterpret_cast<char*>(memory) + kRingBytes);
    const int team = kWoven ? 0 : warp / p.parts, part = kWoven ? warp : warp % p.parts;
    const int teams = kWoven ? 1 : kWarps / p.parts;
    // Gate and up wait for the lists. Down does not: gate and up had them before they let it start. It reads them past
    // the first-level cache, which may hold an earlier call's.
    if constexpr (kGate) wait_for_kernel_before();
    const int n_chunks = __ldcg(p.lists.n_chunks);
    Work work(static_cast<int>(blockIdx.x) * teams + team, static_cast<int>(gridDim.x) * teams, p.strips);
    Feed<kWoven> feed(p, q_ring, s_ring, part, n_chunks, work);
#pragma unroll 1
    for (int i = 0; i < kStages - 1; i++) feed.fetch(i);
    if constexpr (!kGate) wait_for_kernel_before();
    let_next_kernel_start();
    unsigned slot = 0;
    Item item(work, p.lists, n_chunks);
    work.next(p.strips);
    Item next(work, p.lists, n_chunks);
    unsigned from = start_of(p, item, g, x, feed.begin);
    uint4 head[kMostGroup];
    begin_item<kAligned>(head, item, from, x, feed.bricks);
    while (item.n > 0) {
        work.next(p.strips);
        const Item after(work, p.lists, n_chunks);  // read an item before it is needed
        const auto store = [&](int pair, int tile, float low, float high) {
            const unsigned r = pair_of(p, item, pair);
            if constexpr (kGate) {
                const unsigned inter = p.strips * w4::kTile;
                to[r * inter + item.strip * w4::kTile + tile * 8 + g] =
                    __float2bfloat16_rn(low / (1 + expf(-low)) * high);
            } else {
                const unsigned at = (r * p.strips + item.strip) * w4::kStrip + tile * w4::kTile + g;
                to[at] = low;
                to[at + 8] = high;
            }
        };
        if (item.n <= 8)
            multiply<1, kAligned, kWoven>(p, feed, slot, sums, team, part, item, next, from, head, x, store);
        else
            multiply<kMostTiles, kAligned, kWoven>(p, feed, slot, sums, team, part, item, next, from, head, x, store);
        item = next;
        next = after;
    }
    cp_async_wait<0>();
}

template <bool kGate, bool kAligned, bool kWoven, class T>
void product(T* to, RowsPtr x, int slots, const W4& w, const Lists& lists, int most) {
    const int groups = w.k / w4::kBrick, strips = w.n / w4::kStrip, parts = kWoven ? kWarps : parts_of(groups);
    const Product p{raw(w.q), raw(w.s), strips, groups, parts, slots, lists};
    const size_t blocks = (static_cast<size_t>(most) * strips * parts + kWarps - 1) / kWarps;
    const size_t grid = std::min<size_t>(blocks, static_cast<size_t>(bound().processors) * kBlocksPerProcessor);
    launch_as<expert_product<kGate, kAligned, kWoven>, kProductBytes>({.early = true}, static_cast<unsigned>(grid),
                                                                      kThreads, to, x, p);
}

}  // namespace

void moe(Rows y, Rows h, Dev<int32_t> expert, Dev<float> weight, const Experts& w, Count n_rows, const Shape& s) {
    if (n_rows.most <= 0) return;
    const int slots = s.experts_per_token, hidden = w.gate_up.k, inter = w.down.k;
    KD_CHECK(hidden % w4::kBrick == 0 && inter % w4::kBrick == 0 && w.gate_up.n == 2 * inter && w.down.n == hidden);
    const bool woven = can_stream_experts(h, w);
    if (woven && n_rows.most <= kMostStreamed) return stream_experts(y, h, raw(expert), raw(weight), w, n_rows, slots);
    const size_t pairs = static_cast<size_t>(n_rows.most) * static_cast<size_t>(slots);
    const Lists lists = list_pairs(raw(expert), number(n_rows), slots, w.count, kChunkPairs);
    const int most = most_chunks(static_cast<int>(pairs), w.count, kChunkPairs);
    // The kernels count elements, and bricks of weights, in 32 bits.
    KD_CHECK(pairs * static_cast<size_t>(std::max(hidden, inter)) >> 32 == 0 &&
             static_cast<size_t>(w.count) * (hidden / w4::kBrick) * (2 * inter / w4::kStrip) >> 32 == 0 &&
             static_cast<size_t>(n_rows.most) * static_cast<size_t>(h.stride) >> 32 == 0);
    bf16* const acts = scratch<bf16>(Use::moe_inter, pairs * static_cast<size_t>(inter));
    float* const outs = scratch<float>(Use::moe_out, pairs * static_cast<size_t>(hidden));

    if (woven)
        product<true, true, true>(acts, raw(h), slots, w.gate_up, lists, most);
    else if (aligned16(h))
        product<true, true, false>(acts, raw(h), slots, w.gate_up, lists, most);
    else
        product<true, false, false>(acts, raw(h), slots, w.gate_up, lists, most);
    product<false, true, false>(outs, RowsPtr{acts, inter}, 1, w.down, lists, most);

    // Blocks go over several rows where there are many: rows that are not there cost nothing.
    const dim3 grid(static_cast<unsigned>(ceil_div(hidden, 4 * kSlotsThreads)),
                    static_cast<unsigned>(std::min(n_rows.most, 64)));
    const auto add = [&]<bool kAligned>() {
        launch_as<add_slots<kAligned>>({.early = true}, grid, kSlotsThreads, raw(y), outs, lists.chunk_of, raw(weight),
                                       number(n_rows), slots, hidden);
    };
    aligned16(y) ? add.template operator()<true>() : add.template operator()<false>();
}

}  // namespace kd::ops
