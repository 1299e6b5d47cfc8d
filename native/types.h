// Plain structs shared by the pages, the engine and both backends. No behaviour, no device, no allocation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kd.h"

namespace kd {

// ---- memory ---------------------------------------------------------------------------------------------------------

// An address in device memory. Only a backend (native/cpu, native/cuda) can turn it into a pointer, through its own
// `raw()`; pages and engine pass it on and do arithmetic in elements.
template <class T>
class Dev {
  public:
    Dev() = default;
    explicit Dev(T* p) : p_(p) {}
    operator Dev<const T>() const { return Dev<const T>(p_); }
    Dev operator+(size_t elements) const { return Dev(p_ + elements); }
    explicit operator bool() const { return p_ != nullptr; }

  private:
    T* p_ = nullptr;
    friend struct DevAccess;  // defined in native/<backend>/raw.h
};

// An element of an activation row, a KV row or a tap: float on the CPU, bf16 on CUDA. device::act_bytes() is its size.
struct Act;

// Rows of activations: row r starts at p + r * stride elements of Act.
struct Rows {
    void* p = nullptr;  // opaque like Dev<Act>; see device.h for allocation
    int stride = 0;     // elements
    int offset = 0;     // elements from the start of each row
    Rows from(int column) const { return {p, stride, offset + column}; }
};

// How many rows (or streams) a call works on. `most` is the number, unless `n` is set: then the number is data, written by an
// earlier operation of the same round, and at most `most`. device::known() gives a backend the number where it can.
struct Count {
    int most = 0;
    Dev<const int32_t> n;
    Count() = default;
    Count(int most) : most(most) {}
    Count(int most, Dev<const int32_t> n) : most(most), n(n) {}
    operator int() const { return most; }
};

// ---- weights --------------------------------------------------------------------------------------------------------

using Vec = Dev<const float>;  // norm weights, router bias: fp32

// y = x @ w^T. w [n][k] bf16, row-major.
struct Mat {
    Dev<const uint16_t> w;
    int n = 0;
    int k = 0;
};

// The same with 4-bit weights in compressed-tensors' layout.
// q [n][k/8] u32, nibble j of word i is element 8 i + j, stored as value + 8. s [n][k/32] bf16. k % 32 == 0.
// w[row][e] = (nibble - 8) * s[row][e / 32].
struct W4 {
    Dev<const uint32_t> q;
    Dev<const uint16_t> s;
    int n = 0;
    int k = 0;
};

// One layer's routed experts, matrices of one kind back to back: expert e of `gate_up` starts at row e * n.
struct Experts {
    W4 gate_up;  // per expert [2 * inter][hidden]: rows of gate, then rows of up
    W4 down;     // per expert [hidden][inter]
    int count = 0;
};

// ---- model ----------------------------------------------------------------------------------------------------------

struct Rope {
    Dev<const float> cos;  // [max_positions + KD_MAX_DEPTH][pairs], amplitude included
    Dev<const float> sin;
    int pairs = 0;
};

// Dimensions of the target and what one rank holds of them. Suffix _rank: this rank's share.
struct Shape {
    int hidden = 0, layers = 0, dense_layers = 0;
    int heads = 0, heads_rank = 0;
    int q_lora = 0, kv_lora = 0, nope = 0, rope = 0, v_head = 0;
    int inter = 0, inter_rank = 0;                // dense layers
    int moe_inter = 0, moe_inter_rank = 0;        // one routed expert
    int shared_inter = 0, shared_inter_rank = 0;  // all shared experts together, at least one
    int experts = 0, experts_per_token = 0;
    int vocab = 0, vocab_begin = 0, vocab_rank = 0;  // this rank's ids: [vocab_begin, vocab_begin + vocab_rank)
    int max_positions = 0;
    float rms_eps = 0;       // layer norms and the final norm
    float rms_eps_lora = 0;  // q_a and kv_a norms: 1e-6 as in transformers, whatever the config says
    float score_scale = 0;   // of attention: (nope + rope)^-0.5 * mscale^2
    float routed_scale = 0;
    bool norm_topk = true;
    int tp = 1, rank = 0;

    int kv_row() const { return kv_lora + rope; }
};

// The DFlash drafter. Embedding and head are the target's.
struct DraftShape {
    int layers = 0;  // 0: no drafter
    int hidden = 0;
    int heads = 0, heads_rank = 0, kv_heads = 0, kv_heads_rank = 0, head_dim = 0;
    int inter = 0, inter_rank = 0;
    int block = 0;  // rows of a draft: the anchor and block - 1 masks
    int mask_token = 0;
    float rms_eps = 0;
    std::vector<int> taps;    // target layers whose output is fed to it, ascending
    std::vector<int> window;  // per layer: 0 = full, else |query - key| < window
    std::vector<int> causal;  // per layer: whether a row of the block sees none of the block's later ones

    int depth() const { return block > 0 ? block - 1 : 0; }
};

struct Layer {
    Vec input_norm, post_norm, q_a_norm, kv_a_norm;
    Mat qkv_a;                // [q_lora + kv_lora + rope][hidden], replicated
    Mat q_b;                  // [heads_rank * (nope + rope)][q_lora]
    Mat k_up;                 // per head [nope][kv_lora]: heads_rank * nope rows
    Mat v_up;                 // per head [v_head][kv_lora]
    Mat o;                    // [hidden][heads_rank * v_head], partial sums
    Mat gate_up, down;        // dense layer: [2 * inter_rank][hidden], [hidden][inter_rank]
    Dev<const float> router;  // [experts][hidden], fp32
    Vec router_bias;          // [experts]
    Experts routed;
    Mat shared_gate_up, shared_down;
    bool dense = false;
};

struct DraftLayer {
    Vec input_norm, post_norm, q_norm, k_norm;
    Mat qkv;  // [(heads_rank + 2 kv_heads_rank) * head_dim][hidden]: q, k, v
    Mat o, gate_up, down;
};

// One rank's share of a loaded model. The arena behind it belongs to model::Loaded.
struct Model {
    Shape shape;
    Mat embed;    // [vocab_rank][hidden]
    Mat lm_head;  // [vocab_rank][hidden]
    Vec norm;
    Rope rope;
    std::vector<Layer> layers;

    DraftShape draft;
    Mat fc;  // [hidden][taps * hidden], replicated
    Vec draft_hidden_norm, draft_norm;
    Rope draft_rope;
    std::vector<DraftLayer> draft_layers;
};

// ---- a step ---------------------------------------------------------------------------------------------------------

constexpr int kMaskWords = KD_MAX_NODES / 64 + 1;  // ancestor bits of a row: the root and 256 nodes

// The rows of one step, on the device. A row is one token of one stream. Its keys, in position order, are slots
// 0 .. prefix - 1 and then slot prefix + j for every set bit j of its ancestor mask, itself last; there are position + 1 of
// them. A prompt row has prefix = position and mask = 1.
struct View {
    Count n_rows;
    Count n_streams;
    Count n_out;              // rows whose logits are wanted
    int max_pages = 0;        // stride of page_table
    Dev<int32_t> token;       // [n_rows]
    Dev<int32_t> position;    // [n_rows] absolute
    Dev<int32_t> stream;      // [n_rows] index into page_table
    Dev<int32_t> slot;        // [n_rows] KV row it is written to
    Dev<int32_t> prefix;      // [n_rows] KV rows every one of which it sees
    Dev<uint64_t> mask;       // [n_rows][kMaskWords]
    Dev<int32_t> page_table;  // [n_streams][max_pages]: page of slots KD_PAGE_TOKENS * i ..
    Dev<int32_t> out_row;     // [n_out]
};

// How the tokens of one stream are chosen.
struct Sampling {
    float temperature = 0;  // 0: argmax
    float top_p = 1;        // 1: off
    float min_p = 0;        // 0: off
    int32_t top_k = 0;      // 0: off
    uint32_t choice = 0;
    uint32_t want_logprob = 0;
    uint32_t want_hash = 0;
    uint32_t reserved = 0;
    uint64_t seed = 0;
};

// Chosen token of each logits row.
struct Choice {
    Dev<int32_t> token;  // [n_out]
    Dev<uint64_t> hash;  // [n_out] if wanted, else 0
    Dev<float> logprob;  // [n_out] if wanted, else 0
};

constexpr int kStops = 32;      // stop ids of one stream: the model's and its own
constexpr int kRunRounds = 64;  // rounds of one run
constexpr int kRunOver = 1 << 30;

// A run: rounds that follow one another on the device, and what it and the host say to each other meanwhile. Words that both
// see (device::alloc_shared), but for `marks`.
struct Run {
    Dev<int32_t> ended;  // rounds that have ended, and their tokens can be read; kRunOver is added if none follows
    Dev<const int32_t>
        allowed;           // rounds that may end; the host may raise it, or lower it to stop after the round under way
    Dev<uint64_t> marks;   // [3] of device memory, 0 at first: ns at which the run and this round began, rounds ended
    uint64_t most_ns = 0;  // no round follows one that ends later than this; 0: any time
};

// The streams of a decode round, on the device, so that rounds can follow one another without the host. Arrays of [n].
struct Streams {
    Count n;
    int max_pages = 0;  // stride of page_table
    Run run;
    Dev<int32_t> slot;         // place among the engine's streams: index of its tap ring
    Dev<int32_t> start;        // KV rows committed, which is the position of the root
    Dev<int32_t> draft_start;  // of these, rows that have drafter K/V; the taps of the others wait in the ring
    Dev<int32_t> root;         // the token at `start`: chosen, not yet run
    Dev<int32_t> left;         // tokens it may still be given; at 0 it takes no part
    Dev<int32_t> budget;       // nodes its tree may have; at 0 it does not draft
    Dev<int32_t> stops;        // [n][kStops] ids after which nothing is given, -1 where there is none
    Dev<int32_t> page_table;   // [n][max_pages]
};

// The drafts of one round: where a stream's rows in the table of candidates begin, and how many of them its tree may use.
struct Drafts {
    Dev<int32_t> row;     // [n_streams]
    Dev<int32_t> depths;  // [n_streams], 0: it did not draft
    Dev<int32_t> width;   // [n_streams] candidates of a row that its tree may use: 1 makes it a chain; null: all
};

// Trees as builders give them: nodes 1 .. n[s] of stream s. Parent 0 is the root.
struct Nodes {
    Dev<int32_t> n;       // [n_streams]
    Dev<int32_t> token;   // [n_streams][stride]
    Dev<int32_t> parent;  // [n_streams][stride]
    int stride = 0;
};

// What each round of a run gave each stream: its next tokens, in order. Memory that host and device see (device::alloc_shared).
struct Emitted {
    int streams = 0;     // streams of a round there is room for
    Dev<int32_t> n;      // [kRunRounds][streams], 0: it took no part
    Dev<int32_t> token;  // [kRunRounds][streams][KD_MAX_DEPTH + 1]
    Dev<uint64_t> hash;
    Dev<float> logprob;
    Dev<int32_t> nodes;        // [kRunRounds][streams] of its tree
    Dev<int32_t> draft_start;  // [kRunRounds][streams]
    Dev<uint64_t>
        times;  // [kRunRounds][2] ns of the device's clock at which the round began and ended; these may come a
                // little after run.ended
};

// The trees of one round as rows. Rows of stream s are first_row[s] .. first_row[s + 1] - 1, the root first; none if the
// stream takes no part.
struct Trees {
    Dev<int32_t> first_row;  // [n_streams + 1]
    Dev<int32_t> parent;     // [n_rows] index within the stream's rows; -1 for the root
};

// What tree_accept keeps: of stream s, `n[s]` rows: node[s][0] = 0 < node[s][1] < ...
struct Accepted {
    Dev<int32_t> n;     // [n_streams], >= 1, or 0 of a stream without rows
    Dev<int32_t> node;  // [n_streams][KD_MAX_DEPTH + 1]
};

}  // namespace kd
