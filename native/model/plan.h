// Where everything goes: one layout of a rank's memory, the same offsets on every rank, and for each tensor of the
// files the places its rows go to.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"
#include "model/files.h"
#include "model/hash.h"
#include "model/sharding.h"
#include "types.h"

namespace kd::model {

enum class Stored {
    bf16,    // BF16, kept
    fp32,    // BF16 or F32, kept as fp32
    packed,  // I32, eight 4-bit values each
    scale,   // BF16
    shape,   // I32 or I64 [2]: checked, not kept
};

struct Place {
    const Checkpoint::Found* found = nullptr;
    Stored stored = Stored::bf16;
    Split split = Split::whole;
    uint64_t rows = 1, cols = 0;         // stored elements; a vector is one row
    uint64_t at = 0;                     // byte offset of the share's first row in a rank's memory
    uint64_t at_v = 0;                   // kv_b: of v_up
    uint64_t want_out = 0, want_in = 0;  // shape: what must stand there
};

struct Plan {
    std::vector<Place> places;  // in the order in which the files hold them
    uint64_t read_bytes = 0;    // of all places
    uint64_t parameters = 0;
    std::vector<std::string> skipped;  // tensors that a text model does not need
    uint64_t skipped_bytes = 0;
};

// Memory of a rank, from `base` on; with base 0 only the layout is made.
class Layout {
  public:
    explicit Layout(uint8_t* base = nullptr) : base_(base) {}

    struct Slab {  // a matrix's memory
        uint64_t at = 0;
        uint64_t row_bytes = 0;
        uint64_t row(uint64_t i) const { return at + i * row_bytes; }
    };
    Slab slab(uint64_t rows, uint64_t cols, uint64_t element_bytes);
    uint64_t bytes() const { return bytes_; }

    // What is laid out from here on is part of `name`, until the next part begins.
    void begin(const std::string& name) { parts_.push_back({name, bytes_}); }
    struct Part {
        std::string name;
        uint64_t at;
    };
    const std::vector<Part>& parts() const { return parts_; }
    uint64_t fingerprint() const { return hash_.value(); }  // of all slabs and parts

    template <class T>
    Dev<const T> dev(const Slab& s) const {
        return Dev<const T>(reinterpret_cast<const T*>(reinterpret_cast<uintptr_t>(base_) + s.at));
    }
    Mat mat(const Slab& s, int n, int k) const { return {dev<uint16_t>(s), n, k}; }
    Vec vec(const Slab& s) const { return dev<float>(s); }

  private:
    uint8_t* base_;
    uint64_t bytes_ = 0;
    std::vector<Part> parts_;
    Hash hash_;
};

// Where a rank's rope tables lie; rows of `pairs` floats.
struct RopeSlabs {
    Layout::Slab cos, sin;
};

// Collects the places while the layout is made; does nothing for the ranks' own passes.
class Collector {
  public:
    // `where` is the folder, for sentences; `prefix` stands before all names of the model's tensors.
    Collector(Checkpoint& files, std::string where, std::string prefix)
        : prefix(std::move(prefix)), files_(files), where_(std::move(where)) {}

    const std::string prefix;

    void matrix(const std::string& name, Stored stored, uint64_t rows, uint64_t cols, uint64_t at, uint64_t at_v = 0);
    void vector(const std::string& name, uint64_t n, uint64_t at);
    void shape(const std::string& name, uint64_t out, uint64_t in);

    // Everything the model needs is known: refuses a tensor that is left over unless `skip` says that it is none of
    // ours.
    Plan finish(const std::function<bool(std::string_view)>& skip);

  private:
    const Checkpoint::Found& find(const std::string& name);
    [[noreturn]] void wrong(const Checkpoint::Found& found, const std::string& what) const;

    Checkpoint& files_;
    std::string where_;
    Plan plan_;
};

// Lay out one rank's target (and drafter), filling `model`. With a collector, also collect its tensors.
// `expert_bytes` grows by what the INT4 experts take.
RopeSlabs lay_out_target(Model& model, uint64_t& expert_bytes, Layout& layout, Collector* collector,
                         const Shape& shape);
RopeSlabs lay_out_draft(Model& model, Layout& layout, Collector* collector, const DraftShape& shape, int max_positions);

// The tensors of the target's folder that a text model does not need: vision, multi-token prediction, stored rope
// tables.
bool is_skipped(std::string_view name, std::string_view prefix, const Config& config);
// What stands before a folder's names: "language_model." or nothing; "model." or nothing.
std::string target_prefix(const Checkpoint& files);
std::string draft_prefix(const Checkpoint& files);

}  // namespace kd::model
