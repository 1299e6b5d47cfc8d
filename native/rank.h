// What one rank owns while a model is loaded: activations, KV pools, and the device side of a step.
#pragma once

#include <utility>

#include "device.h"
#include "types.h"

namespace kd {

// Largest counts a rank's buffers are made for.
struct Limits {
    int rows = 0;        // rows of one step
    int streams = 0;     // sequences of one step
    int tree_width = 0;  // candidates a depth of a draft table
    int kv_pages = 0;
    int pages_sequence = 0;  // pages of one sequence
};

// Rows of a step on their way through the layers. Named as in forward.cpp; reused by every layer.
struct Activations {
    Dev<float> x;  // residual stream [rows][hidden]
    Rows h, y;     // normed input and output of a block [rows][hidden]
    Rows qkv_a;    // [q_lora + kv_lora + rope]
    Rows q;        // [heads][nope + rope]
    Rows q_lat;    // [heads][kv_lora + rope]
    Rows o_lat;    // [heads][kv_lora]
    Rows o;        // [heads][v_head]
    Rows gate_up;  // [2 * inter]
    Rows act;      // [inter]
    Dev<int32_t> expert;
    Dev<float> weight;  // [rows][experts_per_token]
    Rows taps;          // [taps][hidden]
    Rows out;           // rows whose logits are wanted [hidden]
    Dev<float> logits;  // [rows][vocab_rank]

    Rows draft_taps;  // taps of tokens not yet projected [taps][hidden]
    Rows draft_qkv;   // [q heads | k kv_heads | v kv_heads][head_dim]
    Rows draft_o;     // [heads][head_dim]
};

// The arrays behind a View.
struct ViewArrays {
    Dev<int32_t> token, position, stream, slot, prefix, page_table, out_row;
    Dev<uint64_t> mask;

    View view() const;  // of these arrays, without counts
};

constexpr int kTapRing = 64;             // tokens whose taps are kept until they are projected into drafter K/V
constexpr int kPath = KD_MAX_DEPTH + 1;  // rows a round can keep of one sequence

// What a run is told of its streams: one block of 32-bit words, so that it is one copy.
struct RoundIn {
    enum Field { slot, start, draft_start, root, left, budget, width, fields };
    static constexpr size_t n = 6;  // after the words of Run::marks
    static size_t at(Field field, int streams) { return 8 + size_t(field) * streams; }
    static size_t stops(int streams) { return at(fields, streams); }
    static size_t words(int streams) { return stops(streams) + size_t(streams) * kStops; }
};
// What its rounds tell of them, and the words of the run: memory that host and device see. Offsets in bytes.
struct RoundOut {
    size_t hash, times, token, logprob, n, nodes, draft_start, ended, allowed, bytes;
    explicit RoundOut(int streams) {
        const size_t each = size_t(kRunRounds) * streams, path = each * kPath;
        size_t end = 0;
        const auto place = [&](size_t size) { return std::exchange(end, end + size); };
        hash = place(path * sizeof(uint64_t));
        times = place(kRunRounds * 2 * sizeof(uint64_t));
        token = place(path * sizeof(int32_t));
        logprob = place(path * sizeof(float));
        n = place(each * sizeof(int32_t));
        nodes = place(each * sizeof(int32_t));
        draft_start = place(each * sizeof(int32_t));
        ended = place(64);  // each word in a cache line of its own
        allowed = place(64);
        bytes = end;
    }
};

struct Rank {
    const Model* model = nullptr;
    int index = 0;
    Limits limits;
    Activations act;
    std::vector<Rows> kv;                // per layer [pages * KD_PAGE_TOKENS][kv_row]
    std::vector<Rows> draft_k, draft_v;  // per draft layer [pages * KD_PAGE_TOKENS][kv_heads_rank * head_dim]
    Rows tap_ring;                       // [streams * kTapRing][taps * hidden]
    ViewArrays view;
    Dev<int32_t> from_row, to_row;  // of a copy [rows]
    Dev<Sampling> sampling;         // [streams]
    Dev<int32_t> counts;            // rows and wanted rows of the view a plan_* has written
    Dev<int32_t> round_in;          // RoundIn
    char* round_out = nullptr;      // RoundOut; both see it
    Streams streams;                // into round_in
    Nodes nodes;
    Drafts drafts;
    Trees trees;
    Choice choice;
    Accepted kept;
    Emitted emitted;           // into round_out
    Dev<int32_t> draft_token;  // [streams * depth][tree_width]
    Dev<float> draft_logprob;

    Rank(const Model& model, int index, const Limits& limits);  // on the bound rank; throws Error(KD_E_NOMEM)
    ~Rank();
    Rank(const Rank&) = delete;
    Rank& operator=(const Rank&) = delete;

    // The view that a plan_* fills: at most so many rows and wanted rows, of the streams of the round.
    View planned_view(int rows, int out) const;

    uint64_t bytes() const { return bytes_; }  // of all of the above

    // Bytes of one token over all pools.
    static uint64_t kv_bytes_token(const Model& model);

  private:
    std::vector<void*> owned_;
    uint64_t bytes_ = 0;
    void point_into_blocks();
    void free_all();
    Rows rows(size_t n, int width);
    template <class T>
    Dev<T> array(size_t n);
};

}  // namespace kd
