// When each operation of a round was done, by the device's clock, and what it had to do. The pages know nothing of it.
//
// The pages are compiled with `ops` meaning `staged` (build/make.sh): their calls of operations come by way of functions in
// stages.cpp, which make the call and, if somebody watches the bound rank, leave a stamp behind it. Nobody does: a call costs
// one look at a thread's own variable, and what is recorded is what would be without it.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "device.h"
#include "types.h"

namespace kd {

// What a call must bring from memory and compute. How many rows, keys and experts there are is data; what is said here is what
// each of them takes. Activations stay in a cache and are not counted.
struct Cost {
    double weights = 0;       // bytes, as a checkpoint stores them
    double row_bytes = 0;     // of a table, for each row
    double key_bytes = 0;     // of a cache, for each key that is read
    double expert_bytes = 0;  // for each expert that somebody is sent to
    double row_ops = 0;       // for each row; a product and a sum are two
    double row_key_ops = 0;   // for each row and each key it sees
    int window = 0;           // keys that are read of a stream at most; 0: all
};

struct Call {
    const char* op;
    const void* weights;  // where its first ones are; see weight_names()
    Cost cost;
};

// Stamps of what replay() and loop() do on one rank.
class Stages {
  public:
    static constexpr int kPlays = 64;  // the last plays of a body, of which times are kept

    // With memory of the bound rank for so many stamps, one a call and one a body; a body that needs more than are left is not whole.
    explicit Stages(int stamps);
    ~Stages();
    Stages(const Stages&) = delete;
    Stages& operator=(const Stages&) = delete;

    // The calling thread's operations from now on, or no more. Drops what its rank has recorded: with and without stamps these are
    // different recordings. Nothing of the rank may be under way.
    void watch();
    static void unwatch();

    struct Part {  // one body
        uint64_t key = 0;
        bool whole = true;        // there was room for all of it
        std::vector<Call> calls;  // in order
        std::vector<int> slot;    // [1 + calls] of its stamps: its beginning, then the end of each call
    };
    const std::vector<Part>& parts() const { return parts_; }
    // ns of each play that is kept, the oldest first: [1 + calls], so that the times of the calls add up to that of the body.
    std::vector<std::vector<uint64_t>> times(const Part& part) const;

    // While set: called after each call of route() that is not in a body, with how many rows there were and whom they are sent to,
    // [rows][experts_per_token].
    std::function<void(int rows, Rows h, Dev<int32_t> expert)> routed;

    // stages.cpp's own, around a call
    void before();
    void after(const Call& call);

  private:
    Dev<uint64_t> stamps(int slot) const { return stamps_ + size_t(slot) * (1 + kPlays); }
    bool stamp_next();

    const int slots_;
    Dev<uint64_t> stamps_;  // [slots][1 + kPlays]
    int used_ = 0;
    std::vector<Part> parts_;
    size_t part_ = SIZE_MAX;  // under way
    uint64_t count_ = 0;      // device::Body::count of it
    size_t next_ = 0;         // stamp of it
};

// What lies where: "layers.3.q_b", "draft_layers.0.o", "lm_head".
std::map<const void*, std::string> weight_names(const Model& model);

}  // namespace kd
