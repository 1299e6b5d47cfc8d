/* embed.c: kd inside a C program, without Python and without a daemon.
 *
 *     embed MODEL_FOLDER
 *
 * Opens an engine, loads a folder, decodes two requests side by side, reads their events with poll(2), swaps the tree
 * builder while both are running, cancels one of them and closes. The text of the first goes to stdout, a summary to
 * stderr. Build: gcc -std=c11 -I include examples/embed.c -o embed -L build/out -lkd_cpu
 */
#define _POSIX_C_SOURCE 200809L

#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kd.h"

enum { MAX_LINE = 1024, CAPACITY = 16 };

static void die(const char* doing) {
    fprintf(stderr, "embed: %s: %s\n", doing, kd_last_error());
    exit(1);
}

/* The vocabulary, as kd_load_options wants it: the bytes of all tokens back to back, and where each one ends. */
struct vocabulary {
    uint8_t* bytes;
    uint32_t* ends;
    uint32_t n;
};

static int base64_value(char c) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const char* at = c ? strchr(digits, c) : NULL;
    return at ? (int)(at - digits) : -1;
}

/* tiktoken.model: lines "base64 rank", ranks 0, 1, 2, ... Without this file only token ids could stop a request. */
static struct vocabulary read_vocabulary(const char* folder) {
    char path[4096], line[MAX_LINE];
    struct vocabulary v = {NULL, NULL, 0};
    uint32_t length = 0;
    snprintf(path, sizeof path, "%s/tiktoken.model", folder);
    FILE* file = fopen(path, "r");
    if (!file) return v;
    while (fgets(line, sizeof line, file)) {
        uint32_t bits = 0;
        int n_bits = 0;
        v.bytes = realloc(v.bytes, length + MAX_LINE);
        v.ends = realloc(v.ends, (v.n + 1) * sizeof *v.ends);
        if (!v.bytes || !v.ends) exit(1);
        for (const char* c = line; base64_value(*c) >= 0; c++) {
            bits = bits << 6 | (uint32_t)base64_value(*c);
            n_bits += 6;
            if (n_bits >= 8) v.bytes[length++] = (uint8_t)(bits >> (n_bits -= 8));
        }
        v.ends[v.n++] = length;
    }
    fclose(file);
    return v;
}

static uint64_t submit(kd_engine* engine, const int32_t* tokens, uint32_t n, uint32_t max_tokens, uint64_t user) {
    kd_request request = {.size = sizeof request};
    request.tokens = tokens;
    request.n_tokens = n;
    request.max_tokens = max_tokens;
    request.flags = KD_REQUEST_IGNORE_EOS;
    request.credit = 4; /* events it may produce before we ask for more */
    request.user = user;
    uint64_t id = 0;
    if (kd_submit(engine, &request, &id) != KD_OK) die("submit");
    return id;
}

int main(int argc, char** argv) {
    /* "def is_prime(n):\n" and "def fibonacci(n: int) -> int:\n" in the vocabulary of models/nano */
    static const int32_t first[] = {325, 343, 3671, 287, 640, 324};
    static const int32_t second[] = {325, 286, 748, 262, 840, 514, 640, 25, 558, 8, 488, 558, 277};
    if (argc != 2) {
        fprintf(stderr, "usage: embed MODEL_FOLDER\n");
        return 64;
    }
    if (kd_abi_version() != KD_ABI_VERSION) {
        fprintf(stderr, "embed: built for ABI %d, the library is %d\n", KD_ABI_VERSION, kd_abi_version());
        return 1;
    }

    kd_engine* engine = NULL;
    kd_options options = {.size = sizeof options, .max_streams = 4, .kv_bytes = 16 << 20};
    if (kd_open(&engine, &options) != KD_OK) die("open");

    struct vocabulary words = read_vocabulary(argv[1]);
    kd_load_options how = {.size = sizeof how};
    how.token_bytes = words.bytes;
    how.token_ends = words.ends;
    how.n_tokens = words.n;
    if (kd_load(engine, argv[1], &how) != KD_OK) die("load");
    free(words.bytes); /* copied */
    free(words.ends);
    if (kd_load_wait(engine, 60000) != KD_OK) die("load");

    uint64_t a = submit(engine, first, sizeof first / sizeof *first, 64, 1);
    uint64_t b = submit(engine, second, sizeof second / sizeof *second, 512, 2);
    uint64_t generation = 0; /* of the builder swapped in below */
    uint32_t a_events = 0, b_events = 0, running = 2, with_new_builder = 0;

    kd_event events[CAPACITY];
    memset(events, 0, sizeof events);
    events[0].size = sizeof events[0]; /* the stride of the array */
    struct pollfd ready = {.fd = kd_event_fd(engine), .events = POLLIN};
    while (running > 0) {
        /* any event loop can wait on this descriptor; nothing is ever read from it */
        if (poll(&ready, 1, 30000) <= 0) {
            fprintf(stderr, "embed: no event within 30 s\n");
            return 1;
        }
        int32_t n = kd_poll(engine, events, CAPACITY, 0);
        if (n < 0) die("poll");
        for (int32_t i = 0; i < n; i++) {
            const kd_event* e = &events[i];
            if (e->type == KD_EVENT_FATAL) {
                fprintf(stderr, "embed: the engine failed: %s\n", kd_status_name(e->status));
                return 1;
            }
            if (e->type != KD_EVENT_TOKENS && e->type != KD_EVENT_END) continue;
            if (e->id == a) {
                fwrite(e->text, 1, e->text_length, stdout);
                if (generation && e->builder_generation == generation) with_new_builder++;
                /* in mid-stream: from the next round on, chains instead of trees; not a token changes */
                if (++a_events == 3 && kd_builder_use(engine, "chain", 0, 0, &generation) != KD_OK) die("use chain");
            }
            if (e->id == b && ++b_events == 3) kd_cancel(engine, b);
            if (e->type == KD_EVENT_END) {
                running--;
                fprintf(stderr, "request %" PRIu64 ": %s, finish %d, %u tokens\n", e->user, kd_status_name(e->status),
                        e->finish, e->total_tokens);
            } else if (kd_request_credit(engine, e->id, 1) == KD_E_INVALID) {
                die("credit");
            }
        }
    }
    printf("\n");

    kd_stats stats = {.size = sizeof stats};
    if (kd_stats_get(engine, &stats) != KD_OK) die("stats");
    fprintf(stderr, "%" PRIu64 " tokens in %" PRIu64 " rounds; %u events with the new builder, %s\n", stats.tokens,
            stats.rounds, with_new_builder, stats.builder);
    return kd_close(engine) == KD_OK ? 0 : 1;
}
