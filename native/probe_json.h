// How probes answer: a status and a sentence, figures as JSON.
#pragma once

#include <cstdio>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "error.h"
#include "probe_rig.h"

namespace kd::probe {

// The status of body(); kd_probe_error() has the sentence.
template <class F>
int32_t guarded(F&& body) {
    try {
        body();
        return KD_OK;
    } catch (const Error& e) {
        return remember(e);
    } catch (const std::exception& e) {
        return remember(Error(KD_E_FATAL, e.what()));
    }
}

class Json {
  public:
    Json& put(const char* name, double value) {
        char text[64];
        snprintf(text, sizeof text, "%.17g", value);
        return raw(name, text);
    }
    Json& put(const char* name, const std::string& value) { return raw(name, "\"" + value + "\""); }
    Json& raw(const char* name, const std::string& value) {
        text_ += (text_.empty() ? "\"" : ", \"") + std::string(name) + "\": " + value;
        return *this;
    }
    std::string text() const { return "{" + text_ + "}"; }

  private:
    std::string text_;
};

template <class T>
std::string list(const std::vector<T>& items) {
    std::string text;
    for (const T& item : items) {
        if constexpr (std::is_same_v<T, std::string>)
            text += (text.empty() ? "" : ", ") + item;
        else
            text += (text.empty() ? "" : ", ") + std::to_string(item);
    }
    return "[" + text + "]";
}

inline void give(char* json, uint64_t capacity, const std::string& text) {
    if (text.size() + 1 > capacity) fail(KD_E_SIZE, "the buffer is too small for %zu bytes", text.size() + 1);
    memcpy(json, text.c_str(), text.size() + 1);
}

}  // namespace kd::probe
