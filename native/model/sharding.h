// How the stored tensors are shared out among the ranks: the one table of it, by the end of a tensor's name. The loader places
// by it; tests/ref/sharding.py reads this very file for the specification and the tests.
#pragma once

#include <string_view>

#include "error.h"

namespace kd::model {

// The share of a rank is contiguous rows of its memory.
enum class Split {
    whole,  // every rank has all of it
    rows,   // rank r has rows r * rows / tp ..
    cols,   // rank r has columns r * cols / tp .. of every row
    vocab,  // rows in shares of ceil(rows / tp), by global id; the last ones may be short or empty
    kv_b,   // rows by head; of each head, nope rows go to k_up and v rows to v_up
};

struct Shard {
    std::string_view name;
    Split split;
};

// Rows of heads stay together since heads divide by tp, groups of INT4 since moe_intermediate_size / 32 does: rank_shape()
// refuses what does not. Gate and up are two tensors and are cut apart before they lie together in memory.
inline constexpr Shard kShards[] = {
    {"embed_tokens.weight", Split::vocab},
    {"lm_head.weight", Split::vocab},
    {"self_attn.q_a_proj.weight", Split::whole},
    {"self_attn.kv_a_proj_with_mqa.weight", Split::whole},
    {"self_attn.q_b_proj.weight", Split::rows},
    {"self_attn.kv_b_proj.weight", Split::kv_b},
    {"self_attn.o_proj.weight", Split::cols},  // of the target and of the drafter: by head
    {"mlp.gate.weight", Split::whole},
    {"gate_proj.weight", Split::rows},  // of dense layers, shared experts and the drafter
    {"up_proj.weight", Split::rows},
    {"down_proj.weight", Split::cols},
    {"gate_proj.weight_packed", Split::rows},
    {"gate_proj.weight_scale", Split::rows},
    {"up_proj.weight_packed", Split::rows},
    {"up_proj.weight_scale", Split::rows},
    {"down_proj.weight_packed", Split::cols},
    {"down_proj.weight_scale", Split::cols},
    {"self_attn.q_proj.weight", Split::rows},  // of the drafter
    {"self_attn.k_proj.weight", Split::rows},
    {"self_attn.v_proj.weight", Split::rows},
    {"fc.weight", Split::whole},
    {"norm.weight", Split::whole},  // all norms
    {"mlp.gate.e_score_correction_bias", Split::whole},
};

inline Split split_of(std::string_view tensor) {
    for (const Shard& shard : kShards)
        if (tensor.ends_with(shard.name)) return shard.split;
    KD_CHECK(!"every tensor that is read has a line in kShards");
    __builtin_unreachable();
}

}  // namespace kd::model
