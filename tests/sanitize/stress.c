/* stress.c: one engine used from five threads at once, for the sanitizers (tests/sanitize/run.sh).
 *
 *     stress MODEL_FOLDER REQUESTS TP
 *
 * Two threads submit, one cancels, swaps builders, asks for counters and scores, one loads and unloads a second engine,
 * and the main thread polls. Ends with 0 if every request ended exactly once, its events had no gap, and all requests
 * of one prompt gave the same tokens and logits as far as they went.
 */
#define _POSIX_C_SOURCE 200809L

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kd.h"

enum { PROMPTS = 4, MAX_TOKENS = 24, MAX_REQUESTS = 4096, CAPACITY = 32 };

static const int32_t prompts[PROMPTS][8] = {
    {325, 343, 3671, 287, 640, 324, 25, 12},
    {325, 286, 748, 262, 840, 514, 640, 25},
    {4064, 325, 343, 3671, 287, 640, 324, 277},
    {8, 488, 558, 277, 258, 395, 1663, 310},
};

static struct {
    atomic_ullong id;
    uint32_t next_sequence;
    uint32_t tokens;
    int ends;
} requests[MAX_REQUESTS];

static struct {
    int32_t tokens[MAX_TOKENS];
    uint64_t hashes[MAX_TOKENS];
    uint32_t n;
} answers[PROMPTS];

static kd_engine* engine;
static const char* folder;
static int n_requests;
static atomic_int failures, submitted, done;

static void complain(const char* what, int64_t value) {
    fprintf(stderr, "stress: %s (%" PRId64 "): %s\n", what, value, kd_last_error());
    failures++;
}

static void* submitter(void* first) {
    for (int i = *(int*)first; i < n_requests; i += 2) {
        kd_request request = {.size = sizeof request};
        request.tokens = prompts[i % PROMPTS];
        request.n_tokens = 8;
        request.max_tokens = MAX_TOKENS;
        request.flags = KD_REQUEST_IGNORE_EOS | KD_REQUEST_HASH_LOGITS | (i % 3 == 0 ? KD_REQUEST_COLD : 0);
        request.credit = 1 + i % 3;
        request.user = (uint64_t)i;
        uint64_t id = 0;
        int32_t status;
        while ((status = kd_submit(engine, &request, &id)) == KD_E_BUSY) {
            kd_stats stats = {.size = sizeof stats};
            kd_stats_get(engine, &stats);
        }
        if (status != KD_OK) complain("submit", status);
        requests[i].id = id;
        submitted++;
    }
    return NULL;
}

static void* meddler(void* unused) {
    static const char* const names[] = {"none", "chain", "heap"};
    (void)unused;
    for (unsigned turn = 0; !done; turn++) {
        uint64_t generation = 0;
        const int32_t used =
            kd_builder_use(engine, names[turn % 3], (int32_t)(turn % 3 == 2 ? 8 + turn % 9 : 0), 0, &generation);
        if (used != KD_OK) complain("use", used);
        const int victim = (int)(turn * 7 % (unsigned)n_requests);
        const uint64_t id = requests[victim].id;
        if (id && victim % 5 == 0) kd_cancel(engine, id);
        kd_stats stats = {.size = sizeof stats};
        if (kd_stats_get(engine, &stats) != KD_OK) complain("stats", 0);
        kd_builder_info infos[8];
        memset(infos, 0, sizeof infos);
        infos[0].size = sizeof infos[0];
        if (kd_builder_list(engine, infos, 8) < 3) complain("list", 0);
        if (turn % 8 == 0) {
            kd_model_info info = {.size = sizeof info};
            if (kd_info(engine, &info) != KD_OK) complain("info", 0);
            float* logits = malloc(sizeof(float) * 8 * (size_t)info.vocab_size);
            if (!logits || kd_score(engine, prompts[turn % PROMPTS], 8, logits) != KD_OK) complain("score", turn);
            free(logits);
        }
    }
    return NULL;
}

static void* second_engine(void* unused) {
    (void)unused;
    for (int round = 0; round < 2; round++) {
        kd_options options = {.size = sizeof options, .threads = 1, .kv_bytes = 4 << 20};
        kd_engine* other = NULL;
        kd_load_options how = {.size = sizeof how};
        if (kd_open(&other, &options) != KD_OK || kd_load(other, folder, &how) != KD_OK)
            complain("second engine", round);
        if (round == 1) kd_load_cancel(other);
        kd_load_wait(other, 120000);
        uint64_t freed;
        kd_unload(other, &freed);
        if (kd_close(other) != KD_OK) complain("close", round);
    }
    return NULL;
}

/* Tokens and hashes of a request must be those that others of its prompt had. */
static void check(const kd_event* e) {
    const int i = (int)e->user;
    if (e->sequence != requests[i].next_sequence++) complain("gap before event", e->sequence);
    for (int32_t t = 0; t < e->n_tokens; t++) {
        const uint32_t at = requests[i].tokens++;
        if (at >= MAX_TOKENS) {
            complain("too many tokens", at);
            break;
        }
        if (at == answers[i % PROMPTS].n) {
            answers[i % PROMPTS].tokens[at] = e->tokens[t];
            answers[i % PROMPTS].hashes[at] = e->hashes[t];
            answers[i % PROMPTS].n++;
        } else if (answers[i % PROMPTS].tokens[at] != e->tokens[t] || answers[i % PROMPTS].hashes[at] != e->hashes[t]) {
            complain("another token or other logits at", at);
        }
    }
    if (e->type != KD_EVENT_END) {
        kd_request_credit(engine, e->id, 1);
        return;
    }
    if (++requests[i].ends != 1) complain("ended twice", i);
    if (e->status != KD_OK && e->status != KD_E_CANCELLED) complain("ended with", e->status);
    if (e->status == KD_OK && requests[i].tokens != MAX_TOKENS) complain("too few tokens", requests[i].tokens);
}

int main(int argc, char** argv) {
    if (argc != 4 || atoi(argv[2]) < 1 || atoi(argv[2]) > MAX_REQUESTS) {
        fprintf(stderr, "usage: stress MODEL_FOLDER REQUESTS TP\n");
        return 64;
    }
    folder = argv[1];
    n_requests = atoi(argv[2]);
    kd_options options = {.size = sizeof options, .max_streams = 6, .max_queue = 16, .kv_bytes = 8 << 20};
    options.tp = atoi(argv[3]);
    options.threads = options.tp > 2 ? options.tp : 2;
    if (kd_open(&engine, &options) != KD_OK || kd_load(engine, folder, NULL) != KD_OK ||
        kd_load_wait(engine, 120000) != KD_OK) {
        complain("open and load", 0);
        return 1;
    }
    pthread_t threads[4];
    int first[2] = {0, 1};
    pthread_create(&threads[0], NULL, submitter, &first[0]);
    pthread_create(&threads[1], NULL, submitter, &first[1]);
    pthread_create(&threads[2], NULL, meddler, NULL);
    pthread_create(&threads[3], NULL, second_engine, NULL);

    kd_event events[CAPACITY];
    memset(events, 0, sizeof events);
    events[0].size = sizeof events[0];
    for (int ended = 0; ended < n_requests;) {
        const int32_t n = kd_poll(engine, events, CAPACITY, 120000);
        if (n <= 0) {
            complain("poll", n);
            return 1;
        }
        for (int32_t i = 0; i < n; i++) {
            if (events[i].type == KD_EVENT_FATAL) {
                complain("fatal", events[i].status);
                return 1;
            }
            if (events[i].type != KD_EVENT_TOKENS && events[i].type != KD_EVENT_END) continue;
            check(&events[i]);
            ended += events[i].type == KD_EVENT_END;
        }
    }
    done = 1;
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    kd_stats stats = {.size = sizeof stats};
    kd_stats_get(engine, &stats);
    if (stats.pages_free + stats.pages_cached != stats.pages_total) complain("pages not given back", stats.pages_free);
    if (kd_close(engine) != KD_OK) complain("close", 0);
    fprintf(stderr,
            "stress: %d requests, %" PRIu64 " cancelled, %" PRIu64 " tokens in %" PRIu64 " rounds, %d failures\n",
            n_requests, stats.cancelled, stats.tokens, stats.rounds, failures);
    return failures ? 1 : 0;
}
