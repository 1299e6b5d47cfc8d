// Test-only entry points to the host-side parts of the engine: page accounts, text, and faults planted in a running engine.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/clock.h"
#include "engine/kv_cache.h"
#include "engine/text.h"
#include "meeting.h"
#include "pages.h"
#include "probe_device.h"
#include "probe_engine.h"

namespace kd {
namespace {

void break_here(int rank, Fault fault) {
    switch (fault) {
        case Fault::exception: throw std::runtime_error("planted failure of rank " + std::to_string(rank));
        case Fault::device: probe::break_device(); break;
        case Fault::segfault: {
            volatile int* volatile nowhere = nullptr;
            *nowhere = 0;
            break;
        }
        case Fault::hang: {  // as a loop that waits for what never comes: bounded, lest a test machine be kept busy
            const uint64_t began = now_us();
            while (now_us() - began < 20'000'000) pause_cpu();
        }
    }
}

}  // namespace

void EngineProbe::break_rank(Engine& e, int rank, Fault fault) {
    e.post([&e, rank, fault] {
        Stage& stage = *e.resident_->stage;
        stage.view.clear();
        static const std::vector<int32_t> page = {0};
        stage.view.add_causal_row(0, 0, stage.view.add_stream(page));
        e.team_.next_step();
        e.team_.run(KD_STAGE_VERIFY, [&](int r) {
            Rank& mine = *stage.ranks[size_t(r)];
            const View v = stage.view.upload(mine);
            forward(mine, v);
            if (r == rank) break_here(r, fault);
            forward(mine, v);
        });
    });
}

void EngineProbe::rounds_at_once(Engine& e, int rounds) {
    e.call([&] { e.resident_->stage->rounds_at_once = rounds; });
}

void EngineProbe::freeze(Engine& e, volatile int* go) {
    e.post([go] {
        *go = -1;
        while (*go == -1) usleep(1000);
    });
    while (*go == 0) usleep(1000);
}

bool EngineProbe::poll_when_full(Engine& e, int times) {
    constexpr int kFull = KD_MAX_DEPTH + 1, kRoom = 64;
    std::vector<kd_event> events(kRoom);
    const auto poll = [&](uint32_t timeout_ms) {
        return e.poll(reinterpret_cast<char*>(events.data()), sizeof(kd_event), kRoom, timeout_ms);
    };
    const auto ended = [&](int n) {
        return std::any_of(events.begin(), events.begin() + n,
                           [](const kd_event& v) { return v.type == KD_EVENT_END; });
    };
    for (int i = 0; i < times; i++) {
        const uint64_t began = now_us();
        while (e.ring_.unpolled(0) < kFull && now_us() - began < 100'000) pause_cpu();
        for (int spin = 0; spin < i * 7 % 64; spin++) pause_cpu();  // earlier and later than the engine's last look
        if (ended(poll(0))) return true;
        const int n = poll(2000);
        if (n == 0) return false;
        if (ended(n)) return true;
    }
    return true;
}

Shape EngineProbe::shape(Engine& e) {
    return e.call([&] { return e.resident_->stage->model().shape; });
}

void EngineProbe::on_ranks(Engine& e, const std::function<void(Rank&)>& body) {
    e.call([&] {
        Stage& stage = *e.resident_->stage;
        std::vector<std::exception_ptr> thrown(stage.ranks.size());
        e.team_.run(KD_STAGE_IDLE, [&](int r) {
            device::settle();
            try {
                body(*stage.ranks[size_t(r)]);
            } catch (...) {
                thrown[size_t(r)] = std::current_exception();
            }
        });
        for (const std::exception_ptr& t : thrown)
            if (t) std::rethrow_exception(t);
    });
}

}  // namespace kd

#define KD_PROBE extern "C" __attribute__((visibility("default")))

KD_PROBE kd::KvCache* kd_probe_cache_new(int pages) { return new kd::KvCache(pages); }
KD_PROBE void kd_probe_cache_delete(kd::KvCache* cache) { delete cache; }
KD_PROBE int kd_probe_cache_free(kd::KvCache* cache) { return cache->free(); }
KD_PROBE int kd_probe_cache_cached(kd::KvCache* cache) { return cache->cached(); }

// pages: room for n / KD_PAGE_TOKENS; returns how many are shared. *copy_from, *copy_rows as in Prefix.
KD_PROBE int kd_probe_cache_match(kd::KvCache* cache, const int32_t* tokens, int n, int32_t* pages, int32_t* copy_from,
                                  int* copy_rows) {
    const auto prefix = cache->match(tokens, n);
    std::copy(prefix.pages.begin(), prefix.pages.end(), pages);
    *copy_from = prefix.copy_from;
    *copy_rows = prefix.copy_rows;
    return int(prefix.pages.size());
}

KD_PROBE int kd_probe_cache_allocate(kd::KvCache* cache, int32_t* pages, int count) {
    std::vector<int32_t> fresh;
    if (!cache->allocate(fresh, count)) return 0;
    std::copy(fresh.begin(), fresh.end(), pages);
    return 1;
}

KD_PROBE void kd_probe_cache_publish(kd::KvCache* cache, const int32_t* tokens, int n, const int32_t* pages,
                                     int n_pages) {
    cache->publish(tokens, n, std::vector<int32_t>(pages, pages + n_pages));
}

KD_PROBE void kd_probe_cache_release(kd::KvCache* cache, const int32_t* pages, int n_pages) {
    cache->release(std::vector<int32_t>(pages, pages + n_pages));
}

KD_PROBE kd::TextStream* kd_probe_text_new(const char* const* stops, const uint32_t* lengths, int n) {
    std::vector<std::string> list;
    for (int i = 0; i < n; i++) list.emplace_back(stops[i], lengths[i]);
    auto* text = new kd::TextStream;
    text->reset(list);
    return text;
}
KD_PROBE void kd_probe_text_delete(kd::TextStream* text) { delete text; }

// Adds one token's bytes (length < 0: the end); writes what is released to `out`, whose length is returned. *stopped: a stop
// string is complete.
KD_PROBE int kd_probe_text_add(kd::TextStream* text, const char* bytes, int length, char* out, int* stopped) {
    std::string released;
    *stopped = 0;
    if (length < 0)
        text->finish(released);
    else
        *stopped = text->add(std::string_view(bytes, size_t(length)), released);
    memcpy(out, released.data(), released.size());
    return int(released.size());
}

KD_PROBE void kd_probe_break_rank(kd_engine* e, int rank, int fault) {
    kd::EngineProbe::break_rank(e->engine, rank, kd::Fault(fault));
}
KD_PROBE void kd_probe_rounds_at_once(kd_engine* e, int rounds) { kd::EngineProbe::rounds_at_once(e->engine, rounds); }
KD_PROBE int kd_probe_poll_when_full(kd_engine* e, int times) {
    return kd::EngineProbe::poll_when_full(e->engine, times);
}
KD_PROBE void kd_probe_freeze(kd_engine* e, volatile int* go) { kd::EngineProbe::freeze(e->engine, go); }
