// The engine thread: what runs in each turn, and what is told to whom.
#include <algorithm>

#include "engine/clock.h"
#include "engine/engine.h"
#include "error.h"

namespace kd {

namespace {

constexpr int kMostUnpolled = KD_MAX_DEPTH + 1;  // events a stream may have unpolled and still produce

}  // namespace

void Engine::measure() {
    try {
        if (options_.tp > 1) team_.run(KD_STAGE_IDLE, [](int) { device::measure_transport(); });
    } catch (const std::exception& e) {
        latch(e.what());
    }
}

void Engine::serve() {
    while (!stop_) {
        bool worked = false;
        const uint64_t polled = polled_;
        try {
            drain_inbox();
            worked = turn();
        } catch (const std::exception& e) {
            latch(e.what());
        }
        show();
        if (swap_if_idle()) worked = true;
        if (!worked && !stop_) wait(polled);
    }
    end_all(KD_E_CANCELLED);
    show();
    next_.reset();
    resident_.reset();
    std::vector<std::function<void()>> late;
    {
        std::lock_guard lock(inbox_mutex_);
        inbox_closed_ = true;
        late.swap(inbox_);
    }
    for (auto& command : late) command();  // nobody may wait for ever
}

void Engine::drain_inbox() {
    std::vector<std::function<void()>> commands;
    {
        std::lock_guard lock(inbox_mutex_);
        commands.swap(inbox_);
        wanted_ = false;
    }
    for (auto& command : commands) command();
    take_grants();
}

bool Engine::take_grants() {
    std::vector<Grant> grants;
    {
        std::lock_guard lock(inbox_mutex_);
        if (!inbox_.empty()) return false;  // one may be for a request that is still in there
        grants.swap(grants_);
    }
    bool woken = false;
    for (const Grant& grant : grants) {
        Request* request = find(grant.id);
        if (!request || grant.events == 0) continue;  // ended while the grant was on its way
        woken = woken || request->credit == 0;
        request->credit = std::min<uint64_t>(request->credit + grant.events, UINT32_MAX);
        request->starved_since_us = 0;
    }
    return woken;
}

bool Engine::turn() {
    if (!resident_ || fatal_) return false;
    expire_slow_readers();
    admit();
    const bool prefilled = prefill();
    const bool decoded = decode();
    const bool scored = score_some();
    if (!prefilled && !decoded && !scored) return false;
    counters_.turns++;
    counters_.last_turn_us = now_us();
    return true;
}

// Sleep until a command comes, events are polled, which a stream may wait for, or a slow reader's time is up. polled: what polled_
// was before the turn that found nothing to do.
void Engine::wait(uint64_t polled) {
    asleep_ = true;
    if (polled_ != polled) return;  // since that turn looked: what it found may not be so any more
    std::unique_lock lock(inbox_mutex_);
    auto ready = [&] { return !inbox_.empty() || !grants_.empty(); };
    if (const uint64_t deadline = next_deadline_us()) {
        const uint64_t now = now_us();
        inbox_wake_.wait_for(lock, std::chrono::microseconds(deadline > now ? deadline - now : 0), ready);
    } else {
        inbox_wake_.wait(lock, ready);
    }
}

// ---- admission --------------------------------------------------------------------------------------------------------

int Engine::pages_for(const Sequence& q) const {
    const int64_t slots = int64_t(q.prompt) + q.max_tokens + options_.max_nodes;
    return int((slots + KD_PAGE_TOKENS - 1) / KD_PAGE_TOKENS);
}

// First come, first served; a slot is free again once its last user's events have been polled.
void Engine::admit() {
    for (int slot = 0; slot < options_.max_streams && !waiting_.empty(); slot++) {
        if (slot_used_[slot] || ring_.unpolled(slot)) continue;
        Request& request = *waiting_.front();
        if (next_ && !request.ended && request.weights_generation == next_->info.weights_generation) return;
        if (!request.ended && !admit_one(request, slot)) return;
        if (!request.ended) running_.push_back(std::move(waiting_.front()));
        waiting_.pop_front();
    }
}

// Reserves every page the request can ever need, so nothing is preempted later. False: not now.
bool Engine::admit_one(Request& request, int slot) {
    KvCache& cache = *resident_->cache;
    Sequence& q = request.sequence;
    KvCache::Prefix prefix;
    const bool cached = options_.prefix_cache && !(request.flags & KD_REQUEST_COLD);
    // The last prompt token is always run: its logits choose the first token.
    if (cached) prefix = cache.match(q.tokens.data(), q.prompt - 1);
    const int shared = int(prefix.pages.size());
    q.pages = prefix.pages;
    bool enough = cache.allocate(q.pages, pages_for(q) - shared);
    if (!enough && prefix.copy_from >= 0) {  // the page to copy from may be the one that is missing
        cache.release(prefix.copy_from);
        prefix.copy_from = -1;
        prefix.copy_rows = 0;
        enough = cache.allocate(q.pages, pages_for(q) - shared);
    }
    if (!enough) {
        cache.release(prefix.pages);
        q.pages.clear();
        return false;
    }
    if (prefix.copy_from >= 0) {
        copy_page(*resident_->stage, q.pages[shared], prefix.copy_from, prefix.copy_rows);
        cache.release(prefix.copy_from);
    }
    q.start = q.draft_start = request.cached = prefix.tokens();
    q.slot = slot;
    slot_used_[slot] = true;
    queued_--;
    counters_.cached_tokens += request.cached;
    request.text.reset(request.stop_strings);
    return true;
}

// ---- steps ------------------------------------------------------------------------------------------------------------

bool Engine::may_produce(const Request& r) const {
    return !r.ended && r.credit > 0 && ring_.unpolled(r.sequence.slot) < kMostUnpolled;
}

bool Engine::prefill() {
    parts_.clear();
    int room = options_.prefill_chunk;
    for (auto& r : running_) {
        Sequence& q = r->sequence;
        if (q.start >= q.prompt || room == 0 || !may_produce(*r)) continue;
        const int n = std::min(room, q.prompt - q.start);
        parts_.push_back({&q, q.start, n});
        room -= n;
    }
    if (parts_.empty()) return false;
    const uint64_t began = now_us();
    prefill_chunk(*resident_->stage, parts_);
    counters_.prefill_us += now_us() - began;
    counters_.prefill_steps++;
    counters_.forward_calls++;
    counters_.prompt_tokens += options_.prefill_chunk - room;
    size_t part = 0;
    for (auto& r : running_) {
        Sequence& q = r->sequence;
        if (part == parts_.size() || parts_[part].sequence != &q) continue;
        part++;
        if (q.start < q.prompt) continue;
        if (options_.prefix_cache && !(r->flags & KD_REQUEST_COLD))
            resident_->cache->publish(q.tokens.data(), q.prompt, q.pages);
        emit(*r);
    }
    show();
    return true;
}

bool Engine::decode() {
    batch_.clear();
    sequences_.clear();
    for (auto& r : running_) {
        if (r->sequence.start < r->sequence.prompt || !may_produce(*r)) continue;
        batch_.push_back(r.get());
        sequences_.push_back(&r->sequence);
    }
    if (batch_.empty()) return false;
    decode_rounds(*resident_->stage, sequences_, std::max(1, rounds_ahead()), wanted_,
                  [this](const StepCounts& step) { return after_round(step); });
    show();
    return true;
}

// Tells what a round brought, while the next may be under way on the device. Returns how many more may end: none once a request
// has ended, whose pages can only go back when nothing runs.
int Engine::after_round(const StepCounts& step) {
    const uint64_t began = now_us();
    bool ended = false;
    for (Request* r : batch_) {
        const Sequence& q = r->sequence;
        if (q.n_new && !r->ended) {
            counters_.round_streams++;
            counters_.round_rows += q.nodes + 1;
            counters_.round_nodes += q.nodes;
            counters_.accepted_tokens += q.n_new - 1;
            emit(*r);
        }
        ended = ended || r->ended;
    }
    counters_.rounds++;
    counters_.forward_calls++;
    counters_.draft_calls += step.draft_calls;
    counters_.draft_us += step.draft_us;
    counters_.build_us += step.build_us;
    counters_.verify_us += step.verify_us;
    counters_.builder_failures += step.builder_failures;
    counters_.device_ns += step.device_ns;
    counters_.gap_ns += step.gap_ns;
    counters_.gaps += step.gaps;
    counters_.launch_gap_ns += step.launch_gap_ns;
    counters_.launch_gaps += step.launch_gaps;
    counters_.emit_us += now_us() - began;
    if (ended || take_grants()) return 0;
    show();
    return rounds_ahead();
}

// Rounds of the batch that may follow before something else is to be done: a prompt, an admission, a stream that could join, or
// one of the batch that has no credit or room for events left.
int Engine::rounds_ahead() const {
    if (!scores_.empty() || (!waiting_.empty() && int(running_.size()) < options_.max_streams)) return 0;
    size_t starved = 0;
    for (auto& r : running_) starved += r->credit == 0;
    if (batch_.size() + starved < running_.size()) return 0;
    uint64_t rounds = kRunRounds;
    for (const Request* r : batch_)
        rounds = std::min({rounds, r->credit, uint64_t(std::max(0, kMostUnpolled - ring_.unpolled(r->sequence.slot)))});
    return int(rounds);
}

bool Engine::score_some() {
    if (scores_.empty()) return false;
    Score& score = *scores_.front();
    if (score.weights_generation != resident_->info.weights_generation) return false;  // of the next model
    Sequence& q = score.sequence;
    if (q.pages.empty() && !resident_->cache->allocate(q.pages, (q.prompt + KD_PAGE_TOKENS - 1) / KD_PAGE_TOKENS))
        return false;  // until running requests give pages back
    const int n = std::min(options_.prefill_chunk, q.prompt - score.done);
    const size_t vocab = size_t(resident_->info.vocab_size);
    score_chunk(*resident_->stage, {&q, score.done, n}, score.out + score.done * vocab);
    counters_.forward_calls++;
    score.done += n;
    if (score.done == q.prompt) {
        resident_->cache->release(q.pages);
        score.end.set_value();
        scores_.pop_front();
    }
    return true;
}

// ---- events -----------------------------------------------------------------------------------------------------------

void Engine::push(Request& r, int type, int finish, int status, int n_tokens, std::string_view text) {
    const Sequence& q = r.sequence;
    kd_event e{};
    e.size = sizeof e;
    e.type = type;
    e.id = r.id;
    e.user = r.user;
    e.sequence = r.events++;
    e.status = status;
    e.finish = finish;
    e.n_tokens = n_tokens;
    e.nodes = n_tokens ? q.nodes : 0;
    const size_t first = q.tokens.size() - n_tokens;
    for (int i = 0; i < n_tokens; i++) {
        e.tokens[i] = q.tokens[first + i];
        e.hashes[i] = q.hashes[i];
        e.logprobs[i] = q.logprobs[i];
    }
    e.builder_generation = q.planting.generation;
    e.weights_generation = r.weights_generation;
    e.total_tokens = uint32_t(q.generated());
    e.cached_tokens = uint32_t(r.cached);
    ring_.push(e, text, q.slot >= 0 ? q.slot : queue_place());
}

// Tells the client what the last step brought: tokens up to where it stops, if it does.
void Engine::emit(Request& r) {
    Sequence& q = r.sequence;
    const TokenBytes& bytes = resident_->token_bytes;
    const size_t first = q.tokens.size() - q.n_new;
    std::string text;
    int n = 0, finish = KD_FINISH_NONE;
    while (n < q.n_new && finish == KD_FINISH_NONE) {
        const int32_t token = q.tokens[first + n++];
        if (r.stops_at(token))
            finish = KD_FINISH_STOP;
        else if (r.text.add(bytes.of(token), text))
            finish = KD_FINISH_STOP;
        else if (int(first) + n - q.prompt >= q.max_tokens)
            finish = KD_FINISH_LENGTH;
    }
    q.tokens.resize(first + n);
    counters_.tokens += n;
    if (finish != KD_FINISH_NONE) {
        r.text.finish(text);
        const bool cancelled = close_request(r.id);
        push(r, KD_EVENT_END, cancelled ? int{KD_FINISH_CANCELLED} : finish, cancelled ? int{KD_E_CANCELLED} : KD_OK, n,
             text);
        (cancelled ? counters_.cancelled : counters_.finished)++;
        r.ended = true;
        return;
    }
    push(r, KD_EVENT_TOKENS, finish, KD_OK, n, text);
    if (--r.credit == 0) r.starved_since_us = now_us();
}

// Ends a request that did not come to its own end.
void Engine::end(Request& r, int status) {
    if (r.ended) return;
    if (close_request(r.id)) status = KD_E_CANCELLED;
    const int finish = status == KD_E_CANCELLED ? KD_FINISH_CANCELLED : KD_FINISH_ERROR;
    std::string text;
    r.text.finish(text);
    push(r, KD_EVENT_END, finish, status, 0, text);
    r.ended = true;
    if (finish == KD_FINISH_CANCELLED)
        counters_.cancelled++;
    else
        counters_.failed++;
}

void Engine::expire_slow_readers() {
    const uint64_t limit = uint64_t(options_.slow_reader_timeout_ms) * 1000, now = now_us();
    for (auto& r : running_)
        if (!r->ended && r->starved_since_us && now - r->starved_since_us >= limit) end(*r, KD_E_SLOW_READER);
}

uint64_t Engine::next_deadline_us() const {
    uint64_t next = 0;
    for (auto& r : running_) {
        if (r->ended || !r->starved_since_us) continue;
        const uint64_t at = r->starved_since_us + uint64_t(options_.slow_reader_timeout_ms) * 1000;
        next = next ? std::min(next, at) : at;
    }
    return next;
}

// What happened becomes visible: first the accounts, then the events, so that whoever has read an event finds it counted.
void Engine::show() {
    retire();
    publish_stats();
    ring_.publish();
}

// Ended requests give back what they hold.
void Engine::retire() {
    for (auto* list : {&running_, &waiting_})
        std::erase_if(*list, [&](const std::unique_ptr<Request>& r) {
            if (!r->ended) return false;
            const Sequence& q = r->sequence;
            if (q.slot >= 0) {
                resident_->cache->release(q.pages);
                slot_used_[q.slot] = false;
            } else {
                queued_--;
            }
            return true;
        });
}

void Engine::end_all(int status) {
    for (auto* list : {&running_, &waiting_})
        for (auto& r : *list) end(*r, status);
    retire();
    for (auto& score : scores_)
        score->end.set_exception(std::make_exception_ptr(Error(status, "the model was unloaded or the engine failed")));
    scores_.clear();
}

// The first fatal cause stays: open requests fail with it, and every later call returns it.
void Engine::latch(const std::string& sentence) {
    if (fatal_) return;
    {
        std::lock_guard lock(state_mutex_);
        fatal_sentence_ = "the engine has failed: " + sentence + "; close it and open it again";
        fatal_ = true;
    }
    state_changed_.notify_all();
    end_all(KD_E_FATAL);
    kd_event e{};
    e.size = sizeof e;
    e.type = KD_EVENT_FATAL;
    e.status = KD_E_FATAL;
    ring_.push(e, {}, load_place());
}

Request* Engine::find(uint64_t id) {
    for (auto* list : {&running_, &waiting_})
        for (auto& r : *list)
            if (r->id == id && !r->ended) return r.get();
    return nullptr;
}

void Engine::publish_stats() {
    kd_stats s = counters_;
    s.size = sizeof s;
    s.streams = int(running_.size());
    s.builder_generation = default_planting_.generation;
    s.builder_budget = default_planting_.budget;
    if (default_planting_.builder) {
        const std::string& name = default_planting_.builder->builder().name;
        name.copy(s.builder, sizeof s.builder - 1);
    }
    if (resident_) {
        s.weights_generation = resident_->info.weights_generation;
        s.pages_total = resident_->cache->total();
        s.pages_free = resident_->cache->free();
        s.pages_cached = resident_->cache->cached();
    }
    std::lock_guard lock(state_mutex_);
    stats_ = s;
}

}  // namespace kd
