// XXH64 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md), streaming. Finds accidents, not attackers.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace kd::model {

class Hash {
  public:
    explicit Hash(uint64_t seed = 0) : lane_{seed + kP1 + kP2, seed + kP2, seed, seed - kP1}, seed_(seed) {}

    void add(const void* data, size_t bytes) {
        const auto* p = static_cast<const uint8_t*>(data);
        total_ += bytes;
        if (held_ != 0) {
            const size_t n = bytes < sizeof hold_ - held_ ? bytes : sizeof hold_ - held_;
            memcpy(hold_ + held_, p, n);
            held_ += n, p += n, bytes -= n;
            if (held_ < sizeof hold_) return;
            stripe(hold_);
            held_ = 0;
        }
        // In registers: a store through lane_ might change *p for all the compiler knows.
        uint64_t a = lane_[0], b = lane_[1], c = lane_[2], d = lane_[3];
        for (; bytes >= sizeof hold_; p += sizeof hold_, bytes -= sizeof hold_) {
            __builtin_prefetch(p + 768);
            a = round(a, word<uint64_t>(p));
            b = round(b, word<uint64_t>(p + 8));
            c = round(c, word<uint64_t>(p + 16));
            d = round(d, word<uint64_t>(p + 24));
        }
        lane_[0] = a, lane_[1] = b, lane_[2] = c, lane_[3] = d;
        if (bytes != 0) memcpy(hold_, p, bytes);
        held_ = bytes;
    }
    void add(std::string_view text) { add(text.data(), text.size()); }

    uint64_t value() const {
        uint64_t h = seed_ + kP5;
        if (total_ >= sizeof hold_) {
            h = std::rotl(lane_[0], 1) + std::rotl(lane_[1], 7) + std::rotl(lane_[2], 12) + std::rotl(lane_[3], 18);
            for (const uint64_t lane : lane_) h = (h ^ round(0, lane)) * kP1 + kP4;
        }
        h += total_;
        size_t i = 0;
        for (; i + 8 <= held_; i += 8) h = std::rotl(h ^ round(0, word<uint64_t>(hold_ + i)), 27) * kP1 + kP4;
        for (; i + 4 <= held_; i += 4) h = std::rotl(h ^ word<uint32_t>(hold_ + i) * kP1, 23) * kP2 + kP3;
        for (; i < held_; ++i) h = std::rotl(h ^ hold_[i] * kP5, 11) * kP1;
        h = (h ^ (h >> 33)) * kP2;
        h = (h ^ (h >> 29)) * kP3;
        return h ^ (h >> 32);
    }

  private:
    static constexpr uint64_t kP1 = 11400714785074694791u, kP2 = 14029467366897019727u, kP3 = 1609587929392839161u,
                              kP4 = 9650029242287828579u, kP5 = 2870177450012600261u;

    template <class T>
    static T word(const uint8_t* p) {
        T v;
        memcpy(&v, p, sizeof v);
        return v;
    }
    static uint64_t round(uint64_t lane, uint64_t input) { return std::rotl(lane + input * kP2, 31) * kP1; }
    void stripe(const uint8_t* p) {
        for (int i = 0; i < 4; ++i) lane_[i] = round(lane_[i], word<uint64_t>(p + 8 * i));
    }

    uint64_t lane_[4];
    uint64_t seed_;
    uint64_t total_ = 0;
    size_t held_ = 0;
    uint8_t hold_[32] = {};
};

static_assert(std::endian::native == std::endian::little, "files and hashes are read as little-endian words");

}  // namespace kd::model
