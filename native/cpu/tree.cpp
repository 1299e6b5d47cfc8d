#include "best_first.h"
#include "ops.h"
#include "raw.h"
#include "threads.h"

namespace kd::ops {

void tree_build(const Nodes& out, Dev<int32_t> token, Dev<float> logprob, const Drafts& drafts, Dev<int32_t> budget,
                Count n_streams, int width) {
    using namespace kd::cpu;
    parallel_for(n_streams, 1, [&](int begin, int end) {
        static thread_local BestFirst builder(KD_MAX_NODES);
        for (int s = begin; s < end; s++) {
            const size_t nodes = static_cast<size_t>(s) * static_cast<size_t>(out.stride);
            const int depths = std::clamp<int>(raw(drafts.depths)[s], 0, KD_MAX_TABLE_DEPTH);
            const size_t table = depths > 0 ? static_cast<size_t>(raw(drafts.row)[s]) * static_cast<size_t>(width) : 0;
            const int own = drafts.width ? std::min<int>(raw(drafts.width)[s], width) : width;
            raw(out.n)[s] =
                builder.grow(raw(out.token) + nodes, raw(out.parent) + nodes, raw(token) + table, raw(logprob) + table,
                             depths, own, width, std::min(raw(budget)[s], out.stride));
        }
    });
}

}  // namespace kd::ops
