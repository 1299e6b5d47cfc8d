/* kd.h: the C interface of kd, a native inference engine for Kimi-K2-family models.
 *
 * This header is the only contract between the library and everyone else. It is complete: a program that opens an
 * engine, loads a model folder, submits requests and reads tokens needs nothing but this file and libkd_cpu.so (or
 * libkd_cuda.so). Python's cffi reads this very file between the two marker comments.
 *
 * Structs. Every struct starts with `uint32_t size`; the caller sets it to sizeof(struct) and zeroes the rest. A
 * library newer than the caller treats what is missing as zero; a library older than the caller refuses (KD_E_TOO_NEW)
 * if a part it does not know is not zero. Zero always means "the default". Values are never renumbered or reused.
 *
 * Strings are UTF-8, zero-terminated unless a length stands beside them. The library copies what it keeps.
 *
 * Threads. [any] may be called from any thread at any time between kd_open and kd_close. [poller] is for one thread at a
 * time. kd_close must be the last call on a handle. A handle is dead in a forked child: calls return KD_E_FORKED.
 *
 * Errors. Functions return KD_OK or a negative kd_status and leave a sentence for kd_last_error(). Nothing here
 * aborts, exits, prints, throws, installs a signal handler or reads the environment.
 */
#ifndef KD_H
#define KD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

/* cdef: begin */

#define KD_ABI_VERSION 1

/* ---- limits ------------------------------------------------------------------------------------------------------ */

#define KD_MAX_DEPTH 16        /* drafted tokens on one path of a round's tree                                        */
#define KD_MAX_NODES 256       /* drafted nodes of one stream's tree, the root not counted                            */
#define KD_MAX_TABLE_DEPTH 32  /* depths of a draft table given to a builder                                          */
#define KD_MAX_STREAMS 64      /* requests decoding at once                                                           */
#define KD_MAX_TOKENS_EVENT 17 /* tokens in one event: KD_MAX_DEPTH accepted and one bonus                            */
#define KD_MAX_STOP_IDS 16     /* stop ids of one request                                                             */
#define KD_MAX_STOP_STRINGS 16 /* stop strings of one request                                                         */
#define KD_MAX_STOP_BYTES 256  /* bytes of one stop string                                                            */
#define KD_MAX_TOKEN_BYTES 256 /* bytes of one vocabulary entry                                                       */
#define KD_MAX_QUEUE 4096      /* requests waiting for a place                                                        */
#define KD_MAX_TP 8            /* ranks                                                                               */
#define KD_MAX_BUILDERS 64     /* builders registered in one engine                                                   */
#define KD_PAGE_TOKENS 64      /* tokens of one page of the KV cache                                                  */

/* ---- status ------------------------------------------------------------------------------------------------------ */

typedef enum kd_status {
    KD_OK = 0,
    /* the caller's: fix the call */
    KD_E_INVALID = -1,  /* an argument is NULL, out of range or contradicts another                                  */
    KD_E_TOO_NEW = -2,  /* a struct carries a field this library does not know                                       */
    KD_E_SIZE = -3,     /* a struct's size is too small to be any version of it                                      */
    KD_E_FORKED = -4,   /* the handle was opened in another process                                                  */
    /* the engine's state: try another call, or later */
    KD_E_STATE = -20,     /* not possible in this state, e.g. submit before a model is loaded                        */
    KD_E_NOT_FOUND = -21, /* no such request, builder or model                                                       */
    KD_E_DONE = -22,      /* the request has already ended                                                           */
    KD_E_BUSY = -23,      /* the waiting queue is full, or a load is under way: retry later                          */
    KD_E_DRAINING = -24,  /* kd_drain was called: no new work                                                        */
    KD_E_TIMEOUT = -25,   /* the time given has passed                                                               */
    KD_E_CANCELLED = -26, /* cancelled by kd_cancel, kd_load_cancel, kd_unload or kd_close                           */
    KD_E_EXISTS = -27,    /* a builder of that name is registered, or a model is loaded                              */
    /* the request's: this request cannot be served */
    KD_E_CONTEXT = -40,     /* prompt and max_tokens do not fit the model's context or the KV cache                  */
    KD_E_TOKEN = -41,       /* a token id outside the vocabulary                                                     */
    KD_E_SAMPLING = -42,    /* a sampling value out of range or not a number                                         */
    KD_E_SLOW_READER = -43, /* no credit for slow_reader_timeout_ms                                                  */
    /* the world's */
    KD_E_NOMEM = -60,     /* memory, or a limit given in kd_options                                                  */
    KD_E_IO = -61,        /* a file could not be opened or read                                                      */
    KD_E_MODEL = -62,     /* the model folder is damaged, incomplete or of a kind this engine does not understand    */
    KD_E_DEVICE = -63,    /* no such device, or no code for it in this library                                       */
    KD_E_BUILDER = -64,   /* a tree builder failed or returned something that is no tree                             */
    /* ours */
    KD_E_FATAL = -90 /* a broken invariant or a lost device: every later call returns this; close and open again      */
} kd_status;

/* ---- library ----------------------------------------------------------------------------------------------------- */

/* KD_ABI_VERSION of the library: compare with the header's before anything else. [any] */
int32_t kd_abi_version(void);

/* "0.1.0"-like version; static memory. [any] */
const char *kd_version(void);

/* One line: backend, compiler, instruction sets compiled in; static memory. [any] */
const char *kd_build_info(void);

/* The name of a status, e.g. "KD_E_BUSY"; "KD_E_UNKNOWN" for any other number; static memory. [any] */
const char *kd_status_name(int32_t status);

/* What the last failing call on this thread was about: what, where, what to do. Empty if none failed. Valid until the
 * next failing call on this thread. [any] */
const char *kd_last_error(void);

/* ---- engine ------------------------------------------------------------------------------------------------------ */

typedef struct kd_engine kd_engine;

enum { KD_ISA_AUTO = 0, KD_ISA_PLAIN = 1, KD_ISA_AVX2 = 2, KD_ISA_AVX512 = 3 };

typedef struct kd_options {
    uint32_t size;
    int32_t tp;                     /* ranks, 1, 2, 4 or 8; 0 = 1                                                     */
    int32_t threads;                /* compute threads over all ranks; 0 = the cores this process may use             */
    int32_t isa;                    /* KD_ISA_*; KD_E_DEVICE if this machine lacks it                                 */
    int32_t max_streams;            /* requests decoding at once, <= KD_MAX_STREAMS; 0 = 64                           */
    int32_t max_queue;              /* requests waiting, <= KD_MAX_QUEUE; 0 = 512                                     */
    int32_t max_rows;               /* rows of one round over all streams; 0 = 1,024 (CPU) or 640 (CUDA); >= max_streams */
    int32_t max_nodes;              /* largest budget a builder may be given, <= KD_MAX_NODES; 0 = 64                 */
    int32_t prefill_chunk;          /* prompt tokens of one step, 1..max_rows; 0 = 256                                */
    int32_t prefix_cache;           /* 0 = on, 1 = off                                                                */
    uint64_t kv_bytes;              /* memory for the KV cache of one rank, drafter included; 0 = 128 MiB             */
    uint32_t slow_reader_timeout_ms;/* a request without credit for so long is cancelled; 0 = 30,000                  */
    int32_t share_devices;          /* 1 = several ranks may share a GPU (for tests); 0 = KD_E_DEVICE if tp is more        */
    const char *record_path;        /* a file, made anew, that holds a kd_step_record while the engine is open; or NULL    */
} kd_options;

/* Open an engine: starts its threads, loads nothing. On success *engine is the caller's, to be given to kd_close.
 * `options` may be NULL. [any] */
int32_t kd_open(kd_engine **engine, const kd_options *options);

/* Cancel everything, stop the threads, free the memory and the handle. NULL is allowed. Events not yet polled are
 * lost. No other call may be under way. [poller, last] */
int32_t kd_close(kd_engine *engine);

/* ---- what the ranks are at --------------------------------------------------------------------------------------- */

/* What a rank does in a step. TELL: the host tells the ranks of a round's streams; CONTEXT: the drafter's; COPY: of a page.  */
typedef enum kd_stage {
    KD_STAGE_IDLE = 0, KD_STAGE_PREFILL = 1, KD_STAGE_TELL = 2, KD_STAGE_CONTEXT = 3, KD_STAGE_DRAFT = 4,
    KD_STAGE_VERIFY = 5, KD_STAGE_DECODE = 6, KD_STAGE_SCORE = 7, KD_STAGE_COPY = 8
} kd_stage;

typedef struct kd_rank_record {
    uint64_t step;       /* the one it is in, or was in last; the first is 1                                          */
    uint64_t meetings;   /* how often it came to where ranks wait for one another: grows while they get on            */
    int32_t stage;       /* kd_stage                                                                                  */
    int32_t waiting;     /* 1: for other ranks                                                                        */
    int32_t thread;      /* the kernel's number of its thread; 0 before its first step                                */
    int32_t reserved[9];
} kd_rank_record;

/* The file at kd_options.record_path. kd_close removes it: one that was left tells what its process was at when it ended.     */
typedef struct kd_step_record {
    uint32_t size;
    int32_t pid;
    int32_t tp;
    int32_t signal;        /* what kd_note_signal was called with first, or 0                                         */
    int32_t signal_thread; /* the kernel's number of the thread that called it                                        */
    char thread_name[16];
    int32_t reserved[7];
    kd_rank_record ranks[8];
} kd_step_record;

/* Notes in the records of this process that this thread got `signal`. It may be the handler of SIGSEGV and its like. [any] */
void kd_note_signal(int32_t signal);

typedef enum kd_state {
    KD_STATE_EMPTY = 0,    /* open, no model                                                                          */
    KD_STATE_LOADING = 1,
    KD_STATE_READY = 2,
    KD_STATE_DRAINING = 3, /* kd_drain: running requests go on, new ones are refused                                  */
    KD_STATE_FATAL = 4
} kd_state;

/* Phases of a load. WARM: with KD_LOAD_HOLD, the model is held. SWAP: with KD_LOAD_REPLACE, the requests of the model before are
 * waited for. WRITE: of kd_save.                                                                                        */
enum {
    KD_LOAD_OPEN = 0,
    KD_LOAD_READ = 1,
    KD_LOAD_PREPARE = 2,
    KD_LOAD_DONE = 3,
    KD_LOAD_SWAP = 4,
    KD_LOAD_WRITE = 5,
    KD_LOAD_WARM = 6,
    KD_LOAD_PHASES = 7
};

/* kd_load_options.flags */
enum {
    KD_LOAD_REPLACE = 1,      /* beside a loaded model, which serves on: the new one takes its place between two steps, once
                               * the requests that run have ended; those that wait then run on the new one               */
    KD_LOAD_FOLLOW_LINKS = 2, /* symbolic links in the folder are followed wherever they lead                             */
    KD_LOAD_HOLD = 4          /* the model is held when all of it is in memory: kd_load_try decodes on it, nobody else sees it,
                               * and kd_load_accept or kd_load_cancel decides what becomes of it                         */
};

typedef struct kd_load_options {
    uint32_t size;
    int32_t draft;              /* 0: the drafter in <path>/draft if there is one; 1: none; 2: the one at draft_path  */
    const char *draft_path;
    const uint8_t *token_bytes; /* the vocabulary's bytes back to back, or NULL: then only ids can stop a request     */
    const uint32_t *token_ends; /* token_ends[i]: end of token i in token_bytes; n_tokens of them                     */
    uint32_t n_tokens;          /* <= vocab_size; ids from n_tokens on have no bytes                                  */
    uint32_t flags;             /* KD_LOAD_REPLACE | KD_LOAD_FOLLOW_LINKS | KD_LOAD_HOLD                              */
    uint64_t text_id;           /* the caller's name for the vocabulary; see kd_request.text_id                       */
} kd_load_options;

/* Start loading a Hugging Face model folder, or one that kd_save has written; returns at once (KD_E_EXISTS if a model is
 * there, KD_E_BUSY if a load is under way). `options` may be NULL; its arrays are copied. The end comes as KD_EVENT_LOAD (of
 * ends that nobody polls the first 32 are kept); kd_load_wait waits. [any] */
int32_t kd_load(kd_engine *engine, const char *path, const kd_load_options *options);

/* Wait until the load has ended or, with KD_LOAD_HOLD and before kd_load_accept, holds its model: KD_OK, what went wrong
 * (sentence in kd_last_error), or KD_E_TIMEOUT. Whatever goes wrong leaves the model before in its place. [any] */
int32_t kd_load_wait(kd_engine *engine, uint32_t timeout_ms);

/* Stop a load under way: KD_OK means that it ends without its model taking over; memory is back when kd_load_wait returns
 * KD_E_CANCELLED. KD_E_STATE if there is none, or if its model has just taken over. [any] */
int32_t kd_load_cancel(kd_engine *engine);

typedef struct kd_progress {
    uint32_t size;
    int32_t phase; /* KD_LOAD_*                                                                                       */
    uint64_t bytes_done;
    uint64_t bytes_total;
    uint64_t elapsed_us;
    uint64_t phase_us[7]; /* of each phase so far: together elapsed_us                                                    */
} kd_progress;

/* Where the load stands, or how the last one ended. [any] */
int32_t kd_load_progress(kd_engine *engine, kd_progress *progress);

/* Start writing the loaded model's memory as packed files, one a rank, into the folder `path`, which is there; with the configs
 * beside them it can be loaded by an engine of the same backend and tp without any computing. Returns at once and ends like
 * kd_load, with KD_EVENT_LOAD; kd_load_wait, kd_load_progress and kd_load_cancel are its, too. Meant for an engine without
 * requests: those that run are slowed. [any] */
int32_t kd_save(kd_engine *engine, const char *path);

/* What the folder `path` holds, without loading it: a JSON document as docs/operations.md says, 0-terminated, into `json`. The
 * same checks as a load's, up to the first weight; `options` as for kd_load. Returns its length (KD_E_SIZE if `capacity` is
 * less than that and 1; *needed, if not NULL, says how much). [any] */
int32_t kd_inspect(const char *path, const kd_load_options *options, char *json, uint32_t capacity, uint32_t *needed);

/* Cancel all requests (their last event carries KD_E_CANCELLED), free the model and the KV cache. *freed_bytes, if not
 * NULL, is the drop of this process's resident memory as the kernel reports it. [any] */
int32_t kd_unload(kd_engine *engine, uint64_t *freed_bytes);

/* Refuse new requests (`on` != 0) or admit them again. Running and waiting requests go on. [any] */
int32_t kd_drain(kd_engine *engine, int32_t on);

typedef struct kd_model_info {
    uint32_t size;
    int32_t vocab_size;
    int32_t max_positions;      /* context, prompt and completion together                                           */
    int32_t layers;
    int32_t hidden_size;
    int32_t heads;
    int32_t experts;
    int32_t experts_per_token;
    int32_t draft_layers;       /* 0: no drafter                                                                      */
    int32_t draft_depth;        /* tokens one draft proposes                                                          */
    int32_t n_stop_ids;         /* from config.json and generation_config.json together                              */
    int32_t stop_ids[16];
    uint32_t skipped_tensors;   /* of the folder that text does not need: vision tower, prediction layers               */
    uint64_t parameters;        /* target; the drafter is not counted                                                 */
    uint64_t draft_parameters;
    uint64_t weight_bytes;      /* resident, all ranks                                                                */
    uint64_t expert_bytes;      /* of these the INT4 experts: packed words and scales                                 */
    uint64_t kv_bytes_token;    /* of one token on one rank, drafter included                                         */
    uint64_t kv_tokens;         /* tokens the KV cache holds                                                          */
    uint64_t content_hash;      /* of config and tensors as read                                                      */
    uint64_t weights_generation;/* 1 for the first model of an engine, then more with each                            */
    uint64_t target_hash;       /* content_hash without the drafter                                                    */
    uint64_t text_id;           /* as given to kd_load                                                                */
} kd_model_info;

/* KD_E_STATE while no model is loaded. [any] */
int32_t kd_info(kd_engine *engine, kd_model_info *info);

typedef struct kd_stats {
    uint32_t size;
    int32_t state;              /* kd_state                                                                           */
    int32_t streams;            /* decoding or prefilling now                                                         */
    int32_t waiting;            /* in the queue                                                                       */
    int32_t pages_total;        /* of one rank                                                                        */
    int32_t pages_free;
    int32_t pages_cached;       /* held by the prefix cache only: given up when needed                                */
    int32_t builder_budget;
    char builder[32];           /* the builder in force for new streams                                               */
    uint64_t builder_generation;
    uint64_t weights_generation;
    uint64_t turns;             /* turns of the engine thread that did work; grows while the engine is alive          */
    uint64_t last_turn_us;      /* when the last one ended, CLOCK_MONOTONIC                                           */
    uint64_t requests;          /* submitted                                                                          */
    uint64_t finished;          /* ended by a stop or by length                                                       */
    uint64_t cancelled;
    uint64_t failed;
    uint64_t prompt_tokens;     /* prefilled; cached ones are not counted                                             */
    uint64_t cached_tokens;     /* taken from the prefix cache                                                        */
    uint64_t tokens;            /* generated                                                                          */
    uint64_t rounds;            /* decode rounds: one forward call each, whatever the number of streams               */
    uint64_t round_streams;     /* summed over rounds                                                                 */
    uint64_t round_rows;        /* summed over rounds                                                                 */
    uint64_t round_nodes;       /* drafted nodes verified, summed over rounds                                         */
    uint64_t accepted_tokens;   /* drafted tokens accepted, summed over rounds                                        */
    uint64_t forward_calls;     /* of the target model: decode rounds and prefill steps                               */
    uint64_t prefill_steps;
    uint64_t draft_calls;
    uint64_t prefill_us;        /* wall time in prefill steps                                                         */
    uint64_t draft_us;
    uint64_t build_us;
    uint64_t verify_us;         /* forward, sample, accept, commit; all of a round whose trees are built on the device */
    uint64_t emit_us;
    uint64_t builder_failures;  /* rounds decoded without a tree since the builder failed                             */
    uint64_t device_ns;         /* within rounds, by the device's clock                                               */
    uint64_t gap_ns;            /* between rounds that followed one another on the device, by the same clock          */
    uint64_t gaps;              /* how many times                                                                     */
    uint64_t launch_gap_ns;     /* between a round and one the host launched right after it                           */
    uint64_t launch_gaps;
} kd_stats;

/* Counters since kd_open. [any] */
int32_t kd_stats_get(kd_engine *engine, kd_stats *stats);

/* ---- requests ---------------------------------------------------------------------------------------------------- */

typedef struct kd_stop_string {
    const char *bytes;
    uint32_t length; /* 1..KD_MAX_STOP_BYTES                                                                          */
    uint32_t reserved0;
} kd_stop_string;

enum {
    KD_REQUEST_HASH_LOGITS = 1,    /* fill kd_event.hashes                                                            */
    KD_REQUEST_LOGPROBS = 2,       /* fill kd_event.logprobs                                                          */
    KD_REQUEST_COLD = 4,           /* neither read nor fill the prefix cache                                          */
    KD_REQUEST_IGNORE_EOS = 8,     /* the model's own stop ids do not stop it                                         */
    KD_REQUEST_OWN_BUILDER = 16    /* builder and budget below, not the engine's                                      */
};

typedef struct kd_request {
    uint32_t size;
    uint32_t flags;              /* KD_REQUEST_*                                                                      */
    const int32_t *tokens;       /* the prompt; n_tokens >= 1                                                         */
    uint32_t n_tokens;
    uint32_t max_tokens;         /* >= 1; n_tokens + max_tokens <= max_positions                                      */
    uint32_t credit;             /* events it may produce before kd_request_credit; 0 = 256                           */
    float temperature;           /* 0 = argmax                                                                        */
    float top_p;                 /* 0 = 1 = off; in (0, 1]                                                            */
    float min_p;                 /* 0 = off; in [0, 1]                                                                */
    int32_t top_k;               /* 0 = off                                                                           */
    uint32_t choice;             /* index of this choice under one seed                                               */
    uint64_t seed;
    const int32_t *stop_ids;     /* beside the model's own; ids of the vocabulary                                     */
    uint32_t n_stop_ids;
    uint32_t n_stop_strings;
    const kd_stop_string *stop_strings; /* need token_bytes at load                                                   */
    uint64_t user;               /* returned in every event                                                           */
    const char *builder;         /* with KD_REQUEST_OWN_BUILDER                                                       */
    int32_t budget;
    uint32_t reserved0;
    uint64_t text_id;            /* 0: the tokens may be any model's; else they are for a model loaded with this text_id, and
                                  * another one answers KD_E_STATE, also if it takes over while the request waits     */
} kd_request;

/* Queue a request; *id names it from now on (never 0, never reused). Everything in `request` is copied. [any] */
int32_t kd_submit(kd_engine *engine, const kd_request *request, uint64_t *id);

/* End a request between two rounds; does not wait for that. KD_OK: it will end with KD_E_CANCELLED; KD_E_DONE: it had ended or
 * been cancelled already; KD_E_NOT_FOUND: there never was such a request. [any] */
int32_t kd_cancel(kd_engine *engine, uint64_t id);

/* Let a request produce `events` more events. At zero it sits out of rounds and keeps its pages. [any] */
int32_t kd_request_credit(kd_engine *engine, uint64_t id, uint32_t events);

/* float32 logits after each of `tokens` (logits[i] is the prediction for position i + 1), as prefill rows, cold, between
 * rounds. `logits` is the caller's, n_tokens x vocab_size floats. Blocks. [any] */
int32_t kd_score(kd_engine *engine, const int32_t *tokens, uint32_t n_tokens, float *logits);

/* ---- a model that is held: in memory after a load with KD_LOAD_HOLD, beside one that serves on; else KD_E_STATE ------ */

/* As kd_info will say it. [any] */
int32_t kd_load_info(kd_engine *engine, kd_model_info *info);

typedef struct kd_trial {
    uint32_t size;
    uint32_t n_tokens;  /* out                                                                                        */
    int32_t *tokens;    /* the caller's, max_tokens long                                                              */
    uint64_t *hashes;   /* the caller's, max_tokens long; NULL or with KD_REQUEST_HASH_LOGITS                         */
    uint64_t decode_us; /* out: from the first token, which the prompt gives, to the last                             */
} kd_trial;

/* Decode a request to its end, alone and cold. Stop ids end it; stop strings, credit, user and text_id mean nothing here, and
 * without KD_REQUEST_OWN_BUILDER there are no trees. Blocks. KD_E_BUSY: another one runs. KD_E_CANCELLED: kd_load_cancel. [any] */
int32_t kd_load_try(kd_engine *engine, const kd_request *request, kd_trial *trial);

/* Let the model take its place; kd_load_wait then waits for that. `builder` and `budget`: what is in force from then on, unless
 * kd_builder_use says otherwise after this; NULL: what was chosen before or is built in. KD_E_STATE: the model has no drafter and
 * `builder` needs one. [any] */
int32_t kd_load_accept(kd_engine *engine, const char *builder, int32_t budget);

/* ---- events ------------------------------------------------------------------------------------------------------ */

typedef enum kd_event_type {
    KD_EVENT_TOKENS = 1, /* tokens of one round                                                                       */
    KD_EVENT_END = 2,    /* the request's last event; it may carry tokens and text too                                */
    KD_EVENT_LOAD = 3,   /* a load has ended: status                                                                  */
    KD_EVENT_FATAL = 4   /* the engine is latched: status, kd_last_error of the next call says why                    */
} kd_event_type;

typedef enum kd_finish {
    KD_FINISH_NONE = 0,
    KD_FINISH_STOP = 1,        /* a stop id (the id is the last token) or a stop string                               */
    KD_FINISH_LENGTH = 2,      /* max_tokens                                                                          */
    KD_FINISH_CANCELLED = 3,
    KD_FINISH_ERROR = 4        /* status says which                                                                   */
} kd_finish;

typedef struct kd_event {
    uint32_t size;               /* set by the caller in the first element: the stride of the array                   */
    int32_t type;                /* kd_event_type                                                                     */
    uint64_t id;                 /* request, or 0                                                                     */
    uint64_t user;
    uint32_t sequence;           /* 0, 1, 2, ... of this request: no gaps                                             */
    int32_t status;              /* END, LOAD, FATAL: KD_OK or why                                                    */
    int32_t finish;              /* kd_finish                                                                         */
    int32_t n_tokens;
    int32_t tokens[17];
    int32_t nodes;               /* drafted nodes of the round                                                        */
    uint64_t hashes[17];         /* of the float32 logits row each token was chosen from                              */
    float logprobs[17];          /* of each token under the unmodified logits                                         */
    uint32_t text_length;
    const char *text;            /* bytes that became certain, cut at UTF-8 boundaries; not zero-terminated; the
                                  * engine's, valid until the next kd_poll                                            */
    uint64_t builder_generation; /* of the tree this round verified                                                   */
    uint64_t weights_generation;
    uint32_t total_tokens;       /* generated so far                                                                  */
    uint32_t cached_tokens;      /* of the prompt, from the prefix cache                                              */
} kd_event;

/* Move up to `capacity` events into `events`, oldest first; waits up to timeout_ms for the first one. Returns how many,
 * or a negative kd_status. Texts of the events returned by the call before become invalid. [poller] */
int32_t kd_poll(kd_engine *engine, kd_event *events, uint32_t capacity, uint32_t timeout_ms);

/* A file descriptor that is readable while events wait (poll, epoll, select; never read it). The engine's. [any] */
int32_t kd_event_fd(kd_engine *engine);

/* ---- tree builders ----------------------------------------------------------------------------------------------- */

#define KD_BUILDER_ABI 1

/* What the drafter thinks: for each depth, candidates best first. All arrays are the engine's. */
typedef struct kd_tree_in {
    uint32_t size;
    int32_t depths;        /* 0..KD_MAX_TABLE_DEPTH                                                                   */
    int32_t width;         /* candidates a depth                                                                      */
    int32_t budget;        /* most nodes to return                                                                    */
    int32_t root_token;    /* the last token chosen; the tree hangs below it                                          */
    int32_t position;      /* its position in the sequence                                                            */
    const int32_t *token;  /* [depths][width]                                                                         */
    const float *logprob;  /* [depths][width], natural log over the whole vocabulary, falling along a row             */
} kd_tree_in;

/* Nodes 1..n; node 0 is the root. Arrays hold `budget` entries: entry i - 1 is node i. */
typedef struct kd_tree_out {
    uint32_t size;
    int32_t n;
    int32_t *token;
    int32_t *parent;       /* 0..i - 1; two children of one parent have different tokens                              */
} kd_tree_out;

/* A builder: decides which continuations a round verifies. It can cost speed, never change a token: whatever it returns
 * is verified. build() runs once a stream and round on the engine thread: no blocking, no allocation. A failure
 * or a malformed tree costs that round its tree and is counted. */
typedef struct kd_tree_builder {
    uint32_t size;
    uint32_t abi;                       /* KD_BUILDER_ABI                                                             */
    const char *name;                   /* 1..31 of [a-z0-9_-]                                                        */
    const char *description;            /* one line                                                                   */
    void *(*create)(int32_t max_nodes); /* the instance build() works on; NULL is a failure                           */
    int32_t (*build)(void *self, const kd_tree_in *in, kd_tree_out *out); /* KD_OK or a negative status               */
    void (*destroy)(void *self);
} kd_tree_builder;

typedef struct kd_builder_info {
    uint32_t size;
    int32_t in_force;          /* 1: new streams use it                                                               */
    int32_t budget;            /* if in force                                                                         */
    int32_t streams;           /* running with it now                                                                 */
    char name[32];
    char description[128];
} kd_builder_info;

/* Add a builder; the struct is copied, the functions must stay valid until kd_close. [any] */
int32_t kd_builder_register(kd_engine *engine, const kd_tree_builder *builder);

/* Fill up to `capacity` entries (size of the first is the stride); returns how many builders there are. [any] */
int32_t kd_builder_list(kd_engine *engine, kd_builder_info *infos, uint32_t capacity);

/* From the next round on, build trees with `name` and up to `budget` nodes (0 = the builder's default), for one request
 * or, with id 0, for all running and future ones. *generation, if not NULL, is what the events of those rounds repeat.
 * KD_E_STATE: the model has no drafter and `name` needs one, or there is none and none is being loaded. [any] */
int32_t kd_builder_use(kd_engine *engine, const char *name, int32_t budget, uint64_t id, uint64_t *generation);

/* Run a built-in builder on a table; needs no engine. out->token and out->parent are the caller's, in->budget long. [any] */
int32_t kd_builder_build(const char *name, const kd_tree_in *in, kd_tree_out *out);

/* cdef: end */

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif

#if defined(__cplusplus)
#define KD_STATIC_ASSERT(e) static_assert(e, #e)
#else
#define KD_STATIC_ASSERT(e) _Static_assert(e, #e)
#endif
#if UINTPTR_MAX == UINT64_MAX
KD_STATIC_ASSERT(offsetof(kd_options, kv_bytes) == 40 && sizeof(kd_options) == 64);
KD_STATIC_ASSERT(sizeof(kd_rank_record) == 64 && sizeof(kd_step_record) == 64 + 8 * 64);
KD_STATIC_ASSERT(offsetof(kd_request, seed) == 48);
KD_STATIC_ASSERT(sizeof(kd_request) == 112);
KD_STATIC_ASSERT(offsetof(kd_event, hashes) == 112);
KD_STATIC_ASSERT(offsetof(kd_event, text) == 320);
KD_STATIC_ASSERT(sizeof(kd_event) == 352);
#endif
#undef KD_STATIC_ASSERT

#endif /* KD_H */
