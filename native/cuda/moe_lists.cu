#include "moe_lists.h"

#include "error.h"
#include "launch.h"

namespace kd::cuda {

namespace {

// One block. Floor: a launch and two passes over 4 bytes a pair; four barriers.
template <int kChunkPairs, int kWarps, int kExperts>
__global__ void __launch_bounds__(kWarps* kWarp)
    list_kernel(Lists to, const int32_t* expert, Number n_rows, int slots, int experts) {
    extern __shared__ __align__(16) char memory[];
    auto& room = *reinterpret_cast<SortRoom<kWarps, kExperts>*>(memory);
    clear(room);
    wait_for_kernel_before();
    let_next_kernel_start();
    sort_pairs<kChunkPairs>(to, to.chunk_of, room, expert, n_rows() * slots, experts);
}

}  // namespace

Lists list_pairs(const int32_t* expert, Number n_rows, int slots, int experts, int chunk_pairs) {
    constexpr int few = 512, many = 4096;  // experts; the loader takes no more
    KD_CHECK(experts <= many && (chunk_pairs == 8 || chunk_pairs == 16));
    const size_t pairs = static_cast<size_t>(n_rows.most) * static_cast<size_t>(slots);
    KD_CHECK(pairs <= 65536);  // counts are 16 bits
    const size_t chunk_words = static_cast<size_t>(most_chunks(static_cast<int>(pairs), experts, chunk_pairs)) *
                               (sizeof(Chunk) / sizeof(int32_t));
    int32_t* const p = scratch<int32_t>(Use::moe_lists, 1 + chunk_words + 2 * pairs);
    const Lists lists{p, reinterpret_cast<Chunk*>(p + 1), p + 1 + chunk_words, p + 1 + chunk_words + pairs};
    const auto sort = [&]<int kChunkPairs, int kWarps, int kExperts>() {
        launch_as<list_kernel<kChunkPairs, kWarps, kExperts>, sizeof(SortRoom<kWarps, kExperts>)>(
            {.early = true}, 1, kWarps * kWarp, lists, expert, n_rows, slots, experts);
    };
    if (experts <= few)
        chunk_pairs == 8 ? sort.template operator()<8, 16, few>() : sort.template operator()<16, 16, few>();
    else
        chunk_pairs == 8 ? sort.template operator()<8, 4, many>() : sort.template operator()<16, 4, many>();
    return lists;
}

}  // namespace kd::cuda
