// Putting a model in place: read on a thread of its own, installed between two turns.
#include <algorithm>

#include "engine/clock.h"
#include "engine/engine.h"
#include "engine/threads.h"
#include "error.h"
#include "self_check.h"

namespace kd {

void Engine::load(LoadPlan plan) {
    check_alive();
    std::lock_guard lock(state_mutex_);
    if (loading_) fail(KD_E_BUSY, "a load is under way: wait for it or cancel it with kd_load_cancel");
    if (info_.weights_generation) fail(KD_E_EXISTS, "a model is loaded: unload it first with kd_unload");
    loading_ = true;
    progress_ = std::make_unique<model::Progress>();
    load_status_ = KD_E_BUSY;
    loader_ = quiet_thread("kd-loader", [this, plan = std::move(plan), generation = weights_generation_ + 1]() mutable {
        load_thread(std::move(plan), generation);
    });
}

void Engine::load_thread(LoadPlan plan, uint64_t generation) {
    try {
        std::shared_ptr<Resident> resident = make_resident(plan, generation);
        if (progress_->cancelled()) fail(KD_E_CANCELLED, "the load of %s was cancelled", plan.path.c_str());
        post([this, resident] { install(std::make_unique<Resident>(std::move(*resident))); });
    } catch (const Error& e) {
        post([this, status = e.status, sentence = std::string(e.what())] { finish_load(status, sentence); });
    } catch (const std::bad_alloc&) {
        post([this, path = plan.path] { finish_load(KD_E_NOMEM, "out of memory while loading " + path); });
    } catch (const std::exception& e) {
        post([this, sentence = std::string(e.what())] { finish_load(KD_E_FATAL, sentence); });
    }
}

std::unique_ptr<Resident> Engine::make_resident(LoadPlan& plan, uint64_t generation) {
    auto resident = std::make_unique<Resident>();
    resident->loaded = model::load(plan.path, plan.draft, team_.group(), options_.tp, *progress_);
    progress_->phase = KD_LOAD_PREPARE;
    const model::Loaded& loaded = *resident->loaded;
    const Model& m = loaded.ranks[0];

    Limits limits;
    limits.streams = options_.max_streams;
    limits.rows = std::max({options_.max_rows, options_.prefill_chunk, options_.max_streams * m.draft.block});
    limits.tree_width = options_.max_nodes;
    limits.pages_sequence = (m.shape.max_positions + options_.max_nodes + KD_PAGE_TOKENS - 1) / KD_PAGE_TOKENS;
    const uint64_t page_bytes = Rank::kv_bytes_token(m) * KD_PAGE_TOKENS;
    const uint64_t most = uint64_t(limits.pages_sequence) * options_.max_streams;
    limits.kv_pages = int(std::min(options_.kv_bytes / page_bytes, most));
    const int least = (2 + options_.max_nodes + KD_PAGE_TOKENS - 1) / KD_PAGE_TOKENS;
    if (limits.kv_pages < least)
        fail(KD_E_NOMEM,
             "the engine's kv_bytes is %llu, room for %d pages of %llu bytes: one request needs at least %d",
             static_cast<unsigned long long>(options_.kv_bytes), limits.kv_pages,
             static_cast<unsigned long long>(page_bytes), least);

    std::vector<std::unique_ptr<Rank>> ranks;
    for (int r = 0; r < options_.tp; r++) {
        device::bind(device::context(team_.group(), r));
        self_check((std::string(device::backend()) + " device of rank " + std::to_string(r)).c_str());
        ranks.push_back(std::make_unique<Rank>(loaded.ranks[size_t(r)], r, limits));
    }
    resident->stage = std::make_unique<Stage>(team_, std::move(ranks), options_.max_rows);
    resident->cache = std::make_unique<KvCache>(limits.kv_pages);
    resident->token_bytes = std::move(plan.token_bytes);

    kd_model_info& info = resident->info;
    info.size = sizeof info;
    info.vocab_size = m.shape.vocab;
    info.max_positions = m.shape.max_positions;
    info.layers = m.shape.layers;
    info.hidden_size = m.shape.hidden;
    info.heads = m.shape.heads;
    info.experts = m.shape.experts;
    info.experts_per_token = m.shape.experts_per_token;
    info.draft_layers = m.draft.layers;
    info.draft_depth = m.draft.depth();
    info.n_stop_ids = int(loaded.info.stop_ids.size());
    std::copy(loaded.info.stop_ids.begin(), loaded.info.stop_ids.end(), info.stop_ids);
    info.parameters = loaded.info.parameters;
    info.draft_parameters = loaded.info.draft_parameters;
    info.weight_bytes = loaded.info.weight_bytes;
    info.expert_bytes = loaded.info.expert_bytes;
    info.kv_bytes_token = Rank::kv_bytes_token(m);
    info.kv_tokens = uint64_t(limits.kv_pages) * KD_PAGE_TOKENS;
    info.content_hash = loaded.info.content_hash;
    info.weights_generation = generation;
    return resident;
}

void Engine::install(std::unique_ptr<Resident> resident) {
    resident_ = std::move(resident);
    try {
        plant_default();
    } catch (const Error& e) {
        resident_.reset();
        finish_load(e.status, e.what());
        return;
    }
    {
        std::lock_guard lock(state_mutex_);
        info_ = resident_->info;
        token_bytes_ = !resident_->token_bytes.empty();
        weights_generation_ = info_.weights_generation;
    }
    finish_load(KD_OK, "");
}

void Engine::finish_load(int status, const std::string& sentence) {
    std::thread loader;
    {
        std::lock_guard lock(state_mutex_);  // load() may still be putting it there
        loader.swap(loader_);
    }
    loader.join();  // it has posted this call and is on its way out
    {
        std::lock_guard lock(state_mutex_);
        loading_ = false;
        load_status_ = status;
        load_sentence_ = sentence;
        if (status == KD_OK) progress_->phase = KD_LOAD_DONE;
        load_elapsed_us_ = now_us() - progress_->start_us;
    }
    kd_event e{};
    e.size = sizeof e;
    e.type = KD_EVENT_LOAD;
    e.status = status;
    e.weights_generation = weights_generation_;
    // Whoever has left so many ends of loads unread does not read them: kd_load_wait is enough.
    if (ring_.unpolled(load_place()) < kUnpolledLoads) ring_.push(e, {}, load_place());
    show();
    state_changed_.notify_all();
}

void Engine::load_wait(uint32_t timeout_ms) {
    check_alive();
    std::unique_lock lock(state_mutex_);
    if (!state_changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return !loading_ || fatal_; }))
        fail(KD_E_TIMEOUT, "the load has not ended within %u ms: %llu of %llu bytes are read", timeout_ms,
             static_cast<unsigned long long>(progress_->bytes_done),
             static_cast<unsigned long long>(progress_->bytes_total));
    if (fatal_) throw Error(KD_E_FATAL, fatal_sentence_);
    if (load_status_ != KD_OK) throw Error(load_status_, load_sentence_);
}

void Engine::load_cancel() {
    check_alive();
    std::lock_guard lock(state_mutex_);
    if (!loading_) fail(KD_E_STATE, "no load is under way");
    progress_->cancel();
}

kd_progress Engine::load_progress() {
    check_alive();
    std::lock_guard lock(state_mutex_);
    kd_progress p{};
    p.size = sizeof p;
    if (!progress_) return p;
    p.phase = progress_->phase;
    p.bytes_done = progress_->bytes_done;
    p.bytes_total = progress_->bytes_total;
    const uint64_t start = progress_->start_us;
    p.elapsed_us = !loading_ ? load_elapsed_us_ : start ? now_us() - start : 0;
    return p;
}

}  // namespace kd
