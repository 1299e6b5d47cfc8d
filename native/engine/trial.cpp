// Decoding on a model before it takes its place: a load that is asked to hold it waits here, on its own thread, for requests to try
// and for the word that lets it go on. The engine thread knows nothing of it.
#include <algorithm>

#include "engine/clock.h"
#include "engine/engine.h"
#include "error.h"

namespace kd {

// The loader's: returns once the model is accepted; throws if the load is cancelled or the model cannot be run.
void Engine::hold(Resident& resident) {
    progress_->enter(KD_LOAD_WARM);
    std::unique_lock lock(state_mutex_);
    held_ = &resident;
    state_changed_.notify_all();
    for (;;) {
        state_changed_.wait(lock, [&] { return asked_ || accepted_ || fatal_ || progress_->cancelled(); });
        if (Asked* asked = asked_) {
            lock.unlock();
            try {
                asked->trial = decode_alone(resident, asked->request);
            } catch (...) {
                asked->error = std::current_exception();
            }
            lock.lock();
            asked_ = nullptr;
            state_changed_.notify_all();
        } else if (accepted_) {
            return;
        } else {
            fail(KD_E_CANCELLED, "the load was cancelled");
        }
    }
}

// The loader's, with state_mutex_ free: whatever became of the model, nobody holds it any more.
void Engine::release_held() {
    std::lock_guard lock(state_mutex_);
    held_ = nullptr;
    state_changed_.notify_all();
}

// With state_mutex_ held.
Resident& Engine::held() const {
    if (progress_ && progress_->cancelled()) fail(KD_E_CANCELLED, "the load was cancelled");
    if (!held_ || accepted_)
        fail(KD_E_STATE, "no load holds a model: load one with KD_LOAD_HOLD and wait for it with kd_load_wait");
    return *held_;
}

kd_model_info Engine::load_info() {
    check_alive();
    std::lock_guard lock(state_mutex_);
    return held().info;
}

Trial Engine::load_try(std::unique_ptr<Request> request) {
    check_alive();
    std::unique_lock lock(state_mutex_);
    const kd_model_info& model = held().info;
    if (asked_) fail(KD_E_BUSY, "another request is being tried on the model: one at a time");
    request->text_id = 0;
    check_request(*request, model);
    request->be_for(model);
    Asked asked{*request, {}, nullptr};
    asked_ = &asked;
    state_changed_.notify_all();
    state_changed_.wait(lock, [&] { return asked_ != &asked; });
    if (asked.error) std::rethrow_exception(asked.error);
    return std::move(asked.trial);
}

void Engine::load_accept(const char* builder, int budget) {
    check_alive();
    const tree::Builder* wanted = builder ? &registry_.get(builder) : nullptr;
    std::unique_lock lock(state_mutex_);
    Resident& resident = held();
    if (asked_) fail(KD_E_BUSY, "a request is being tried on the model: wait for it");
    if (wanted) check_builder(*wanted, budget, resident.info.draft_layers > 0);
    resident.builder = wanted;
    resident.budget = budget;
    accepted_ = true;
    state_changed_.notify_all();
    state_changed_.wait(lock, [&] { return !held_; });  // what is asked of the engine from now on comes after it
}

// The whole life of a request whose model nobody else uses: prompt, rounds, end.
Trial Engine::decode_alone(Resident& resident, Request& r) {
    Stage& stage = *resident.stage;
    Sequence& q = r.sequence;
    const auto go_on = [&] {
        if (cancelled_) fail(KD_E_CANCELLED, "the load was cancelled");
    };
    const bool own = r.flags & KD_REQUEST_OWN_BUILDER;
    const tree::Builder& builder = registry_.get(own ? r.builder.c_str() : "none");
    check_builder(builder, own ? r.budget : 0, resident.info.draft_layers > 0);
    const tree::Instance instance(builder, options_.max_nodes);
    q.planting = {&instance, budget_of(builder, own ? r.budget : 0, stage.model()), 0};

    struct Pages {
        KvCache& cache;
        std::vector<int32_t>& pages;
        ~Pages() { cache.release(pages); }
    } reserved{*resident.cache, q.pages};
    KD_CHECK(resident.cache->allocate(q.pages, pages_for(q)));  // check_request() has compared
    q.slot = 0;

    Trial trial;
    bool ended = false;
    const auto keep = [&] {
        const size_t first = q.tokens.size() - size_t(q.n_new);
        for (int i = 0; i < q.n_new && !ended; i++) {
            trial.tokens.push_back(q.tokens[first + i]);
            trial.hashes.push_back(q.hashes[i]);
            ended = r.stops_at(trial.tokens.back()) || int(trial.tokens.size()) >= q.max_tokens;
        }
    };
    try {
        while (q.start < q.prompt) {
            go_on();
            const PromptPart part{&q, q.start, std::min(options_.prefill_chunk, q.prompt - q.start)};
            prefill_chunk(stage, {&part, 1});
        }
        keep();
        const uint64_t began = now_us();
        Sequence* batch[] = {&q};
        while (!ended) {
            go_on();
            decode_rounds(stage, batch, kRunRounds, cancelled_, [&](const StepCounts&) {
                keep();
                return ended ? 0 : kRunRounds;
            });
        }
        trial.decode_us = now_us() - began;
    } catch (const Error& e) {  // ranks that have failed cannot be used again: are they the engine's own?
        if (e.status != KD_E_CANCELLED && &stage.team == &team_)
            post([this, sentence = std::string(e.what())] { latch(sentence); });
        throw;
    }
    return trial;
}

}  // namespace kd
