#include "model/load.h"

#include <ctime>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <new>

#include "model/fill.h"
#include "model/hash.h"
#include "model/opening.h"
#include "model/readers.h"
#include "model/refuse.h"
#include "ops.h"

namespace kd::model {

namespace {

uint64_t clock_us() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1'000'000 + static_cast<uint64_t>(t.tv_nsec) / 1'000;
}

}  // namespace

void Progress::start() {
    std::lock_guard lock(mutex_);
    if (started_) return;
    started_ = running_ = true;
    since_us_ = clock_us();
}

void Progress::enter(int phase) {
    std::lock_guard lock(mutex_);
    const uint64_t now = clock_us();
    if (running_) spent_us_[phase_] += now - since_us_;
    since_us_ = now;
    phase_ = phase;
}

void Progress::stop() {
    std::lock_guard lock(mutex_);
    if (running_) spent_us_[phase_] += clock_us() - since_us_;
    running_ = false;
}

uint64_t Progress::phase_us(int phase) const {
    std::lock_guard lock(mutex_);
    return spent_us_[phase] + (running_ && phase == phase_ ? clock_us() - since_us_ : 0);
}

uint64_t Progress::elapsed_us() const {
    std::lock_guard lock(mutex_);
    uint64_t sum = running_ ? clock_us() - since_us_ : 0;
    for (const uint64_t spent : spent_us_) sum += spent;
    return sum;
}

Loaded::~Loaded() {
    for (size_t r = 0; r < arenas_.size(); ++r) {
        device::bind(device::context(*group_, static_cast<int>(r)));
        device::release(arenas_[r]);
    }
}

void Loaded::alloc(int tp, size_t bytes) {
    device::bind(device::context(*group_, 0));
    const uint64_t all = uint64_t{bytes} * static_cast<uint64_t>(tp), free = device::memory_free();
    if (all > free)
        fail(KD_E_NOMEM,
             "the weights need %llu MiB of memory and %llu MiB are free: unload what is loaded, or use a machine "
             "with more",
             static_cast<unsigned long long>(all >> 20), static_cast<unsigned long long>(free >> 20));
    arenas_.reserve(static_cast<size_t>(tp));
    for (int r = 0; r < tp; ++r) {
        device::bind(device::context(*group_, r));
        arenas_.push_back(device::alloc(bytes));
    }
}

namespace {

// Both tables of every rank, computed in double.
void fill_rope(Loaded& loaded, Progress& progress, const RopeSlabs& slabs, const Rotary& rotary, int dim,
               int max_positions) {
    std::vector<uint8_t> buffer(kChunkBytes);
    const std::vector<double> frequencies = rope_frequencies(rotary, dim);
    const double amplitude = rope_amplitude(rotary);
    const size_t pairs = frequencies.size(), row_bytes = pairs * sizeof(float);
    const size_t rows = static_cast<size_t>(max_positions + kRopeMargin), rows_a_chunk = kChunkBytes / 8 / row_bytes;
    for (size_t row = 0; row < rows; row += rows_a_chunk) {
        const size_t n = std::min(rows_a_chunk, rows - row);
        for (const bool sine : {false, true}) {
            pause(progress);
            uint8_t* to = buffer.data();
            for (size_t i = row; i < row + n; ++i)
                for (size_t j = 0; j < pairs; ++j, to += sizeof(float)) {
                    const double angle = static_cast<double>(i) * frequencies[j];
                    const auto value = static_cast<float>(amplitude * (sine ? std::sin(angle) : std::cos(angle)));
                    memcpy(to, &value, sizeof value);
                }
            for (size_t r = 0; r < loaded.ranks.size(); ++r) {
                const int rank = static_cast<int>(r);
                device::bind(device::context(loaded.group(), rank));
                device::upload(loaded.arena(rank) + (sine ? slabs.sin : slabs.cos).row(row), buffer.data(),
                               n * row_bytes);
                device::settle();
            }
        }
    }
}

void fill_published(Loaded& loaded, const Opening& o, Progress& progress) {
    Hash hash;
    const auto hash_part = [&](const std::string& config_json, uint64_t tensors) {
        hash.add(config_json);
        hash.add(&tensors, sizeof tensors);
        return hash.value();
    };
    Info& info = loaded.info;
    info.content_hash = info.target_hash = hash_part(o.config_text, fill(loaded, progress, o.files, o.plan));
    if (o.draft)
        info.content_hash = hash_part(o.draft->config_text, fill(loaded, progress, o.draft_files, o.draft_plan));

    progress.enter(KD_LOAD_PREPARE);
    const int positions = o.config.shape.max_positions;
    fill_rope(loaded, progress, o.rope, o.config.rotary, o.config.shape.rope, positions);
    if (o.draft)
        fill_rope(loaded, progress, o.draft_rope, o.draft->config.rotary, o.draft->config.shape.head_dim, positions);
    for (size_t r = 0; r < loaded.ranks.size(); ++r) {
        device::bind(device::context(loaded.group(), static_cast<int>(r)));
        for (const Layer& layer : loaded.ranks[r].layers) {
            pause(progress);
            if (!layer.dense) ops::pack_experts(layer.routed);
        }
    }
}

std::unique_ptr<Loaded> load_folder(const std::string& path, const DraftChoice& choice, device::Group& group, int tp,
                                    Progress& progress, Links links) {
    const auto check = [&] { pause(progress); };
    check();
    const Folder folder(path, links);
    const auto o = open_model(folder, choice, tp, check);

    auto loaded = std::make_unique<Loaded>(group);
    loaded->info = o->info;
    loaded->packing = o->packing;
    check();
    loaded->alloc(tp, o->packing.bytes);
    loaded->ranks.resize(static_cast<size_t>(tp));
    for (int r = 0; r < tp; ++r) {
        Model& model = loaded->ranks[static_cast<size_t>(r)];
        Layout rank(loaded->arena(r));
        uint64_t expert_bytes = 0;
        lay_out_target(model, expert_bytes, rank, nullptr, rank_shape(o->config.shape, tp, r));
        if (o->draft)
            lay_out_draft(model, rank, nullptr, rank_shape(o->draft->config.shape, tp), o->config.shape.max_positions);
        KD_CHECK(rank.bytes() == o->packing.bytes);
    }

    progress.bytes_total = o->packed ? o->packed->read_bytes() : o->plan.read_bytes + o->draft_plan.read_bytes;
    progress.enter(KD_LOAD_READ);
    if (o->packed) {
        o->packed->fill(*loaded, progress);
        progress.enter(KD_LOAD_PREPARE);
    } else {
        fill_published(*loaded, *o, progress);
    }
    check();
    return loaded;
}

}  // namespace

std::unique_ptr<Loaded> load(const std::string& path, const DraftChoice& draft, device::Group& group, int tp,
                             Progress& progress, Links links) {
    progress.start();
    try {
        return load_folder(path, draft, group, tp, progress, links);
    } catch (const std::bad_alloc&) {
        fail(KD_E_NOMEM, "%s: not enough memory to load it; use a machine with more, or a smaller model",
             printable(path, 300).c_str());
    }
}

}  // namespace kd::model
