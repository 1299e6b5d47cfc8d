#include <algorithm>

#include "tree/builder.h"

namespace kd::tree {
namespace {

char instance;  // create() may not return NULL, and there is nothing to keep

void* create(int32_t) { return &instance; }

int32_t build(void*, const kd_tree_in* in, kd_tree_out* out) {
    const int n = in->width > 0 ? std::clamp(in->budget, 0, std::max(in->depths, 0)) : 0;
    for (int i = 0; i < n; i++) {
        out->token[i] = in->token[static_cast<size_t>(i) * in->width];
        out->parent[i] = i;
    }
    out->n = n;
    return KD_OK;
}

void destroy(void*) {}

}  // namespace

const kd_tree_builder chain = {
    sizeof(kd_tree_builder), KD_BUILDER_ABI, "chain", "the best token of each depth", create, build, destroy};

}  // namespace kd::tree
