#include "engine/text.h"

#include <algorithm>

#include "error.h"

namespace kd {

TokenBytes::TokenBytes(const uint8_t* bytes, const uint32_t* ends, uint32_t n) {
    if (!ends || n == 0) return;
    uint32_t last = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (ends[i] < last || ends[i] - last > KD_MAX_TOKEN_BYTES)
            fail(KD_E_INVALID,
                 "kd_load_options.token_ends[%u] is %u after %u: ends must rise by at most %d bytes a token", i,
                 ends[i], last, KD_MAX_TOKEN_BYTES);
        last = ends[i];
    }
    if (!bytes && last) fail(KD_E_INVALID, "kd_load_options.token_bytes is NULL although token_ends is not");
    bytes_.assign(reinterpret_cast<const char*>(bytes), last);
    ends_.assign(ends, ends + n);
}

std::string_view TokenBytes::of(int32_t token) const {
    if (token < 0 || size_t(token) >= ends_.size()) return {};
    const uint32_t begin = token ? ends_[token - 1] : 0;
    return std::string_view(bytes_).substr(begin, ends_[token] - begin);
}

namespace {

// How many bytes at the end of `s` begin a UTF-8 character that is not complete yet.
size_t incomplete_tail(std::string_view s) {
    for (size_t back = 1; back <= std::min<size_t>(3, s.size()); back++) {
        const uint8_t c = uint8_t(s[s.size() - back]);
        if ((c & 0xC0) == 0x80) continue;  // a continuation byte: its lead is further back
        const size_t length = c >= 0xF0 && c < 0xF8 ? 4 : c >= 0xE0 ? 3 : c >= 0xC2 ? 2 : 1;
        return c < 0xF8 && length > back ? back : 0;
    }
    return 0;
}

// The longest end of `s` that is a proper beginning of `stop`.
size_t overlap(std::string_view s, std::string_view stop) {
    for (size_t n = std::min(s.size(), stop.size() - 1); n > 0; n--)
        if (s.substr(s.size() - n) == stop.substr(0, n)) return n;
    return 0;
}

}  // namespace

void TextStream::reset(const std::vector<std::string>& stops) {
    stops_ = stops;
    held_.clear();
}

bool TextStream::add(std::string_view bytes, std::string& out) {
    held_ += bytes;
    // The stop string that is complete first ends the text, however many bytes came at once; of those that end together, the
    // longest.
    size_t stop_at = std::string::npos, stop_end = std::string::npos;
    for (const std::string& stop : stops_) {
        const size_t at = held_.find(stop);
        if (at == std::string::npos) continue;
        const size_t end = at + stop.size();
        if (end < stop_end || (end == stop_end && at < stop_at)) stop_at = at, stop_end = end;
    }
    if (stop_at != std::string::npos) {
        out.append(held_, 0, stop_at);
        held_.clear();
        return true;
    }
    size_t hold = incomplete_tail(held_);
    for (const std::string& stop : stops_) hold = std::max(hold, overlap(held_, stop));
    size_t release = held_.size() - hold;
    // What a stop string holds back may itself begin inside a character.
    release -= incomplete_tail(std::string_view(held_).substr(0, release));
    out.append(held_, 0, release);
    held_.erase(0, release);
    return false;
}

void TextStream::finish(std::string& out) {
    out += held_;
    held_.clear();
}

}  // namespace kd
