// Which builder plants whose trees. A swap is a command: it takes effect between two rounds.
#include <algorithm>
#include <utility>

#include "engine/engine.h"
#include "error.h"

namespace kd {

void Engine::register_builder(const kd_tree_builder* builder) {
    check_alive();
    registry_.add(builder);
}

// Throws what somebody is told who asks for this builder.
void Engine::check_builder(const tree::Builder& builder, int budget, bool drafter) const {
    if (builder.needs_drafter() && !drafter)
        fail(KD_E_STATE, "builder '%s' needs a drafter and the model has none: use 'none'", builder.name.c_str());
    if (budget < 0 || budget > options_.max_nodes)
        fail(KD_E_INVALID, "budget is %d: 0 .. %d, the engine's max_nodes", budget, options_.max_nodes);
}

// Nodes of one stream's tree; 0: the builder's default.
int Engine::budget_of(const tree::Builder& builder, int budget, const Model& model) const {
    if (!builder.needs_drafter()) return 0;
    return budget ? budget : std::min(tree::default_budget(builder.name, model.draft.depth()), options_.max_nodes);
}

// On the engine thread.
Planting Engine::planting(const Model& model, const char* name, int budget, uint64_t generation) {
    const tree::Builder& builder = registry_.get(name);
    check_builder(builder, budget, model.draft.layers > 0);
    auto& instance = instances_[&builder];
    if (!instance) instance = tree::Instance(builder, options_.max_nodes);
    return {&instance, budget_of(builder, budget, model), generation};
}

// For a model that takes its place: what it was accepted with, else what was chosen before if it can work, else the backend's own
// with a drafter and none without.
Planting Engine::plant_default(const Resident& resident) {
    const Model& model = resident.stage->model();
    const bool drafter = model.draft.layers > 0;
    const uint64_t awaited = std::exchange(awaited_generation_, 0);
    if (resident.builder)
        return planting(model, resident.builder->name.c_str(), resident.budget, ++builder_generation_);
    if (chosen_builder_ && (drafter || !chosen_builder_->needs_drafter()))
        return planting(model, chosen_builder_->name.c_str(), chosen_budget_,
                        awaited ? awaited : ++builder_generation_);
    return planting(model, drafter ? device::default_builder() : "none", 0, ++builder_generation_);
}

uint64_t Engine::use_builder(const char* name, int budget, uint64_t id) {
    check_alive();
    registry_.get(name);
    return call([&]() -> uint64_t {
        const auto coming = [&] {
            std::lock_guard lock(state_mutex_);
            return loading_;
        };
        if (!resident_ && (id || !coming()))
            fail(KD_E_STATE, "no model is loaded: builders are chosen for a loaded model");
        if (!resident_) {
            check_builder(registry_.get(name), budget, true);
            chosen_builder_ = &registry_.get(name);
            chosen_budget_ = budget;
            if (next_) next_->builder = nullptr;
            return awaited_generation_ = ++builder_generation_;
        }
        if (id) {
            Request* request = find(id);
            if (!request && id < next_id_)
                fail(KD_E_DONE, "request %llu has ended already", static_cast<unsigned long long>(id));
            if (!request) fail(KD_E_NOT_FOUND, "there is no request %llu", static_cast<unsigned long long>(id));
            const Planting p = planting(resident_->stage->model(), name, budget, builder_generation_ + 1);
            builder_generation_++;
            request->sequence.planting = p;
            return p.generation;
        }
        const Planting p = planting(resident_->stage->model(), name, budget, builder_generation_ + 1);
        builder_generation_++;
        if (next_) next_->builder = nullptr;  // this was asked for later
        default_planting_ = p;
        chosen_builder_ = &p.builder->builder();
        chosen_budget_ = p.budget;
        for (auto* list : {&running_, &waiting_})
            for (auto& r : *list) r->sequence.planting = p;
        return p.generation;
    });
}

std::vector<kd_builder_info> Engine::builders() {
    check_alive();
    return call([&] {
        std::vector<kd_builder_info> infos;
        for (const tree::Builder* b : registry_.list()) {
            kd_builder_info info{};
            info.size = sizeof info;
            b->name.copy(info.name, sizeof info.name - 1);
            b->description.copy(info.description, sizeof info.description - 1);
            if (default_planting_.builder && &default_planting_.builder->builder() == b) {
                info.in_force = 1;
                info.budget = default_planting_.budget;
            }
            for (auto& r : running_)
                if (r->sequence.planting.builder && &r->sequence.planting.builder->builder() == b) info.streams++;
            infos.push_back(info);
        }
        return infos;
    });
}

}  // namespace kd
