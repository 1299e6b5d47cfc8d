/* Times of operations, for bench/kernels.py. Linked into the test libraries, never into a release.
 *
 * Each function makes its arrays once, records `calls` calls in one replay (device.h), plays that twice unmeasured and then
 * `plays` times: us[i] is the time of one call in play i, as the device sees it. Successive calls take turns with as many copies
 * of what they read as `rotate_bytes` holds, so that copies together larger than a cache come from memory; 0: one copy. On one
 * rank, but for all_reduce. A kd_status; kd_probe_error() has the sentence. Python's cffi reads what is between the markers. */
#ifndef KD_PROBE_BENCH_H
#define KD_PROBE_BENCH_H

#include "probe.h"

#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

/* cdef: begin */

typedef struct kd_bench {
    int32_t calls, plays, threads;
    int64_t rotate_bytes;
} kd_bench;

/* Reading alone. */
int32_t kd_bench_read(const kd_bench*, double* us, int64_t bytes);
/* A copy to the host, as the host sees it, wait included; `calls` are one after the other. */
int32_t kd_bench_download(const kd_bench*, double* us, int64_t bytes);
int32_t kd_bench_upload(const kd_bench*, double* us, int64_t bytes);

/* y = x w^T, w [n][k]; logits: into fp32. */
int32_t kd_bench_linear(const kd_bench*, double* us, int32_t rows, int32_t n, int32_t k, int32_t logits);
int32_t kd_bench_rms_norm(const kd_bench*, double* us, int32_t rows, int32_t width);
int32_t kd_bench_add_norm(const kd_bench*, double* us, int32_t rows, int32_t width);
/* add_norm among `tp` ranks that meet by `transport`, as rank 0 sees it. way 0: as the model does it. 1: NCCL's all-reduce, then a kernel
 * that adds and norms. 2 and 3: the traffic of eight ranks between two, in one shot and in two. */
int32_t kd_bench_all_reduce(const kd_bench*, double* us, int32_t tp, const char* transport, int32_t way, int32_t rows,
                            int32_t width);
/* What `tp` ranks choose by measuring: elements[0] of an all-reduce from which it takes two shots, or 0: never. */
int32_t kd_bench_switch_over(const kd_bench*, double* elements, int32_t tp);
int32_t kd_bench_swiglu(const kd_bench*, double* us, int32_t rows, int32_t width);

/* bf16: the router's weights are values of bf16, as in checkpoints. */
int32_t kd_bench_route(const kd_bench*, double* us, int32_t rows, int32_t hidden, int32_t experts, int32_t slots,
                       int32_t bf16);
/* expert [calls][rows][slots]: whom each call's rows are sent to. */
int32_t kd_bench_moe(const kd_bench*, double* us, const int32_t* expert, int32_t rows, int32_t hidden, int32_t inter,
                     int32_t experts, int32_t slots);

/* Verification: `rows` of each stream, a tree whose root is at position `context`. kv_lora 512, rope 64. */
int32_t kd_bench_attention(const kd_bench*, double* us, int32_t streams, int32_t rows, int32_t context, int32_t heads);
/* The small operations around it: q_lora 1536, nope 128, v_head 128; at most 64 rows, or a multiple of it. */
int32_t kd_bench_mla_query(const kd_bench*, double* us, int32_t rows, int32_t heads);
int32_t kd_bench_mla_latent(const kd_bench*, double* us, int32_t rows, int32_t heads);
int32_t kd_bench_mla_value(const kd_bench*, double* us, int32_t rows, int32_t heads);

/* The drafter: heads of `dim`; blocks of `block` rows of each stream whose context is `context` tokens long; window: 0 for none. */
int32_t kd_bench_head_norm_rope(const kd_bench*, double* us, int32_t rows, int32_t heads, int32_t dim);
int32_t kd_bench_draft_append(const kd_bench*, double* us, int32_t rows, int32_t kv_heads, int32_t dim);
int32_t kd_bench_draft_attention(const kd_bench*, double* us, int32_t streams, int32_t block, int32_t context,
                                 int32_t window, int32_t heads, int32_t kv_heads, int32_t dim);

int32_t kd_bench_top_logprobs(const kd_bench*, double* us, int32_t rows, int32_t vocab, int32_t k);
int32_t kd_bench_sample(const kd_bench*, double* us, const kd_probe_sampling* way, int32_t rows, int32_t vocab);

/* token, logprob [streams][depth][width] */
int32_t kd_bench_tree_build(const kd_bench*, double* us, const int32_t* token, const float* logprob, int32_t streams,
                            int32_t depth, int32_t width, int32_t budget);
/* Trees of `rows` rows; the target takes a path of `kept` of them. */
int32_t kd_bench_tree_accept(const kd_bench*, double* us, int32_t streams, int32_t rows, int32_t kept);
int32_t kd_bench_kv_commit(const kd_bench*, double* us, int32_t layers, int32_t streams, int32_t rows, int32_t kept,
                           int32_t width);
int32_t kd_bench_keep_taps(const kd_bench*, double* us, int32_t streams, int32_t rows, int32_t kept, int32_t width);

/* cdef: end */

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif

#endif /* KD_PROBE_BENCH_H */
