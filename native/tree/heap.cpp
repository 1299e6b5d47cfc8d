#include <algorithm>
#include <new>

#include "best_first.h"
#include "tree/builder.h"

namespace kd::tree {
namespace {

void* create(int32_t max_nodes) {
    try {
        return new BestFirst(std::clamp(max_nodes, 0, KD_MAX_NODES));
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

int32_t build(void* self, const kd_tree_in* in, kd_tree_out* out) {
    out->n = static_cast<BestFirst*>(self)->grow(out->token, out->parent, in->token, in->logprob, in->depths, in->width,
                                                 in->width, in->budget);
    return KD_OK;
}

void destroy(void* self) { delete static_cast<BestFirst*>(self); }

}  // namespace

const kd_tree_builder heap = {
    sizeof(kd_tree_builder), KD_BUILDER_ABI, "heap", "the most probable paths, best first", create, build, destroy};

// What it builds is what ops::tree_build makes of the same table: rounds whose builders are all like this never come to the
// host in between. build() serves kd_builder_build and rounds it shares with other builders.
const kd_tree_builder device = {sizeof(kd_tree_builder),
                                KD_BUILDER_ABI,
                                "device",
                                "the trees of heap, built where the model runs",
                                create,
                                build,
                                destroy};

}  // namespace kd::tree
