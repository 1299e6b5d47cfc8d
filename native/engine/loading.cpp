// Putting a model in place: read on a thread of its own, installed between two turns.
#include <algorithm>

#include "engine/clock.h"
#include "engine/engine.h"
#include "engine/threads.h"
#include "error.h"
#include "model/packed.h"
#include "self_check.h"

namespace kd {

// With state_mutex_ held. `body` runs on a thread of its own and posts what comes of it.
void Engine::begin_load(const std::string& path, std::function<void()> body) {
    if (loading_) fail(KD_E_BUSY, "a load is under way: wait for it or cancel it with kd_load_cancel");
    loading_ = true;
    taken_ = accepted_ = false;
    cancelled_ = false;
    progress_ = std::make_unique<model::Progress>();
    load_status_ = KD_E_BUSY;
    loader_ = quiet_thread("kd-loader", [this, path, body = std::move(body)] {
        try {
            body();
        } catch (const Error& e) {
            post([this, status = e.status, sentence = std::string(e.what())] { finish_load(status, sentence); });
        } catch (const std::bad_alloc&) {
            post([this, path] { finish_load(KD_E_NOMEM, "out of memory while loading " + path); });
        } catch (const std::exception& e) {
            post([this, sentence = std::string(e.what())] { finish_load(KD_E_FATAL, sentence); });
        }
    });
}

void Engine::load(LoadPlan plan) {
    check_alive();
    std::lock_guard lock(state_mutex_);
    if (!loading_ && info_.weights_generation && !plan.replace)
        fail(KD_E_EXISTS, "a model is loaded: unload it first with kd_unload, or load with KD_LOAD_REPLACE");
    const std::string path = plan.path;
    begin_load(path, [this, plan = std::move(plan), generation = weights_generation_ + 1,
                      beside = info_.weights_generation != 0]() mutable {
        // Beside a model at work its ranks are taken: this load gets some of its own, for as long as it lasts.
        const std::unique_ptr<Team> own = beside ? std::make_unique<Team>(device_options()) : nullptr;
        Team& team = own ? *own : team_;
        std::shared_ptr<Resident> resident = make_resident(plan, generation, team, beside);
        struct Release {
            Engine& engine;
            ~Release() { engine.release_held(); }
        } release{*this};
        if (plan.hold) hold(*resident);
        if (progress_->cancelled()) fail(KD_E_CANCELLED, "the load of %s was cancelled", plan.path.c_str());
        if (own) {
            own->run(KD_STAGE_IDLE, [](int) { device::settle(); });
            resident->loaded->adopt(team_.group());
            resident->stage =
                std::make_unique<Stage>(team_, std::move(resident->stage->ranks), resident->stage->max_rows);
        }
        post([this, resident = std::move(resident)] { install(resident); });
    });
}

void Engine::save(std::string path) {
    check_alive();
    std::lock_guard lock(state_mutex_);
    if (!loading_ && !info_.weights_generation) fail(KD_E_STATE, "no model is loaded: there is nothing to save");
    begin_load(path, [this, path] {
        // resident_ stays: nothing replaces or frees it while loading_ is set.
        model::save(*resident_->loaded, path, *progress_);
        pass_cancelling();
        post([this] { finish_load(KD_OK, ""); });
    });
}

std::unique_ptr<Resident> Engine::make_resident(LoadPlan& plan, uint64_t generation, Team& team, bool beside) {
    device::Group& group = team.group();
    auto resident = std::make_unique<Resident>();
    resident->loaded = model::load(plan.path, plan.draft, group, options_.tp, *progress_, plan.links);
    progress_->enter(KD_LOAD_PREPARE);
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

    const uint64_t kv_bytes = limits.kv_pages * page_bytes * uint64_t(options_.tp);
    if (beside && kv_bytes > device::memory_free())
        fail(KD_E_NOMEM,
             "%s: its KV cache needs %llu MiB beside the model that serves, %llu MiB are free: unload that first",
             plan.path.c_str(), static_cast<unsigned long long>(kv_bytes >> 20),
             static_cast<unsigned long long>(device::memory_free() >> 20));
    std::vector<std::unique_ptr<Rank>> ranks;
    for (int r = 0; r < options_.tp; r++) {
        device::bind(device::context(group, r));
        self_check((std::string(device::backend()) + " device of rank " + std::to_string(r)).c_str());
        ranks.push_back(std::make_unique<Rank>(loaded.ranks[size_t(r)], r, limits));
    }
    resident->stage = std::make_unique<Stage>(team, std::move(ranks), options_.max_rows);
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
    info.skipped_tensors = uint32_t(std::min<uint64_t>(loaded.info.skipped, UINT32_MAX));
    info.parameters = loaded.info.parameters;
    info.draft_parameters = loaded.info.draft_parameters;
    info.weight_bytes = loaded.info.weight_bytes;
    info.expert_bytes = loaded.info.expert_bytes;
    info.kv_bytes_token = Rank::kv_bytes_token(m);
    info.kv_tokens = uint64_t(limits.kv_pages) * KD_PAGE_TOKENS;
    info.content_hash = loaded.info.content_hash;
    info.target_hash = loaded.info.target_hash;
    info.weights_generation = generation;
    info.text_id = plan.text_id;
    return resident;
}

void Engine::install(std::shared_ptr<Resident> resident) {
    {
        std::lock_guard lock(state_mutex_);  // from now on requests are checked against the new model
        info_ = resident->info;
        weights_generation_ =
            info_.weights_generation;  // never given to another, even if this one does not come to serve
        token_bytes_ = !resident->token_bytes.empty();
    }
    next_ = std::move(resident);
    progress_->enter(KD_LOAD_SWAP);
    swap_if_idle();
}

// Puts next_ in place once everything that was submitted to the model before it has ended. Whether there was something to do.
bool Engine::swap_if_idle() {
    if (!next_) return false;
    const auto give_up = [&](int status, const std::string& sentence) {
        next_.reset();
        take_over(status, sentence);
        return true;
    };
    if (fatal_ || progress_->cancelled()) return give_up(KD_E_CANCELLED, "the load was cancelled");
    const auto old = [&](uint64_t generation) { return generation != next_->info.weights_generation; };
    if (!running_.empty() || (!waiting_.empty() && old(waiting_.front()->weights_generation)) ||
        (!scores_.empty() && old(scores_.front()->weights_generation)))
        return false;
    try {  // all that can fail comes before the old model goes
        const Planting fresh = plant_default(*next_);
        pass_cancelling();
        default_planting_ = fresh;
    } catch (const Error& e) {
        return give_up(e.status, e.what());
    }
    if (resident_) team_.run(KD_STAGE_IDLE, [](int) { device::forget(); });
    resident_ = std::move(next_);
    take_over(KD_OK, "");
    return true;
}

// A load that got as far as next_ ends: resident_, if there is one, is what waiting requests run on.
void Engine::take_over(int status, const std::string& sentence) {
    {
        std::lock_guard lock(state_mutex_);
        info_ = resident_ ? resident_->info : kd_model_info{};
        token_bytes_ = resident_ && !resident_->token_bytes.empty();
    }
    for (auto& request : waiting_) settle_in(*request);
    std::erase_if(scores_, [&](std::unique_ptr<Score>& score) {
        if (resident_ && score->weights_generation == resident_->info.weights_generation) return false;
        score->end.set_exception(std::make_exception_ptr(Error(KD_E_CANCELLED, "the model was replaced")));
        return true;
    });
    finish_load(status, sentence);
}

// A request that has not begun gets the model and the builder that are in force now, or ends.
void Engine::settle_in(Request& r) {
    if (r.ended) return;
    try {
        if (!resident_) fail(KD_E_CANCELLED, "the model was unloaded");
        if (r.weights_generation != resident_->info.weights_generation) {
            if (r.weights_generation < oldest_generation_) fail(KD_E_CANCELLED, "the model was unloaded");
            check_request(r, resident_->info);
            r.be_for(resident_->info);
        }
        r.sequence.planting = r.flags & KD_REQUEST_OWN_BUILDER ? planting(resident_->stage->model(), r.builder.c_str(),
                                                                          r.budget, ++builder_generation_)
                                                               : default_planting_;
    } catch (const Error& e) {
        end(r, e.status);
    }
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
        if (status == KD_OK) progress_->enter(KD_LOAD_DONE);
        progress_->stop();
    }
    kd_event e{};
    e.size = sizeof e;
    e.type = KD_EVENT_LOAD;
    e.status = status;
    e.weights_generation = resident_ ? resident_->info.weights_generation : 0;
    // Whoever has left so many ends of loads unread does not read them: kd_load_wait is enough.
    if (ring_.unpolled(load_place()) < kUnpolledLoads) ring_.push(e, {}, load_place());
    show();
    state_changed_.notify_all();
}

void Engine::load_wait(uint32_t timeout_ms) {
    check_alive();
    std::unique_lock lock(state_mutex_);
    const auto over = [&] { return !loading_ || fatal_ || (held_ && !accepted_ && !progress_->cancelled()); };
    if (!state_changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), over))
        fail(KD_E_TIMEOUT, "the load has not ended within %u ms: %llu of %llu bytes are read", timeout_ms,
             static_cast<unsigned long long>(progress_->bytes_done),
             static_cast<unsigned long long>(progress_->bytes_total));
    if (fatal_) throw Error(KD_E_FATAL, fatal_sentence_);
    if (!loading_ && load_status_ != KD_OK) throw Error(load_status_, load_sentence_);
}

void Engine::load_cancel() {
    check_alive();
    std::lock_guard lock(state_mutex_);
    if (!loading_) fail(KD_E_STATE, "no load is under way");
    if (taken_) fail(KD_E_STATE, "the load has just come to its end: it is too late to cancel it");
    cancel_load();
}

// With state_mutex_ held.
void Engine::cancel_load() {
    progress_->cancel();
    cancelled_ = true;
    state_changed_.notify_all();  // it may hold its model
    post([] {});                  // or be waiting for requests to end
}

// From here on the load succeeds: whoever cancels later is told so. Throws if somebody has cancelled.
void Engine::pass_cancelling() {
    std::lock_guard lock(state_mutex_);
    if (progress_->cancelled()) fail(KD_E_CANCELLED, "the load was cancelled");
    taken_ = true;
}

kd_progress Engine::load_progress() {
    check_alive();
    std::lock_guard lock(state_mutex_);
    kd_progress p{};
    p.size = sizeof p;
    if (!progress_) return p;
    p.phase = progress_->phase();
    p.bytes_done = progress_->bytes_done;
    p.bytes_total = progress_->bytes_total;
    p.elapsed_us = progress_->elapsed_us();
    for (int i = 0; i < KD_LOAD_PHASES; i++) p.phase_us[i] = progress_->phase_us(i);
    return p;
}

}  // namespace kd
