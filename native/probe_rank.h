/* One tensor-parallel rank's share of a model with random weights, and the engine's own rounds on it: for bench/rank_step.py. Linked
 * into the test libraries, never into a release. Functions return a kd_status; kd_probe_error() has the sentence. One thread.
 * Python's cffi reads what is between the markers. */
#ifndef KD_PROBE_RANK_H
#define KD_PROBE_RANK_H

#include "probe.h"

#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

/* cdef: begin */

typedef struct kd_share kd_share;

typedef struct kd_share_options {
    const char *config, *draft_config; /* texts of config.json; draft_config may be NULL */
    int32_t tp;                        /* of whose ranks one is made */
    int32_t threads;                   /* of the CPU twin */
    int32_t streams, rows, context;    /* the most there will be: streams and rows of a round, tokens of a stream */
    int32_t nodes;                     /* of a stream's tree */
} kd_share_options;

/* A round's work. Rows are dealt out evenly; of a stream's rows the first is the root, the others a tree whose node i hangs below
 * node (i - 1) / 2. */
typedef struct kd_share_work {
    int32_t streams, rows, context;
    int32_t recorded_rows; /* what the round is recorded for; 0: as the engine does */
} kd_share_work;

enum { KD_SHARE_VERIFY = 0, KD_SHARE_DRAFT = 1, KD_SHARE_ROUND = 2 };

/* What it takes, as JSON, and what the device has left. Allocates nothing. */
int32_t kd_share_account(const kd_share_options*, char* json, uint64_t capacity);
int32_t kd_share_open(kd_share**, const kd_share_options*);
void kd_share_close(kd_share*);
/* Its dimensions and what it takes now, as JSON. */
int32_t kd_share_info(kd_share*, char* json, uint64_t capacity);

/* The router's bias, [layers with experts][experts]. */
int32_t kd_share_bias(kd_share*, const float* bias);
/* Whom a verification sends its rows to: expert [layers with experts][rows][experts per token]. */
int32_t kd_share_sent(kd_share*, const kd_share_work*, int32_t* expert);

/* us [plays], as the device sees them, of plays of the engine's recording. */
int32_t kd_share_verify(kd_share*, const kd_share_work*, int32_t plays, double* us);
/* Of waiting taps to the drafter's K/V, and of drafting. */
int32_t kd_share_draft(kd_share*, const kd_share_work*, int32_t plays, double* context_us, double* draft_us);
/* Rounds as the engine decodes them, trees built on the device: of each, us, us of the gap before it (0: the first of a run), and tokens
 * given to all streams. */
int32_t kd_share_rounds(kd_share*, const kd_share_work*, int32_t rounds, double* us, double* gap_us, int32_t* tokens);

/* One of the three above under native/stages.h with room for so many stamps, as JSON: [{part, recorded, ns: [plays], calls: [{op, of,
 * what it must do, ns: [plays]}]}]. */
int32_t kd_share_stages(kd_share*, const kd_share_work*, int32_t what, int32_t plays, int32_t room, char* json,
                        uint64_t capacity);
/* ns [n]: from one stamp to the next with nothing between. */
int32_t kd_share_stamps(kd_share*, int32_t n, double* ns);

/* How often a model's routers send the tokens of a prompt to each expert: counts [layers with experts][experts]. */
int32_t kd_share_record(const char* folder, const int32_t* token, int32_t n, int64_t* counts, int32_t layers,
                        int32_t experts);

/* cdef: end */

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif

#endif /* KD_PROBE_RANK_H */
