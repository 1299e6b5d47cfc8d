#include "engine/engine.h"

#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <future>

#include "engine/clock.h"
#include "engine/threads.h"
#include "error.h"

namespace kd {
namespace {

// Events a stream may have unpolled before it sits out; its last event comes on top.
constexpr int kUnpolledStream = KD_MAX_DEPTH + 2;

int ring_capacity(const Options& o) {
    return 2 * (o.max_streams * kUnpolledStream + o.max_queue + Engine::kUnpolledLoads + 2);
}

}  // namespace

Engine::Engine(const Options& o)
    : options_(o),
      pid_(getpid()),
      ring_(ring_capacity(o), o.max_streams + 2),
      team_(device_options(), o.record_path),
      slot_used_(o.max_streams) {
    batch_.reserve(o.max_streams);
    sequences_.reserve(o.max_streams);
    parts_.reserve(o.max_streams);
    publish_stats();
    std::promise<void> measured;
    const std::future<void> ready = measured.get_future();
    thread_ = quiet_thread("kd-engine", [this, measured = std::move(measured)]() mutable {
        measure();
        measured.set_value();
        serve();
    });
    ready.wait();  // a load works on the ranks' streams, which nobody else may use meanwhile
}

Engine::~Engine() {
    {
        std::unique_lock lock(state_mutex_);
        if (loading_) cancel_load();
        state_changed_.wait(lock, [&] { return !loading_; });
    }
    post([this] { stop_ = true; });
    thread_.join();
}

void Engine::check_process() const {
    if (getpid() != pid_)
        fail(KD_E_FORKED, "this engine was opened in process %d and cannot be used in its child; open one there",
             int(pid_));
}

void Engine::check_alive() const {
    if (fatal_) {
        std::lock_guard lock(state_mutex_);
        throw Error(KD_E_FATAL, fatal_sentence_);
    }
}

void Engine::post(std::function<void()> command) {
    {
        std::lock_guard lock(inbox_mutex_);
        if (inbox_closed_) return;
        inbox_.push_back(std::move(command));
        wanted_ = true;
    }
    inbox_wake_.notify_one();
}

void Engine::drain(bool on) {
    check_alive();
    draining_ = on;
    post([this] { publish_stats(); });
}

kd_model_info Engine::info() {
    check_alive();
    std::lock_guard lock(state_mutex_);
    if (info_.weights_generation == 0) fail(KD_E_STATE, "no model is loaded: call kd_load and wait for it");
    return info_;
}

kd_stats Engine::stats() {
    std::lock_guard lock(state_mutex_);
    kd_stats s = stats_;
    s.state = fatal_                     ? KD_STATE_FATAL
              : info_.weights_generation ? (draining_ ? KD_STATE_DRAINING : KD_STATE_READY)
              : loading_                 ? KD_STATE_LOADING
                                         : KD_STATE_EMPTY;
    s.waiting = queued_;
    return s;
}

// Throws what a request that this model cannot serve is told.
void Engine::check_request(const Request& r, const kd_model_info& m) const {
    const Sequence& q = r.sequence;
    if (r.text_id && r.text_id != m.text_id)
        fail(KD_E_STATE, "the tokens were made for another model's vocabulary: make them again with this one's");
    for (size_t i = 0; i < q.tokens.size(); i++)
        if (q.tokens[i] < 0 || q.tokens[i] >= m.vocab_size)
            fail(KD_E_TOKEN, "prompt token %zu is %d: ids are 0 .. %d", i, q.tokens[i], m.vocab_size - 1);
    for (size_t i = 0; i < r.stop_ids.size(); i++)
        if (r.stop_ids[i] < 0 || r.stop_ids[i] >= m.vocab_size)
            fail(KD_E_INVALID, "stop id %zu is %d: ids are 0 .. %d, the vocabulary of the model", i, r.stop_ids[i],
                 m.vocab_size - 1);
    if (uint64_t(q.prompt) + uint64_t(q.max_tokens) > uint64_t(m.max_positions))
        fail(KD_E_CONTEXT,
             "the prompt has %d tokens and max_tokens is %d: together they must be at most %d, the context of "
             "the model",
             q.prompt, q.max_tokens, m.max_positions);
    const uint64_t need = uint64_t(pages_for(q)) * KD_PAGE_TOKENS;
    if (need > m.kv_tokens)
        fail(KD_E_CONTEXT,
             "prompt, max_tokens and tree need %llu tokens of KV cache, which holds %llu: raise "
             "the engine's kv_bytes or lower max_tokens",
             static_cast<unsigned long long>(need), static_cast<unsigned long long>(m.kv_tokens));
}

uint64_t Engine::submit(std::unique_ptr<Request> request) {
    const kd_model_info m = info();
    if (draining_) fail(KD_E_DRAINING, "the engine is draining: no new requests");
    if (queued_ + ring_.unpolled(queue_place()) >= options_.max_queue)
        fail(KD_E_BUSY, "%d requests are waiting, the most that may: retry when some have ended", options_.max_queue);
    check_request(*request, m);
    if (request->flags & KD_REQUEST_OWN_BUILDER)
        check_builder(registry_.get(request->builder.c_str()), request->budget, m.draft_layers > 0);
    request->be_for(m);
    const uint64_t id = request->id = next_id_++;
    {
        std::lock_guard lock(inbox_mutex_);
        open_.emplace(id, false);
    }
    queued_++;
    post([this, r = std::shared_ptr<Request>(std::move(request))]() mutable {
        waiting_.push_back(std::make_unique<Request>(std::move(*r)));
        Request& fresh = *waiting_.back();
        counters_.requests++;
        // Of the model that will take resident_'s place: it has its turn then.
        if (!next_ || next_->info.weights_generation != fresh.weights_generation) settle_in(fresh);
        if (!next_ || fresh.ended) return;
        // Behind those of the model that serves, if it is one of them itself.
        auto at = waiting_.end() - 1;
        while (at != waiting_.begin() && (*at)->weights_generation < (*(at - 1))->weights_generation) {
            std::iter_swap(at, at - 1);
            --at;
        }
    });
    return id;
}

// Waits for no round: whoever serves many clients cancels for one while it answers the others.
void Engine::cancel(uint64_t id) {
    check_alive();
    if (id == 0 || id >= next_id_)
        fail(KD_E_NOT_FOUND, "there is no request %llu", static_cast<unsigned long long>(id));
    {
        std::lock_guard lock(inbox_mutex_);
        const auto found = open_.find(id);
        if (found == open_.end() || found->second)
            fail(KD_E_DONE, "request %llu has ended already", static_cast<unsigned long long>(id));
        found->second = true;
    }
    post([this, id] {
        if (Request* request = find(id)) end(*request, KD_E_CANCELLED);
        retire();
    });
}

bool Engine::close_request(uint64_t id) {
    std::lock_guard lock(inbox_mutex_);
    const auto closed = open_.extract(id);
    return !closed.empty() && closed.mapped();
}

void Engine::credit(uint64_t id, uint32_t events) {
    check_alive();
    if (id == 0 || id >= next_id_)
        fail(KD_E_NOT_FOUND, "there is no request %llu", static_cast<unsigned long long>(id));
    {
        std::lock_guard lock(inbox_mutex_);
        grants_.push_back({id, events});
    }
    inbox_wake_.notify_one();
}

void Engine::score(const int32_t* tokens, uint32_t n, float* logits) {
    const kd_model_info m = info();
    if (n > uint32_t(m.max_positions))
        fail(KD_E_CONTEXT, "%u tokens to score: the context of the model is %d", n, m.max_positions);
    if (uint64_t(n) > m.kv_tokens)
        fail(KD_E_CONTEXT, "%u tokens to score: the KV cache holds %llu", n,
             static_cast<unsigned long long>(m.kv_tokens));
    for (uint32_t i = 0; i < n; i++)
        if (tokens[i] < 0 || tokens[i] >= m.vocab_size)
            fail(KD_E_TOKEN, "token %u is %d: ids are 0 .. %d", i, tokens[i], m.vocab_size - 1);
    auto score = std::make_unique<Score>();
    score->sequence.tokens.assign(tokens, tokens + n);
    score->sequence.prompt = int(n);
    score->out = logits;
    score->weights_generation = m.weights_generation;
    std::future<void> end = score->end.get_future();
    post([this, s = std::shared_ptr<Score>(std::move(score))] {
        const Resident* of =
            next_ && next_->info.weights_generation == s->weights_generation ? next_.get() : resident_.get();
        if (!of || of->info.weights_generation != s->weights_generation) {
            s->end.set_exception(std::make_exception_ptr(Error(KD_E_CANCELLED, "the model was unloaded")));
            return;
        }
        // Those of the model that serves come first.
        const bool later = of == next_.get();
        scores_.insert(
            later ? scores_.end()
                  : std::find_if(scores_.begin(), scores_.end(),
                                 [&](const auto& other) { return other->weights_generation > s->weights_generation; }),
            std::make_unique<Score>(std::move(*s)));
    });
    end.get();
}

int Engine::poll(char* events, uint32_t stride, uint32_t capacity, uint32_t timeout_ms) {
    const int n = ring_.poll(events, stride, capacity, timeout_ms);
    if (n) {
        polled_++;  // before the look at asleep_, as the engine thread says that it sleeps before it looks at this
        if (asleep_.exchange(false)) post([] {});
    }
    return n;
}

uint64_t Engine::unload() {
    check_alive();
    return call([&]() -> uint64_t {
        {
            std::lock_guard lock(state_mutex_);
            if (loading_) fail(KD_E_BUSY, "a model is being loaded: cancel that with kd_load_cancel");
            if (!resident_) fail(KD_E_STATE, "no model is loaded");
            info_ = {};
            token_bytes_ = false;
            oldest_generation_ = weights_generation_ + 1;
        }
        end_all(KD_E_CANCELLED);
        const uint64_t before = device::memory_used(team_.group());
        resident_.reset();
        malloc_trim(0);
        const uint64_t after = device::memory_used(team_.group());
        return before > after ? before - after : 0;
    });
}

}  // namespace kd
