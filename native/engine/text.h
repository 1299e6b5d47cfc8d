// From tokens to text that may be shown: stop strings, and cuts at UTF-8 boundaries.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kd {

// The bytes of every token of the vocabulary.
class TokenBytes {
  public:
    TokenBytes() = default;
    // `ends[i]`: end of token i in `bytes`. Throws Error(KD_E_INVALID) if they do not rise or a token is too long.
    TokenBytes(const uint8_t* bytes, const uint32_t* ends, uint32_t n);
    bool empty() const { return ends_.empty(); }
    std::string_view of(int32_t token) const;

  private:
    std::string bytes_;
    std::vector<uint32_t> ends_;
};

// The text of one request. Bytes are held back while they could still become part of a stop string or are an incomplete
// UTF-8 character; everything else is released at once.
class TextStream {
  public:
    void reset(const std::vector<std::string>& stops);

    // Add one token's bytes. Releases what became certain to `out`. True if a stop string is complete: it and all after
    // it are dropped, and what stood before it is released.
    bool add(std::string_view bytes, std::string& out);

    // The end without a stop string: release everything held.
    void finish(std::string& out);

  private:
    std::vector<std::string> stops_;
    std::string held_;
};

}  // namespace kd
