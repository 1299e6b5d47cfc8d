// XXH3, 64 bits, seed 0 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md), streaming. Finds accidents, not attackers.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kd::model {

class Hash {
  public:
    Hash();
    void add(const void* data, size_t bytes);
    void add(std::string_view text) { add(text.data(), text.size()); }
    uint64_t value() const;  // of what was added so far

  private:
    static constexpr size_t kLanes = 8, kHold = 256;

    void stripes(const uint8_t* p, size_t n);

    uint64_t lane_[kLanes];
    size_t stripe_ = 0;  // next one's place in its block
    uint64_t total_ = 0;
    // What no stripe was made of yet: once there is more than fits, 1 .. kHold bytes. The last 64 bytes that stripes were made of
    // stay at the end, where up to 192 bytes held leave them.
    size_t held_ = 0;
    uint8_t hold_[kHold] = {};
};

static_assert(std::endian::native == std::endian::little, "files and hashes are read as little-endian words");

}  // namespace kd::model
