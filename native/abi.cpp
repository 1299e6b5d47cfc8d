// The C interface: translate, check, guard. Everything behind it throws kd::Error; nothing leaves this file but a status and a
// sentence.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <string>

#include "engine/handle.h"
#include "engine/record.h"
#include "error.h"
#include "kd.h"
#include "model/inspect.h"
#include "structs.h"

namespace {

using kd::fail;
using kd::kMaxStruct;
using kd::read_struct;
using kd::required;
using kd::write_struct;

// Fixed storage, so that reporting "out of memory" needs none.
thread_local char last_error[1024] = "";

int32_t report(int32_t status, const char* sentence) {
    snprintf(last_error, sizeof last_error, "%s", sentence);
    return status;
}

template <class F>
int32_t guard(F&& body) noexcept {
    try {
        if constexpr (std::is_void_v<decltype(body())>) {
            body();
            return KD_OK;
        } else {
            return body();
        }
    } catch (const kd::Error& e) {
        return report(e.status, e.what());
    } catch (const std::bad_alloc&) {
        return report(KD_E_NOMEM, "out of memory");
    } catch (const std::exception& e) {
        return report(KD_E_FATAL, e.what());
    } catch (...) {
        return report(KD_E_FATAL, "unknown failure");
    }
}

int in_range(int value, int fallback, int least, int most, const char* name) {
    if (value == 0) return fallback;
    if (value < least || value > most)
        fail(KD_E_INVALID, "kd_options.%s is %d: %d .. %d, or 0", name, value, least, most);
    return value;
}

kd::Options read_options(const kd_options* from) {
    kd::Options o;
    if (!from) return o;
    const kd_options c = read_struct(from, "kd_options");
    if (c.tp != 0 && c.tp != 1 && c.tp != 2 && c.tp != 4 && c.tp != 8)
        fail(KD_E_INVALID, "kd_options.tp is %d: 1, 2, 4 or 8", c.tp);
    o.tp = c.tp ? c.tp : 1;
    o.threads = in_range(c.threads, 0, 1, 1024, "threads");
    if (c.isa < KD_ISA_AUTO || c.isa > KD_ISA_AVX512)
        fail(KD_E_INVALID, "kd_options.isa is %d: one of KD_ISA_*", c.isa);
    o.isa = c.isa;
    o.max_streams = in_range(c.max_streams, o.max_streams, 1, KD_MAX_STREAMS, "max_streams");
    o.max_queue = in_range(c.max_queue, o.max_queue, 1, KD_MAX_QUEUE, "max_queue");
    o.max_rows = in_range(c.max_rows, o.max_rows, o.max_streams, 65536, "max_rows");
    if (o.max_rows < o.max_streams)
        fail(KD_E_INVALID, "kd_options.max_rows is %d, less than max_streams, %d", o.max_rows, o.max_streams);
    o.max_nodes = in_range(c.max_nodes, o.max_nodes, 1, KD_MAX_NODES, "max_nodes");
    o.prefill_chunk = in_range(c.prefill_chunk, std::min(o.prefill_chunk, o.max_rows), 1, o.max_rows, "prefill_chunk");
    if (c.prefix_cache != 0 && c.prefix_cache != 1)
        fail(KD_E_INVALID, "kd_options.prefix_cache is %d: 0 (on) or 1 (off)", c.prefix_cache);
    o.prefix_cache = c.prefix_cache == 0;
    if (c.kv_bytes) o.kv_bytes = c.kv_bytes;
    if (c.share_devices != 0 && c.share_devices != 1)
        fail(KD_E_INVALID, "kd_options.share_devices is %d: 0 (off) or 1 (on)", c.share_devices);
    o.share_devices = c.share_devices == 1;
    if (c.record_path) o.record_path = c.record_path;
    if (c.slow_reader_timeout_ms) o.slow_reader_timeout_ms = c.slow_reader_timeout_ms;
    return o;
}

kd::Sampling read_sampling(const kd_request& r) {
    if (!(r.temperature >= 0 && r.temperature <= 100))
        fail(KD_E_SAMPLING, "temperature is %g: 0 (argmax) .. 100", double(r.temperature));
    if (!(r.top_p >= 0 && r.top_p <= 1)) fail(KD_E_SAMPLING, "top_p is %g: above 0 and at most 1", double(r.top_p));
    if (!(r.min_p >= 0 && r.min_p <= 1)) fail(KD_E_SAMPLING, "min_p is %g: 0 .. 1", double(r.min_p));
    if (r.top_k < 0) fail(KD_E_SAMPLING, "top_k is %d: 0 (off) or more", r.top_k);
    kd::Sampling s;
    s.temperature = r.temperature;
    s.top_p = r.top_p == 0 ? 1.0f : r.top_p;
    s.min_p = r.min_p;
    s.top_k = r.top_k;
    s.choice = r.choice;
    s.seed = r.seed;
    s.want_hash = (r.flags & KD_REQUEST_HASH_LOGITS) != 0;
    s.want_logprob = (r.flags & KD_REQUEST_LOGPROBS) != 0;
    return s;
}

std::unique_ptr<kd::Request> read_request(const kd_request* from, bool stop_strings_possible) {
    const kd_request c = read_struct(from, "kd_request");
    constexpr uint32_t known =
        KD_REQUEST_HASH_LOGITS | KD_REQUEST_LOGPROBS | KD_REQUEST_COLD | KD_REQUEST_IGNORE_EOS | KD_REQUEST_OWN_BUILDER;
    if (c.flags & ~known) fail(KD_E_TOO_NEW, "kd_request.flags has 0x%x, unknown to this library", c.flags & ~known);
    if (!c.tokens || c.n_tokens == 0) fail(KD_E_INVALID, "the prompt is empty: give at least one token");
    if (c.n_tokens > INT32_MAX / 2 || c.max_tokens > INT32_MAX / 2)
        fail(KD_E_CONTEXT, "%u prompt tokens and max_tokens %u: more than any model's context", c.n_tokens,
             c.max_tokens);
    if (c.max_tokens == 0) fail(KD_E_INVALID, "kd_request.max_tokens is 0: give at least 1");
    if (c.n_stop_ids > KD_MAX_STOP_IDS || (c.n_stop_ids && !c.stop_ids))
        fail(KD_E_INVALID, "kd_request has %u stop ids: at most %d, and an array", c.n_stop_ids, KD_MAX_STOP_IDS);
    if (c.n_stop_strings > KD_MAX_STOP_STRINGS || (c.n_stop_strings && !c.stop_strings))
        fail(KD_E_INVALID, "kd_request has %u stop strings: at most %d, and an array", c.n_stop_strings,
             KD_MAX_STOP_STRINGS);
    if (c.n_stop_strings && !stop_strings_possible)
        fail(KD_E_STATE, "stop strings need the vocabulary's bytes: load the model with kd_load_options.token_bytes");

    auto request = std::make_unique<kd::Request>();
    kd::Sequence& q = request->sequence;
    request->user = c.user;
    request->flags = c.flags;
    request->credit = c.credit ? c.credit : 256;
    request->text_id = c.text_id;
    request->stop_ids.assign(c.stop_ids, c.stop_ids + c.n_stop_ids);
    for (uint32_t i = 0; i < c.n_stop_strings; i++) {
        const kd_stop_string& stop = c.stop_strings[i];
        if (!stop.bytes || stop.length == 0 || stop.length > KD_MAX_STOP_BYTES)
            fail(KD_E_INVALID, "stop string %u has %u bytes: 1 .. %d", i, stop.length, KD_MAX_STOP_BYTES);
        request->stop_strings.emplace_back(stop.bytes, stop.length);
    }
    if (c.flags & KD_REQUEST_OWN_BUILDER) {
        request->builder = &required(c.builder, "kd_request.builder");
        request->budget = c.budget;
    }
    q.sampling = read_sampling(c);
    q.prompt = int(c.n_tokens);
    q.max_tokens = int(c.max_tokens);
    q.tokens.reserve(size_t(c.n_tokens) + std::min<uint32_t>(c.max_tokens, 4096) + KD_MAX_TOKENS_EVENT);
    q.tokens.assign(c.tokens, c.tokens + c.n_tokens);
    return request;
}

// What of kd_load_options says which files are read.
void read_source(const kd_load_options& c, kd::model::DraftChoice& draft, kd::model::Links& links) {
    constexpr uint32_t known = KD_LOAD_REPLACE | KD_LOAD_FOLLOW_LINKS | KD_LOAD_HOLD;
    if (c.flags & ~known)
        fail(KD_E_TOO_NEW, "kd_load_options.flags has 0x%x, unknown to this library", c.flags & ~known);
    if (c.flags & KD_LOAD_FOLLOW_LINKS) links = kd::model::Links::kFollow;
    if (c.draft < 0 || c.draft > 2) fail(KD_E_INVALID, "kd_load_options.draft is %d: 0, 1 or 2", c.draft);
    if (c.draft == 2 && !required(c.draft_path, "kd_load_options.draft_path"))
        fail(KD_E_INVALID, "kd_load_options.draft_path is empty: give the drafter's folder, or draft 'auto' or 'none'");
    draft.mode = kd::model::DraftChoice::Mode(c.draft);
    if (c.draft == 2) draft.path = c.draft_path;
}

kd::Engine& open(kd_engine* e) {
    kd::Engine& engine = required(e, "engine").engine;
    engine.check_process();
    return engine;
}

}  // namespace

int32_t kd_abi_version(void) { return KD_ABI_VERSION; }
const char* kd_version(void) { return "0.1.0"; }

const char* kd_build_info(void) {
    static const std::string line = std::string("kd ") + kd_version() + ", backend " + kd::device::backend() +
                                    ", instruction sets " + kd::device::built_isas() + ", compiler " + __VERSION__;
    return line.c_str();
}

void kd_note_signal(int32_t signal) { kd::StepRecord::note_signal(signal); }

const char* kd_status_name(int32_t status) {
    switch (status) {
#define KD_NAME(s) \
    case s: return #s;
        KD_NAME(KD_OK)
        KD_NAME(KD_E_INVALID)
        KD_NAME(KD_E_TOO_NEW)
        KD_NAME(KD_E_SIZE)
        KD_NAME(KD_E_FORKED)
        KD_NAME(KD_E_STATE)
        KD_NAME(KD_E_NOT_FOUND)
        KD_NAME(KD_E_DONE)
        KD_NAME(KD_E_BUSY)
        KD_NAME(KD_E_DRAINING)
        KD_NAME(KD_E_TIMEOUT)
        KD_NAME(KD_E_CANCELLED)
        KD_NAME(KD_E_EXISTS)
        KD_NAME(KD_E_CONTEXT)
        KD_NAME(KD_E_TOKEN)
        KD_NAME(KD_E_SAMPLING)
        KD_NAME(KD_E_SLOW_READER)
        KD_NAME(KD_E_NOMEM)
        KD_NAME(KD_E_IO)
        KD_NAME(KD_E_MODEL)
        KD_NAME(KD_E_DEVICE)
        KD_NAME(KD_E_BUILDER)
        KD_NAME(KD_E_FATAL)
#undef KD_NAME
    }
    return "KD_E_UNKNOWN";
}

const char* kd_last_error(void) { return last_error; }

int32_t kd_open(kd_engine** engine, const kd_options* options) {
    return guard([&] {
        required(engine, "engine") = nullptr;
        *engine = new kd_engine(read_options(options));
    });
}

int32_t kd_close(kd_engine* engine) {
    return guard([&] {
        if (!engine) return;
        open(engine);
        delete engine;
    });
}

int32_t kd_load(kd_engine* engine, const char* path, const kd_load_options* options) {
    return guard([&] {
        kd::Engine& e = open(engine);
        kd::LoadPlan plan;
        if (!required(path, "path")) fail(KD_E_INVALID, "path is empty: give the model's folder");
        plan.path = path;
        if (options) {
            const kd_load_options c = read_struct(options, "kd_load_options");
            read_source(c, plan.draft, plan.links);
            plan.replace = c.flags & KD_LOAD_REPLACE;
            plan.hold = c.flags & KD_LOAD_HOLD;
            plan.text_id = c.text_id;
            if (c.n_tokens) {
                required(c.token_ends, "kd_load_options.token_ends");
                plan.token_bytes = kd::TokenBytes(c.token_bytes, c.token_ends, c.n_tokens);
            }
        }
        e.load(std::move(plan));
    });
}

int32_t kd_load_wait(kd_engine* engine, uint32_t timeout_ms) {
    return guard([&] { open(engine).load_wait(timeout_ms); });
}

int32_t kd_load_cancel(kd_engine* engine) {
    return guard([&] { open(engine).load_cancel(); });
}

int32_t kd_load_progress(kd_engine* engine, kd_progress* progress) {
    return guard([&] { write_struct(progress, open(engine).load_progress(), "kd_progress"); });
}

int32_t kd_load_info(kd_engine* engine, kd_model_info* info) {
    return guard([&] {
        kd::Engine& e = open(engine);
        required(info, "info");
        write_struct(info, e.load_info(), "kd_model_info");
    });
}

int32_t kd_load_try(kd_engine* engine, const kd_request* request, kd_trial* trial) {
    return guard([&] {
        kd::Engine& e = open(engine);
        const kd_trial given = read_struct(trial, "kd_trial");
        required(given.tokens, "kd_trial.tokens");
        const kd::Trial done = e.load_try(read_request(request, true));
        std::copy(done.tokens.begin(), done.tokens.end(), given.tokens);
        if (given.hashes) std::copy(done.hashes.begin(), done.hashes.end(), given.hashes);
        trial->n_tokens = uint32_t(done.tokens.size());
        trial->decode_us = done.decode_us;
    });
}

int32_t kd_load_accept(kd_engine* engine, const char* builder, int32_t budget) {
    return guard([&] { open(engine).load_accept(builder, budget); });
}

int32_t kd_inspect(const char* path, const kd_load_options* options, char* json, uint32_t capacity, uint32_t* needed) {
    return guard([&] {
        if (!required(path, "path")) fail(KD_E_INVALID, "path is empty: give the model's folder");
        kd::model::DraftChoice draft;
        kd::model::Links links = kd::model::Links::kCache;
        if (options) read_source(read_struct(options, "kd_load_options"), draft, links);
        if (capacity) required(json, "json");
        const std::string text = kd::model::inspect(path, draft, links);
        if (needed) *needed = uint32_t(text.size() + 1);
        if (text.size() >= capacity)
            fail(KD_E_SIZE, "capacity is %u: the document takes %zu bytes", capacity, text.size() + 1);
        memcpy(json, text.c_str(), text.size() + 1);
        return int32_t(text.size());
    });
}

int32_t kd_save(kd_engine* engine, const char* path) {
    return guard([&] {
        kd::Engine& e = open(engine);
        if (!required(path, "path")) fail(KD_E_INVALID, "path is empty: give the folder to write to");
        e.save(path);
    });
}

int32_t kd_unload(kd_engine* engine, uint64_t* freed_bytes) {
    return guard([&] {
        const uint64_t freed = open(engine).unload();
        if (freed_bytes) *freed_bytes = freed;
    });
}

int32_t kd_drain(kd_engine* engine, int32_t on) {
    return guard([&] { open(engine).drain(on != 0); });
}

int32_t kd_info(kd_engine* engine, kd_model_info* info) {
    return guard([&] { write_struct(info, open(engine).info(), "kd_model_info"); });
}

int32_t kd_stats_get(kd_engine* engine, kd_stats* stats) {
    return guard([&] { write_struct(stats, open(engine).stats(), "kd_stats"); });
}

int32_t kd_submit(kd_engine* engine, const kd_request* request, uint64_t* id) {
    return guard([&] {
        kd::Engine& e = open(engine);
        required(id, "id");
        *id = e.submit(read_request(request, e.has_token_bytes()));
    });
}

int32_t kd_cancel(kd_engine* engine, uint64_t id) {
    return guard([&] { open(engine).cancel(id); });
}

int32_t kd_request_credit(kd_engine* engine, uint64_t id, uint32_t events) {
    return guard([&] { open(engine).credit(id, events); });
}

int32_t kd_score(kd_engine* engine, const int32_t* tokens, uint32_t n_tokens, float* logits) {
    return guard([&] {
        kd::Engine& e = open(engine);
        required(tokens, "tokens");
        required(logits, "logits");
        if (n_tokens == 0) fail(KD_E_INVALID, "n_tokens is 0: give at least one token to score");
        e.score(tokens, n_tokens, logits);
    });
}

int32_t kd_poll(kd_engine* engine, kd_event* events, uint32_t capacity, uint32_t timeout_ms) {
    return guard([&] {
        kd::Engine& e = open(engine);
        if (capacity == 0) fail(KD_E_INVALID, "capacity is 0: give room for at least one event");
        const uint32_t stride = required(events, "events").size;
        if (stride < sizeof(kd_event) || stride > kMaxStruct || stride % 8)
            fail(KD_E_SIZE, "kd_event.size of the first element is %u: set it to sizeof(kd_event), %zu here", stride,
                 sizeof(kd_event));
        return e.poll(reinterpret_cast<char*>(events), stride, std::min<uint32_t>(capacity, 1u << 20), timeout_ms);
    });
}

int32_t kd_event_fd(kd_engine* engine) {
    return guard([&] { return open(engine).event_fd(); });
}

int32_t kd_builder_register(kd_engine* engine, const kd_tree_builder* builder) {
    return guard([&] { open(engine).register_builder(builder); });
}

int32_t kd_builder_list(kd_engine* engine, kd_builder_info* infos, uint32_t capacity) {
    return guard([&] {
        kd::Engine& e = open(engine);
        const uint32_t stride = capacity ? required(infos, "infos").size : 0;
        if (capacity && (stride < sizeof(kd_builder_info) || stride > kMaxStruct || stride % 4))
            fail(KD_E_SIZE,
                 "kd_builder_info.size of the first element is %u: set it to sizeof(kd_builder_info), %zu here", stride,
                 sizeof(kd_builder_info));
        const auto all = e.builders();
        for (size_t i = 0; i < std::min<size_t>(capacity, all.size()); i++) {
            auto* at = reinterpret_cast<kd_builder_info*>(reinterpret_cast<char*>(infos) + i * stride);
            at->size = stride;
            write_struct(at, all[i], "kd_builder_info");
        }
        return int32_t(all.size());
    });
}

int32_t kd_builder_use(kd_engine* engine, const char* name, int32_t budget, uint64_t id, uint64_t* generation) {
    return guard([&] {
        kd::Engine& e = open(engine);
        required(name, "name");
        const uint64_t g = e.use_builder(name, budget, id);
        if (generation) *generation = g;
    });
}

int32_t kd_builder_build(const char* name, const kd_tree_in* in, kd_tree_out* out) {
    return guard([&] { kd::tree::build_offline(name, in, out); });
}
