// The built-in tree builders, in the same struct that outsiders fill (kd_tree_builder in kd.h).
//
// All of them read rows 0 .. depths - 1 of the table they are given, so a caller that may verify only KD_MAX_DEPTH deep
// passes no more depths than that. build() never allocates: create(max_nodes) reserves, and a budget above max_nodes is
// cut to it.
#pragma once

#include <string_view>

#include "kd.h"

namespace kd::tree {

extern const kd_tree_builder none;    // no nodes: plain decoding
extern const kd_tree_builder chain;   // the best token of each depth: DFlash's own
extern const kd_tree_builder heap;    // the most probable prefixes, best first: DDTree's
extern const kd_tree_builder device;  // the same trees by ops::tree_build, without a way over the host

// Nodes to build when a caller gives budget 0. draft_depth: tokens one draft proposes (kd_model_info.draft_depth).
int default_budget(std::string_view name, int draft_depth);

}  // namespace kd::tree
