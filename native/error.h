// How native code fails: an Error carries a kd_status and one sentence (what, where, what to do).
#pragma once

#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "kd.h"

namespace kd {

struct Error : std::runtime_error {
    int status;
    Error(int status, const std::string& sentence) : std::runtime_error(sentence), status(status) {}
};

[[noreturn]] __attribute__((format(printf, 2, 3))) inline void fail(int status, const char* format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    throw Error(status, text);
}

// For broken invariants of our own, never for input: latches the engine (KD_E_FATAL).
#define KD_CHECK(e)                                                                                 \
    do {                                                                                            \
        if (!(e)) ::kd::fail(KD_E_FATAL, "broken invariant `%s` at %s:%d", #e, __FILE__, __LINE__); \
    } while (0)

}  // namespace kd
