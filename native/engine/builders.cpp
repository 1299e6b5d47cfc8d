// Which builder plants whose trees. A swap is a command: it takes effect between two rounds.
#include <algorithm>

#include "engine/engine.h"
#include "error.h"

namespace kd {

void Engine::register_builder(const kd_tree_builder* builder) {
    check_alive();
    registry_.add(builder);
}

// On the engine thread, with a model in place.
Planting Engine::planting(const char* name, int budget, uint64_t generation) {
    const tree::Builder& builder = registry_.get(name);
    const DraftShape& draft = resident_->stage->model().draft;
    if (builder.needs_drafter() && draft.layers == 0)
        fail(KD_E_STATE, "builder '%s' needs a drafter and the model has none: use 'none'", builder.name.c_str());
    if (budget < 0 || budget > options_.max_nodes)
        fail(KD_E_INVALID, "budget is %d: 0 .. %d, the engine's max_nodes", budget, options_.max_nodes);
    if (budget == 0) budget = std::min(tree::default_budget(builder.name, draft.depth()), options_.max_nodes);
    auto& instance = instances_[&builder];
    if (!instance) instance = tree::Instance(builder, options_.max_nodes);
    return {&instance, builder.needs_drafter() ? budget : 0, generation};
}

// For a model just put in place: what was chosen before if it can work, else the backend's own with a drafter and none without.
void Engine::plant_default() {
    const bool drafter = resident_->stage->model().draft.layers > 0;
    if (chosen_builder_ && (drafter || !chosen_builder_->needs_drafter()))
        default_planting_ = planting(chosen_builder_->name.c_str(), chosen_budget_, ++builder_generation_);
    else
        default_planting_ = planting(drafter ? device::default_builder() : "none", 0, ++builder_generation_);
}

uint64_t Engine::use_builder(const char* name, int budget, uint64_t id) {
    check_alive();
    registry_.get(name);
    return call([&]() -> uint64_t {
        if (!resident_) fail(KD_E_STATE, "no model is loaded: builders are chosen for a loaded model");
        if (id) {
            Request* request = find(id);
            if (!request && id < next_id_)
                fail(KD_E_DONE, "request %llu has ended already", static_cast<unsigned long long>(id));
            if (!request) fail(KD_E_NOT_FOUND, "there is no request %llu", static_cast<unsigned long long>(id));
            const Planting p = planting(name, budget, builder_generation_ + 1);
            builder_generation_++;
            request->sequence.planting = p;
            return p.generation;
        }
        const Planting p = planting(name, budget, builder_generation_ + 1);
        builder_generation_++;
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
