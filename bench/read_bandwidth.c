// How fast this machine reads memory: the ceiling that decoding is measured against. Built and called by bandwidth.py.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { STREAMS = 8, LINE = 64, AHEAD = 2048 };  // places read in turn; bytes that are fetched ahead of use

typedef uint64_t Words __attribute__((vector_size(LINE), aligned(LINE)));

typedef struct {
    const char* begin;  // `fixed` bytes, then the pool
    size_t fixed, piece;
    int pieces, chosen;  // in the pool, and a pass
    int thread, threads, passes;
    pthread_barrier_t* start;
    double seconds;
    uint64_t sum;  // keeps the reads alive
} Reader;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void read_some(const char* begin, size_t bytes, Words* sum) {
    const size_t each = bytes / STREAMS / LINE * LINE;
    for (size_t at = 0; at < each; at += LINE) {
        for (int s = 0; s < STREAMS; s++) {
            const char* p = begin + (size_t)s * each + at;
            __builtin_prefetch(p + AHEAD);
            sum[s] += *(const Words*)p;
        }
    }
    __asm__ volatile("" ::: "memory");
}

// This thread's share of `bytes` at p, in whole lines.
static void read_share(const Reader* r, const char* p, size_t bytes, Words* sum) {
    const size_t share = bytes / (size_t)r->threads / LINE * LINE;
    read_some(p + (size_t)r->thread * share, share, sum);
}

static void* read_all(void* data) {
    Reader* r = data;
    Words sum[STREAMS] = {{0}};
    uint64_t random = 1;  // the same in every thread
    pthread_barrier_wait(r->start);
    const double began = now();
    for (int pass = 0; pass < r->passes; pass++) {
        read_share(r, r->begin, r->fixed, sum);
        for (int i = 0; i < r->chosen; i++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            const size_t at = (size_t)((random >> 33) % (uint64_t)r->pieces);
            read_share(r, r->begin + r->fixed + at * r->piece, r->piece, sum);
        }
    }
    r->seconds = now() - began;
    for (int s = 0; s < STREAMS; s++) r->sum += sum[s][0] + sum[s][LINE / 8 - 1];
    return NULL;
}

// Bytes a second that `threads` (1 .. 64) read together, each its own part, in `passes` after one unmeasured: a pass reads
// `fixed` bytes and, as a model reads the experts that a token is sent to, `chosen` of `pieces` stretches of `piece` bytes, anew
// at random each time. Sizes are rounded down to lines. 0: no memory.
double read_bandwidth(size_t fixed, size_t piece, int pieces, int chosen, int threads, int passes) {
    fixed = fixed / LINE * LINE, piece = piece / LINE * LINE;
    const size_t bytes = fixed + piece * (size_t)pieces;
    char* p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return 0;
    madvise(p, bytes, MADV_HUGEPAGE);  // as the engine does
    memset(p, 1, bytes);
    pthread_barrier_t start;
    pthread_barrier_init(&start, NULL, (unsigned)threads);
    double slowest = 0;
    for (int timed = 0; timed < 2; timed++) {
        Reader reader[64];
        pthread_t thread[64];
        for (int i = 0; i < threads; i++) {
            reader[i] = (Reader){p, fixed, piece, pieces, chosen, i, threads, timed ? passes : 1, &start, 0, 0};
            pthread_create(&thread[i], NULL, read_all, &reader[i]);
        }
        slowest = 0;
        for (int i = 0; i < threads; i++) {
            pthread_join(thread[i], NULL);
            if (reader[i].seconds > slowest) slowest = reader[i].seconds;
        }
    }
    pthread_barrier_destroy(&start);
    munmap(p, bytes);
    return (double)(fixed + piece * (size_t)chosen) * passes / slowest;
}
