// Memory, copies and the calling thread's place among the ranks. One implementation a backend.
//
// Every rank is one host thread. bind() ties the calling thread to its rank's context; ops, copies and collectives of
// this thread then use that context. A context owns its compute threads (CPU) or stream (CUDA).
#pragma once

#include <bit>
#include <functional>
#include <memory>
#include <type_traits>

#include "types.h"

namespace kd::device {

struct Options {
    int tp = 1;
    int threads = 0;  // compute threads over all ranks; 0 = the cores this process may use
    int isa = KD_ISA_AUTO;
    bool share_devices = false;         // more ranks than GPUs; the CPU twin shares its cores anyway
    kd_rank_record* records = nullptr;  // [tp] to note meetings in, or none
    // How ranks meet: the bits do not depend on it. A backend's own word; null: its choice. KD_E_INVALID for what it has not.
    const char* transport = nullptr;
};

class Context;  // one rank's
class Group;    // the ranks that meet in a collective

// A group of `tp` ranks. Throws Error(KD_E_DEVICE) if the machine lacks what the options ask for.
std::shared_ptr<Group> open_group(const Options& options);
Context* context(Group& group, int rank);

// Tie the calling thread to a rank until it is bound again. Thread-local.
void bind(Context* context);

// After a failure of one rank: every rank waiting in, or arriving at, a collective gets Error(KD_E_FATAL).
void abort(Group& group);

const char* backend();                     // "cpu", "cuda"
const char* weight_layout();               // what pack_experts makes: another name when that changes
const char* built_isas();                  // what this library was compiled for, e.g. "plain avx2 avx512"
const char* isa_name(const Group& group);  // e.g. "avx512"
int thread_count(const Group& group);
size_t act_bytes();
// Bytes this process has in use where the group's ranks have their memory.
uint64_t memory_used(const Group& group);
// Bytes that all ranks together could still be given; UINT64_MAX where alloc() itself refuses what is not there.
uint64_t memory_free();
int most_rows();                // of one round, unless asked otherwise
const char* default_builder();  // of a model with a drafter

// Zeroed memory of the bound rank, touched only when written; throws Error(KD_E_NOMEM). 64-byte aligned.
void* alloc(size_t bytes);
void release(void* p);

// Host memory that upload() takes from while the caller goes on: it may be written again after settle(). Throws Error(KD_E_NOMEM).
void* alloc_host(size_t bytes);
void release_host(void* p);

void upload(void* device, const void* host, size_t bytes);
void settle();  // what the bound rank uploaded so far has left its source
// Where bytes for `device` are best put: there, where the host can write there, else in `buffer`, for upload().
void* landing(void* device, void* buffer);
void download(void* host, const void* device, size_t bytes);  // complete on return

template <class T>
Dev<T> alloc_array(size_t n) {
    return Dev<T>(static_cast<T*>(alloc(n * sizeof(T))));
}
Rows alloc_rows(size_t n_rows, int width);  // stride >= width, so that a backend can align rows
void release_rows(Rows rows);

// A count that an operation of this step has written, as a number where the backend knows it by then (CPU), else as it is.
Count known(Count count);

// Run `body`, the device work of a step, on the bound rank. What it does must depend on `key` and on data alone: a backend may
// record it and run the record the next time. It may not copy between host and device.
void replay(uint64_t key, const std::function<void()>& body);

// Choose by measuring what may be chosen of how the ranks of a group meet; no bit depends on it. By every rank, before its first
// replay() and while nobody else uses the ranks' contexts. [collective]
void measure_transport();

// Drop what the bound rank has recorded: for when the memory it was recorded with goes.
void forget();

// Memory that host and device both see while the device works, at one address; zeroed.
void* alloc_shared(size_t bytes);
void release_shared(void* p);

// Rounds that may follow one another before the host can see the first: 1 where the host is the device.
int rounds_at_once(const Group& group);

// Run `body`, a round that ends with ops::end_round, again for as long as that says so; recorded like a replay(). It may return
// before the work is done: end_round tells.
void loop(uint64_t key, const std::function<void()>& body);

// Whether the device has done everything the bound rank gave it. Throws Error(KD_E_FATAL) if something of it failed.
bool idle();

// ---- when work was done (stages.h) ------------------------------------------------------------------------------------

// The body of replay() or loop() that is run or recorded now on the bound rank.
struct Body {
    bool under_way = false;
    uint64_t key = 0;
    uint64_t count = 0;  // of bodies begun: another number, another body
};
Body body();

// Write the device's clock, in ns, once everything given before is done: at[0] counts the stamps, the n-th is put at at[1 + n % kept].
// Can be recorded.
void stamp(Dev<uint64_t> at, int kept);

// Elements. A Dev is its address and nothing else, so it passes as the void* of the functions above.
template <class T>
void upload(Dev<T> to, const std::type_identity_t<std::remove_const_t<T>>* from, size_t n) {
    upload(std::bit_cast<void*>(to), static_cast<const void*>(from), n * sizeof(T));
}
template <class T>
void download(std::type_identity_t<std::remove_const_t<T>>* to, Dev<T> from, size_t n) {
    download(static_cast<void*>(to), std::bit_cast<const void*>(from), n * sizeof(T));
}
template <class T>
void release(Dev<T> p) {
    release(std::bit_cast<void*>(p));
}

}  // namespace kd::device
