// From a Hugging Face folder to one kd::Model a rank.
//
// The folder: config.json, generation_config.json (optional), model.safetensors or model.safetensors.index.json with
// its shards, and draft/ (optional) with a config.json and the same kinds of files. What a config means is decided in
// config.h, what a safetensors header may say in safetensors.h. A folder that `kdctl convert` has made holds packed files in
// their place (packed.h).
//
// Nothing in the folder is trusted. Every tensor the model needs is there exactly once with the right element type and
// shape, and every tensor of the text model is needed; both are known before any weight memory is asked for.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device.h"
#include "model/plan.h"
#include "types.h"

namespace kd::model {

// Rows of a rope table beyond max_positions: a draft or a tree that starts at the last position reaches past it.
constexpr int kRopeMargin = KD_MAX_DEPTH;

// Where a load stands. The loading thread calls start, enter and stop and counts bytes; any thread may read and call cancel().
// load() ends in phase KD_LOAD_PREPARE: what comes after the weights, and KD_LOAD_DONE, is the caller's.
class Progress {
  public:
    static constexpr int kPhases = KD_LOAD_PHASES;
    std::atomic<uint64_t> bytes_done{0};        // tensor bytes read
    std::atomic<uint64_t> bytes_total{0};       // 0 until all headers are read
    std::atomic<uint64_t> stop_at{UINT64_MAX};  // the load is given up once bytes_done has reached this

    void start();           // the clock runs, in KD_LOAD_OPEN; once more does nothing
    void enter(int phase);  // from now on
    void stop();            // the clock: how the load ended stays readable

    int phase() const { return phase_; }
    uint64_t elapsed_us() const;  // since start(): the sum of all phases
    uint64_t phase_us(int phase) const;

    void cancel() { stop_at = 0; }
    bool cancelled() const { return bytes_done >= stop_at; }

  private:
    mutable std::mutex mutex_;
    std::atomic<int> phase_{KD_LOAD_OPEN};
    bool running_ = false, started_ = false;
    uint64_t since_us_ = 0;  // of the phase
    uint64_t spent_us_[kPhases] = {};
};

struct DraftChoice {
    enum Mode { kAuto = 0, kNone = 1, kPath = 2 };  // the values of kd_load_options.draft
    Mode mode = kAuto;                              // kAuto: <path>/draft if there is such a folder
    std::string path;                               // with kPath
};

struct Info {
    uint64_t parameters = 0;        // of the target: matrix and vector elements, scales not counted
    uint64_t draft_parameters = 0;  // 0: no drafter
    uint64_t weight_bytes = 0;      // resident on all ranks, rope tables included
    uint64_t expert_bytes = 0;      // of these the INT4 experts: packed words and scales
    uint64_t content_hash =
        0;                     // of config.json and the tensors (name, type, shape, bytes), not of how they are sharded
    uint64_t target_hash = 0;  // the same of the target alone
    uint64_t skipped = 0;      // tensors that a text model does not need: vision, prediction layers, rope tables
    std::vector<int32_t> stop_ids;  // config.json and generation_config.json together, ascending; <= KD_MAX_STOP_IDS
};

// What a packed folder must say to be the same (packed.h).
struct Packing {
    std::vector<Layout::Part> parts;
    uint64_t bytes = 0, fingerprint = 0;                // of a rank's memory and its layout
    uint64_t target_bytes = 0, target_fingerprint = 0;  // the same up to the drafter
    uint64_t config_hash = 0, draft_config_hash = 0;    // of the texts; 0: no drafter
};

// A loaded model. Destroy it while the group it was loaded on is alive and no step runs; that frees the weights and
// leaves the calling thread bound to the last rank.
struct Loaded {
    std::vector<Model> ranks;
    Info info;
    Packing packing;

    explicit Loaded(device::Group& group) : group_(&group) {}
    ~Loaded();
    Loaded(const Loaded&) = delete;
    Loaded& operator=(const Loaded&) = delete;

    // One block of zeroed memory on each of `tp` ranks. Binds the calling thread.
    void alloc(int tp, size_t bytes);
    uint8_t* arena(int rank) const { return static_cast<uint8_t*>(arenas_[static_cast<size_t>(rank)]); }
    device::Group& group() const { return *group_; }
    // From now on the memory is another group's of the same devices; the one it was loaded on may go.
    void adopt(device::Group& group) { group_ = &group; }

  private:
    device::Group* group_;
    std::vector<void*> arenas_;
};

// Load the folder for `tp` ranks of `group` (the group's size). Blocks; reads with up to kMaxReaders threads (readers.h says how
// much memory they take), and leaves the calling thread bound to one rank. Throws Error: KD_E_IO (a file that cannot be
// opened or read), KD_E_MODEL (damaged, incomplete, of another kind, or not divisible by tp), KD_E_NOMEM,
// KD_E_CANCELLED. Whatever is thrown, the memory is back by then.
std::unique_ptr<Loaded> load(const std::string& path, const DraftChoice& draft, device::Group& group, int tp,
                             Progress& progress, Links links = Links::kCache);

}  // namespace kd::model
