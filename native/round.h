// The steps of the engine: one prefill chunk, one decode round. Called by the engine thread; every rank takes part.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "engine/team.h"
#include "rank.h"
#include "step_view.h"
#include "tree/registry.h"

namespace kd {

// The builder of a sequence and how much it may build.
struct Planting {
    const tree::Instance* builder = nullptr;
    int budget = 0;
    uint64_t generation = 0;
};

// One request's tokens and cache. Invariant between steps once the prompt is in: KV rows 0 .. start - 1 are those of
// tokens[0 .. start), and tokens[start], the last one, has been chosen but not yet run (the root of the next tree).
struct Sequence {
    int slot = -1;                // place among the streams: index of its tap ring
    std::vector<int32_t> tokens;  // prompt, then what was generated
    int prompt = 0;
    int max_tokens = 0;
    int start = 0;        // KV rows committed
    int draft_start = 0;  // rows that have drafter K/V; the taps of draft_start .. start - 1 wait in the ring
    std::vector<int32_t> pages;
    std::vector<int32_t> stop_ids;  // the model's and the request's own: at most kStops
    Sampling sampling;
    Planting planting;

    // What the last step brought: tokens[tokens.size() - n_new ..] with these.
    int n_new = 0;
    int nodes = 0;
    std::array<uint64_t, KD_MAX_TOKENS_EVENT> hashes{};
    std::array<float, KD_MAX_TOKENS_EVENT> logprobs{};

    int generated() const { return int(tokens.size()) - prompt; }
};

// Tokens begin .. begin + n - 1 of a prompt.
struct PromptPart {
    Sequence* sequence = nullptr;
    int begin = 0;
    int n = 0;
};

// Wall time of the parts of a round and what it did; the engine adds them up. By the device's clock: the round itself, and what
// lies between it and the round before: of the same run, or, if the host launched this one, of the step before.
struct StepCounts {
    uint64_t draft_us = 0, build_us = 0, verify_us = 0;
    uint64_t device_ns = 0, gap_ns = 0, gaps = 0, launch_gap_ns = 0, launch_gaps = 0;
    uint64_t draft_calls = 0, builder_failures = 0;
};

// Everything a step needs: the ranks and the host side of their buffers.
struct Stage {
    Stage(Team& team, std::vector<std::unique_ptr<Rank>> ranks, int max_rows);

    Team& team;
    std::vector<std::unique_ptr<Rank>> ranks;
    const int max_rows;  // of one round; a draft may have more
    StepView view;
    std::vector<Sampling> sampling;

    // Draft tables and trees, one slice a sequence of the round.
    std::vector<int32_t> table_token;
    std::vector<float> table_logprob;
    std::vector<int32_t> node_token, node_parent;
    std::vector<kd_tree_in> tree_in;
    std::vector<kd_tree_out> tree_out;
    std::vector<int32_t> from_row, to_row;

    // What the ranks are told of a batch (RoundIn), the pages of its sequences, and nodes of its trees.
    std::vector<int32_t> round_in, page_table, nodes;
    int rounds_at_once;          // device::rounds_at_once()
    uint64_t last_ended_ns = 0;  // the round before, if nothing has come between; see StepCounts

    // What came back of a prompt.
    std::vector<int32_t> choice;
    std::vector<uint64_t> hash;
    std::vector<float> logprob;

    const Model& model() const { return *ranks[0]->model; }
};

// Run parts of prompts through target and drafter context; sequences whose prompt is then complete get their first token.
// At most max_rows rows, one part a sequence.
void prefill_chunk(Stage& g, std::span<const PromptPart> parts);

// What the engine does after each round, while the device may be running the next: the tokens are in the sequences, n_new of
// each; n_new is 0 of one that has been given all it may. Returns how many more rounds may end, 0 to stop. It may be called
// again after that, for rounds that were under way.
using AfterRound = std::function<int(const StepCounts&)>;

// Rounds for every sequence, one after the other: draft, build, verify, accept, commit. At most `rounds`, one where trees are
// built on the host. Ends after the round under way when `wanted` becomes true.
void decode_rounds(Stage& g, std::span<Sequence* const> batch, int rounds, const std::atomic<bool>& wanted,
                   const AfterRound& after);

// A prompt part of `sequence` whose logits are all wanted: out [n][vocab], float32.
void score_chunk(Stage& g, const PromptPart& part, float* out);

// ---- what a decode round consists of ----------------------------------------------------------------------------------

// Largest sizes of a round: what is recorded once serves every round that fits.
struct Room {
    int streams = 0, rows = 0, width = 0;
    uint64_t key(int part) const {
        return uint64_t(part) | uint64_t(streams) << 8 | uint64_t(rows) << 20 | uint64_t(width) << 40;
    }
};
// The smallest of the sizes that are recorded that has room for `n`.
int recorded_streams(const Limits& limits, int n);
int recorded_rows(const Limits& limits, int n);

// What the ranks are told of the batch; no stream's budget is above `cap`.
void tell(Stage& g, std::span<Sequence* const> batch, int cap);

// On the bound rank, after that; each can be a body of device::replay().
void context_part(Rank& r, const Room& room);  // waiting taps -> drafter K/V
void draft_part(Rank& r, const Room& room);    // root tokens -> the table of candidates
// Trees -> the target's choice after every node, the path it takes, the cache moved along it, tokens.
void verify_part(Rank& r, const Room& room);

// Copy the first `n` rows of a page to another, in every layer (copy-on-write).
void copy_page(Stage& g, int32_t to, int32_t from, int n);

}  // namespace kd
