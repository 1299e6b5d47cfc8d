/* Test-only entry points: one for each operation of ops.h. Linked into the test libraries, never into a release.
 *
 * A probe takes host arrays, dense and row-major, runs the operation once on every rank of a group and brings the results
 * back. It puts each array into device memory in an awkward place: rows at an odd offset and stride with NaN around them,
 * more rows of NaN behind the last, wild numbers behind integers, 0xAA where results go. KD_E_FATAL if the operation wrote
 * anywhere but into its results, changed an input, or two ranks' results differ. Python's cffi reads what is between the
 * markers. */
#ifndef KD_PROBE_H
#define KD_PROBE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

/* cdef: begin */

typedef struct kd_probe_device {
    int32_t tp, threads, isa;
    int32_t aligned; /* rows at multiples of 16 bytes, else nowhere in particular */
    int32_t more;    /* 0: numbers of rows and streams are given; else they are data, and there could be so many more */
    const char* transport; /* how ranks meet, as in device.h, or NULL */
} kd_probe_device;

/* native/types.h Shape, in its order */
typedef struct kd_probe_shape {
    int32_t hidden, layers, dense_layers, heads, heads_rank, q_lora, kv_lora, nope, rope, v_head, inter, inter_rank,
        moe_inter, moe_inter_rank, shared_inter, shared_inter_rank, experts, experts_per_token, vocab, vocab_begin,
        vocab_rank, max_positions;
    float rms_eps, rms_eps_lora, score_scale, routed_scale;
    int32_t norm_topk, tp, rank;
} kd_probe_shape;

typedef struct kd_probe_draft_shape {
    int32_t heads_rank, kv_heads_rank, head_dim, block;
} kd_probe_draft_shape;

typedef struct kd_probe_view {
    int32_t n_rows, n_streams, n_out, max_pages;
    const int32_t *token, *position, *stream, *slot, *prefix;
    const uint64_t* mask;
    const int32_t *page_table, *out_row;
} kd_probe_view;

typedef struct kd_probe_rope {
    const float *cos, *sin;
    int32_t positions, pairs;
} kd_probe_rope;

typedef struct kd_probe_sampling {
    float temperature, top_p, min_p;
    int32_t top_k;
    uint32_t choice, want_logprob, want_hash, reserved;
    uint64_t seed;
} kd_probe_sampling;

typedef struct kd_probe_trees {
    const int32_t *first_row, *parent;
} kd_probe_trees;

/* Kept rows: n [n_streams], node [n_streams][17]. */
typedef struct kd_probe_kept {
    const int32_t *n, *node;
} kd_probe_kept;

/* The sentence of the last failure of this thread. */
const char* kd_probe_error(void);

/* KD_OK if this machine has the instruction set. */
int32_t kd_probe_isa(int32_t isa);

/* Outputs, inputs, weights, sizes, shape: as in ops.h. Where an output is also an input, it is given filled. */
int32_t kd_probe_embed(const kd_probe_device*, float* y, const int32_t* token, const uint16_t* table,
                       int32_t vocab_rank, int32_t hidden, int32_t vocab_begin, int32_t n_rows);
int32_t kd_probe_zero(const kd_probe_device*, float* x, int32_t n_rows, int32_t width);
int32_t kd_probe_copy_rows(const kd_probe_device*, float* to, const int32_t* to_row, const float* from,
                           const int32_t* from_row, int32_t n, int32_t to_rows, int32_t from_rows, int32_t width);
int32_t kd_probe_rms_norm(const kd_probe_device*, float* y, const float* x, const float* w, int32_t n_rows,
                          int32_t width, float eps);
/* y [tp][n_rows][width] */
int32_t kd_probe_add_norm(const kd_probe_device*, float* h, float* x, const float* y, const float* w, int32_t n_rows,
                          int32_t width, float eps);
/* `times` calls one after the other, of counts[t] rows of the n_rows each: y [tp][times][n_rows][width]; h is of the last. */
int32_t kd_probe_add_norms(const kd_probe_device*, float* h, float* x, const float* y, const float* w,
                           const int32_t* counts, int32_t times, int32_t n_rows, int32_t width, float eps);
int32_t kd_probe_keep_tap(const kd_probe_device*, float* tap, const float* x, int32_t n_rows, int32_t width);
int32_t kd_probe_linear(const kd_probe_device*, float* y, const float* x, const uint16_t* w, int32_t n_rows, int32_t n,
                        int32_t k);
int32_t kd_probe_logits(const kd_probe_device*, float* y, const float* x, const uint16_t* w, int32_t n_rows, int32_t n,
                        int32_t k);
int32_t kd_probe_swiglu(const kd_probe_device*, float* y, const float* x, int32_t n_rows, int32_t width);
int32_t kd_probe_mla_query(const kd_probe_device*, float* q_lat, const float* q, const uint16_t* k_up,
                           const kd_probe_rope*, const kd_probe_view*, const kd_probe_shape*);
int32_t kd_probe_mla_latent(const kd_probe_device*, float* q, float* kv, float* qkv_a, const float* q_norm,
                            const uint16_t* q_b, const float* kv_norm, const kd_probe_rope*, const kd_probe_view*,
                            int32_t pool_rows, const kd_probe_shape*);
int32_t kd_probe_mla_attention(const kd_probe_device*, float* o_lat, const float* q_lat, const float* kv,
                               const kd_probe_view*, int32_t pool_rows, const kd_probe_shape*);
int32_t kd_probe_mla_value(const kd_probe_device*, float* o, const float* o_lat, const uint16_t* v_up, int32_t n_rows,
                           const kd_probe_shape*);
int32_t kd_probe_route(const kd_probe_device*, int32_t* expert, float* weight, const float* h, const float* router,
                       const float* bias, int32_t n_rows, const kd_probe_shape*);
/* In place: gate_up_q [count][2 * moe_inter_rank][hidden / 8], gate_up_s [..][hidden / 32], down_q [count][hidden]
 * [moe_inter_rank / 8], down_s [..][moe_inter_rank / 32] */
int32_t kd_probe_pack_experts(const kd_probe_device*, uint32_t* gate_up_q, uint16_t* gate_up_s, uint32_t* down_q,
                              uint16_t* down_s, int32_t count, const kd_probe_shape*);
/* Packs the experts first. */
int32_t kd_probe_moe(const kd_probe_device*, float* y, const float* h, const int32_t* expert, const float* weight,
                     const uint32_t* gate_up_q, const uint16_t* gate_up_s, const uint32_t* down_q,
                     const uint16_t* down_s, int32_t count, int32_t n_rows, const kd_probe_shape*);
int32_t kd_probe_head_norm_rope(const kd_probe_device*, float* x, const float* norm, const kd_probe_rope*,
                                const kd_probe_view*, int32_t heads, int32_t head_dim, float eps);
int32_t kd_probe_draft_append(const kd_probe_device*, float* k_pool, float* v_pool, const float* k, const float* v,
                              const kd_probe_view*, int32_t pool_rows, const kd_probe_draft_shape*);
int32_t kd_probe_draft_attention(const kd_probe_device*, float* o, const float* qkv, const float* k_pool,
                                 const float* v_pool, const kd_probe_view*, int32_t window, int32_t causal,
                                 int32_t pool_rows, const kd_probe_draft_shape*);
/* logits [n_rows][vocab], dealt out to the ranks in nearly equal parts */
int32_t kd_probe_top_logprobs(const kd_probe_device*, int32_t* id, float* logprob, const float* logits, int32_t n_rows,
                              int32_t k, int32_t vocab);
/* logits [n_out][vocab], dealt out likewise; sampling [n_streams] */
int32_t kd_probe_sample(const kd_probe_device*, int32_t* token, uint64_t* hash, float* logprob, const float* logits,
                        const kd_probe_sampling*, const kd_probe_view*, int32_t vocab);
/* node_token, node_parent [n_streams][stride]; token, logprob [rows][width]; row, depths, width_of, budget [n_streams]; width_of may
 * be NULL */
int32_t kd_probe_tree_build(const kd_probe_device*, int32_t* n, int32_t* node_token, int32_t* node_parent,
                            const int32_t* token, const float* logprob, const int32_t* row, const int32_t* depths,
                            const int32_t* width_of, const int32_t* budget, int32_t n_streams, int32_t rows,
                            int32_t width, int32_t stride);
int32_t kd_probe_tree_accept(const kd_probe_device*, int32_t* n, int32_t* node, const kd_probe_trees*,
                             const int32_t* choice_token, const kd_probe_view*);
/* kv [layers][pool_rows][width] */
int32_t kd_probe_kv_commit(const kd_probe_device*, float* kv, const kd_probe_kept*, const kd_probe_trees*,
                           const kd_probe_view*, int32_t layers, int32_t pool_rows, int32_t width);
int32_t kd_probe_keep_taps(const kd_probe_device*, float* ring, const float* taps, const int32_t* ring_slot,
                           const kd_probe_kept*, const kd_probe_trees*, const kd_probe_view*, int32_t ring_rows,
                           int32_t ring_slots, int32_t width);

/* self_check of native/self_check.h on one rank; what is expected of the operation `spoil` is made wrong. */
int32_t kd_probe_self_check(const kd_probe_device*, const char* spoil);

/* A round's rows. What is written is given as arrays of the most there could be; the first counts[0] (rows) or counts[1]
 * (out_row) are meant. The streams' arrays are as they were before. */
typedef struct kd_probe_streams {
    int32_t n, max_pages;
    const int32_t *slot, *start, *draft_start, *root, *left, *budget, *stops, *page_table;
} kd_probe_streams;

typedef struct kd_probe_rows {
    int32_t most, most_out;
    int32_t *counts, *token, *position, *stream, *slot, *prefix, *out_row;
    uint64_t* mask;
} kd_probe_rows;

int32_t kd_probe_plan_context(const kd_probe_device*, const kd_probe_rows*, int32_t* draft_start, int32_t* ring_row,
                              const kd_probe_streams*, int32_t ring_rows);
int32_t kd_probe_plan_draft(const kd_probe_device*, const kd_probe_rows*, int32_t* row, int32_t* depths,
                            const kd_probe_streams*, int32_t block, int32_t mask_token, int32_t max_positions);
int32_t kd_probe_plan_verify(const kd_probe_device*, const kd_probe_rows*, int32_t* first_row, int32_t* parent,
                             const kd_probe_streams*, const int32_t* nodes, const int32_t* token,
                             const int32_t* node_parent, int32_t stride);
/* The round-th of a run that is no loop; what is emitted has room for rounds 0 .. round, of which only the last is written. */
int32_t kd_probe_end_round(const kd_probe_device*, int32_t* n, int32_t* nodes, int32_t* token, uint64_t* hash,
                           float* logprob, int32_t* draft_start, int32_t* ended, int32_t* start, int32_t* root,
                           int32_t* left, int32_t round, const kd_probe_streams*, const kd_probe_trees*,
                           const kd_probe_kept*, const int32_t* choice_token, const uint64_t* choice_hash,
                           const float* choice_logprob, int32_t n_rows);

/* ---- trees (native/tree/registry.h) ------------------------------------------------------------------------------- */

/* check_tree: what is wrong with the tree, or NULL. in and out are kd_tree_in and kd_tree_out. */
const char* kd_probe_check_tree(const void* in, const void* out, int32_t vocab, int32_t max_depth);

/* node_gains: gain has room for out->n doubles. */
void kd_probe_node_gains(double* gain, const void* in, const void* out);

/* cut_trees: ins and outs are arrays of n_streams pointers. Returns the rows left. */
int32_t kd_probe_cut_trees(const void* const* ins, void* const* outs, int32_t n_streams, int32_t max_rows);

/* cdef: end */

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif

#endif /* KD_PROBE_H */
