// Every operation of the model, once. Declared here, specified in tests/ref/<stem>.py (float64), implemented in
// native/cpu/<stem>.cpp and native/cuda/<stem>.cu.
//
// A row's arithmetic depends on that row's inputs and its absolute position only, never on how many rows a call has or
// which (docs/design.md, "The exactness contract"). Keys a row does not see and table entries past a stream's pages are
// never read. Of rows past n_rows nothing is used; those below n_rows.most are memory, which a backend may read. Outputs
// are overwritten unless the comment says "adds". All calls act for the bound rank (device.h); those marked [collective]
// must be made by every rank of the group with the same sizes.
//
// Order of arguments: outputs, inputs, weights, sizes, shape.
#pragma once

#include <functional>
#include <span>

#include "types.h"

namespace kd::ops {

// No operation, but the order of some: run two parts of a step of n_rows that do not need each other. A backend may work on both
// at once. They share neither what they write nor a use of scratch memory.
void side_by_side(Count n_rows, const std::function<void()>& one, const std::function<void()>& other);

// ---- rows (rows.cpp, ref/rows.py) ------------------------------------------------------------------------------------

// y[r] = table row of token[r] if this rank holds it, else 0. A token outside [0, vocab) gives 0 on every rank.
void embed(Rows y, Dev<int32_t> token, Mat table, int vocab_begin, Count n_rows);

// x[r][0..width) = 0
void zero(Dev<float> x, Count n_rows, int width);

// to[to_row[i]] = from[from_row[i]] for i < n, in order; a null index means i. Rows must not overlap.
void copy_rows(Rows to, Dev<int32_t> to_row, Rows from, Dev<int32_t> from_row, Count n, int width);

// y = x * w / sqrt(mean(x^2) + eps), sum in fp32.
void rms_norm(Rows y, Rows x, Vec w, Count n_rows, int width, float eps);

// x += sum over ranks of y, added in rank order in fp32; then h = rms_norm(x) * w. [collective]
// x is the residual stream, fp32, stride = width.
void add_norm(Rows h, Dev<float> x, Rows y, Vec w, Count n_rows, int width, float eps);

// tap[r] = x[r], rounded to Act: the residual stream as the drafter sees it.
void keep_tap(Rows tap, Dev<float> x, Count n_rows, int width);

// ---- linear (linear.cpp, ref/linear.py) -------------------------------------------------------------------------------

// y[r][j] = sum_k x[r][k] w[j][k], fp32 accumulation; the order over k is fixed by w.k alone.
void linear(Rows y, Rows x, Mat w, Count n_rows);

// The same into fp32 [n_rows][stride].
void logits(Dev<float> y, int stride, Rows x, Mat w, Count n_rows);

// y[r][i] = silu(x[r][i]) * x[r][width + i]; silu(v) = v / (1 + exp(-v)).
void swiglu(Rows y, Rows x, Count n_rows, int width);

// ---- attention of the target (mla.cpp, ref/mla.py) ---------------------------------------------------------------------

// q[r][head]: [nope | rope] -> q_lat[r][head]: [kv_lora | rope]. The rope part is rotated (pairs interleaved: elements
// 2 i, 2 i + 1) by the row's position; the nope part goes through k_up: q_lat[c] = sum_n q[n] k_up[head * nope + n][c].
void mla_query(Rows q_lat, Rows q, Mat k_up, const Rope& rope, const View& v, const Shape& s);

// What follows the product with qkv_a, qkv_a[r] = [q_a q_lora | latent kv_lora | rope key]: q[r] = linear(rms_norm(q_a) *
// q_norm, rounded to Act, q_b), and KV row slot[r] of the row's stream = [rms_norm(latent) * kv_norm | rotated rope key].
// kv is the layer's pool [pages * KD_PAGE_TOKENS][kv_row()]. What is in q_a afterwards is of no use.
void mla_latent(Rows q, Rows kv, Rows qkv_a, Vec q_norm, Mat q_b, Vec kv_norm, const Rope& rope, const View& v,
                const Shape& s);

// o_lat[r][head] = sum over the row's keys of softmax(score) * latent; score = (q_lat . kv row) * score_scale.
// Keys in position order. With B = 16 * floor(max(0, position - KD_MAX_DEPTH) / 16): keys below B in steps that a backend cuts
// by the positions of key and row alone (16 keys on the CPU), keys from B on one by one, all with a softmax in fp32.
// The operation called right before wrote neither kv nor what `v` says: a backend may look at both while that one ends.
void mla_attention(Rows o_lat, Rows q_lat, Rows kv, const View& v, const Shape& s);

// o[r][head][i] = sum_c o_lat[r][head][c] v_up[head * v_head + i][c].
void mla_value(Rows o, Rows o_lat, Mat v_up, Count n_rows, const Shape& s);

// ---- experts (moe.cpp, ref/moe.py) --------------------------------------------------------------------------------------

// Bring a layer's experts from the checkpoint's packing (W4) into the layout moe() reads, in their own memory. Called once a
// layer, when all of it is loaded. On the CPU that layout is W4's own; on CUDA see native/cuda/w4_layout.h.
void pack_experts(const Experts& w);

// s = sigmoid(router . h) in fp32; the experts_per_token experts of largest s + bias (ties: lowest id), largest first, with
// weights s / (sum of s + 1e-20) * routed_scale (norm_topk) or s * routed_scale. expert, weight [n_rows][experts_per_token].
void route(Dev<int32_t> expert, Dev<float> weight, Rows h, Dev<const float> router, Vec bias, Count n_rows,
           const Shape& s);

// y[r] adds sum over slots, in slot order, of weight * down(silu(gate h) * up h). The sum is formed first, then added.
// Weights are as pack_experts leaves them and stay 4-bit up to registers. silu(..) * up h is rounded to Act.
void moe(Rows y, Rows h, Dev<int32_t> expert, Dev<float> weight, const Experts& w, Count n_rows, const Shape& s);

// ---- drafter (draft.cpp, ref/draft.py) ----------------------------------------------------------------------------------

// Head-wise rms_norm * norm, then rotation (halves: elements i, i + head_dim / 2) by the row's position, in place.
// x[r] holds `heads` heads of head_dim.
void head_norm_rope(Rows x, Vec norm, const Rope& rope, const View& v, int heads, int head_dim, float eps);

// Write the context K/V of row slot[r]: k (normed and rotated already) and v into the layer's pools
// [pages * KD_PAGE_TOKENS][kv_heads_rank * head_dim].
void draft_append(Rows k_pool, Rows v_pool, Rows k, Rows v, const View& view, const DraftShape& d);

// Attention of block rows: row r sees the context slots 0 .. prefix[r] - 1 of its stream and the `block` rows of its own block
// (rows r - r % block ..), all of them or, if `causal`, those up to r, where `window` allows (0 = all, else
// |position difference| < window).
// qkv[r] = [q heads | k kv_heads | v kv_heads], q and k normed and rotated. Scale head_dim^-0.5.
void draft_attention(Rows o, Rows qkv, Rows k_pool, Rows v_pool, const View& v, int window, bool causal,
                     const DraftShape& d);

// The `k` best of each logits row over all ranks, best first (ties: lowest id), with natural log-probabilities over the
// whole vocabulary: logit - logsumexp, in fp32. id, logprob [n_rows][k]; k <= vocab. logits [n_rows][vocab_rank]. [collective]
void top_logprobs(Dev<int32_t> id, Dev<float> logprob, Dev<float> logits, Count n_rows, int k, const Shape& s);

// ---- sampling (sample.cpp, ref/sample.py) --------------------------------------------------------------------------------

// Choose a token for each logits row [n_out][vocab_rank]. Row i is row out_row[i] of the view; the token's position is that
// row's position + 1; `sampling` [n_streams] is indexed by the row's stream. Rules: docs/design.md, "Sampling". [collective]
void sample(const Choice& out, Dev<float> logits, Dev<const Sampling> sampling, const View& v, const Shape& s);

// ---- a round's rows (plan.cpp, ref/plan.py) --------------------------------------------------------------------------------

// A stream drafts if its budget is above 0 and it may still be given more than one token. `counts`: n_rows, n_out. The first of
// these in a round marks when it began.

// The waiting taps to project now: of every stream that drafts, and of those whose ring the next round could overflow, rows
// draft_start .. start - 1, in the order of streams, as many as v.n_rows.most; draft_start moves on by as many. Writes
// position, stream, slot, prefix of the view, and for each row its place in the rings: slot * ring_rows + position % ring_rows.
void plan_context(const View& v, Dev<int32_t> counts, Dev<int32_t> ring_row, const Streams& streams, int ring_rows);

// The blocks of the streams that draft: [root, mask ...] at positions start .. (at most max_positions - 1), seeing `start` rows of
// context. Rows 1 .. min(depth, KD_MAX_DEPTH) of each are wanted, in this order: the table. A tree may use depths[s] rows of it:
// no more than can be given. Streams with taps that still wait do not draft. Writes token, position, stream, slot, prefix,
// out_row of the view.
void plan_draft(const View& v, Dev<int32_t> counts, const Drafts& drafts, const Streams& streams, const DraftShape& d,
                const Shape& s);

// The rows of every tree: root and nodes, with ancestor masks, all of whose logits are wanted. Writes the view and `trees`.
void plan_verify(const View& v, Dev<int32_t> counts, const Trees& trees, const Nodes& nodes, const Streams& streams);

// The tokens the target chose along the kept paths, to the streams: start and root move on, left falls; a stream is given nothing
// after one of its stops. Then the round has ended: it is told where `streams.run` says, and whether another follows: if
// fewer than run.allowed and kRunRounds have ended, some stream may still be given tokens, it is not too late, and what runs
// here is a loop (device::loop). Of several ranks the first decides for all, which thus run the same rounds. [collective in a loop]
void end_round(const Emitted& out, const Streams& streams, const Trees& trees, const Accepted& kept,
               const Choice& choice);

// ---- trees (tree.cpp, ref/tree.py) -----------------------------------------------------------------------------------------

// The trees of builder `heap`: of stream s the best budget[s] prefixes (at most nodes.stride) of its table, best first:
// drafts.depths[s] (at most KD_MAX_TABLE_DEPTH) rows of `width` candidates, of which the first drafts.width[s] count, from row drafts.row[s] of token and logprob on.
// Node entries past n[s] are left as they are.
void tree_build(const Nodes& nodes, Dev<int32_t> token, Dev<float> logprob, const Drafts& drafts, Dev<int32_t> budget,
                Count n_streams, int width);

// ---- tree (accept.cpp, ref/accept.py) --------------------------------------------------------------------------------------

// The path the target itself takes: from each root, go to the child whose token is the one chosen after the current
// node, as long as there is one. out_row must be the identity (row i of the view is logits row i). At most KD_MAX_DEPTH steps.
// A stream without rows keeps none.
void tree_accept(const Accepted& out, const Trees& trees, const Choice& choice, const View& v);

// Move the kept KV rows of every layer to the front: slot prefix + node[j] -> prefix + j, for each stream, prefix being that
// of the stream's root row. kv: the layers' pools, alike in stride.
void kv_commit(std::span<const Rows> kv, const Accepted& kept, const Trees& trees, const View& v, int width);

// ring[s][(position of root + j) % ring_rows] = taps[first_row[s] + node[j]] for each kept row; s = ring_slot[stream].
void keep_taps(Rows ring, Rows taps, Dev<int32_t> ring_slot, const Accepted& kept, const Trees& trees, const View& v,
               int ring_rows, int width);

}  // namespace kd::ops
