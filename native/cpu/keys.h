// Where the KV rows of a stream are.
#pragma once

#include "error.h"
#include "raw.h"

namespace kd::cpu {

// Row `slot` of a stream in a pool [pages * KD_PAGE_TOKENS][...].
inline float* kv_row(Rows pool, const View& v, int stream, int slot) {
    const int32_t* pages = raw(v.page_table) + static_cast<size_t>(stream) * static_cast<size_t>(v.max_pages);
    const size_t row =
        static_cast<size_t>(pages[slot / KD_PAGE_TOKENS]) * KD_PAGE_TOKENS + static_cast<size_t>(slot % KD_PAGE_TOKENS);
    return raw(pool) + row * static_cast<size_t>(pool.stride);
}

// The keys of a row in position order: slots 0 .. prefix - 1, then prefix + j for the set bits j of its mask.
class Keys {
  public:
    // From key `first` on; first <= the row's prefix.
    Keys(Rows pool, const View& v, int row, int first)
        : pool_(pool),
          v_(v),
          stream_(raw(v.stream)[row]),
          prefix_(raw(v.prefix)[row]),
          mask_(raw(v.mask) + static_cast<size_t>(row) * kMaskWords),
          slot_(first) {}

    const float* next() {
        if (slot_ < prefix_) return kv_row(pool_, v_, stream_, slot_++);
        while (word_ < 0 || bits_ == 0) {
            KD_CHECK(word_ + 1 < kMaskWords);  // the mask has fewer bits than the position promises keys
            bits_ = mask_[++word_];
        }
        const int bit = __builtin_ctzll(bits_);
        bits_ &= bits_ - 1;
        return kv_row(pool_, v_, stream_, prefix_ + 64 * word_ + bit);
    }

  private:
    Rows pool_;
    const View& v_;
    int stream_, prefix_;
    const uint64_t* mask_;
    int slot_, word_ = -1;
    uint64_t bits_ = 0;
};

}  // namespace kd::cpu
