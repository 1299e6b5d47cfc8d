// Sentences about files: whatever names and values come from a file, the sentence is printable UTF-8.
#pragma once

#include <string>
#include <string_view>

#include "error.h"

namespace kd::model {

// `text` with everything that is no printable UTF-8 replaced by '?', at most `max_bytes` of it.
inline std::string printable(std::string_view text, size_t max_bytes) {
    std::string out;
    for (size_t i = 0; i < text.size();) {
        const auto lead = static_cast<unsigned char>(text[i]);
        const size_t n = lead < 0x80 ? 1 : lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
        bool good = n != 0 && i + n <= text.size() && lead >= 0x20 && lead != 0x7f;
        for (size_t j = 1; good && j < n; ++j) good = (static_cast<unsigned char>(text[i + j]) & 0xc0) == 0x80;
        const std::string_view piece = good ? text.substr(i, n) : std::string_view("?");
        if (out.size() + piece.size() + 3 > max_bytes) return out + "...";
        out += piece;
        i += good ? n : 1;
    }
    return out;
}

// KD_E_MODEL: "<where>: <what>".
[[noreturn]] inline void refuse(std::string_view where, std::string_view what) {
    fail(KD_E_MODEL, "%s: %s", printable(where, 300).c_str(), printable(what, 600).c_str());
}

}  // namespace kd::model
