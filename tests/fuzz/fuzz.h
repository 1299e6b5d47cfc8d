// What the harnesses share. Each is a libFuzzer target; driver.cpp stands in for libFuzzer where there is none.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "error.h"

// How the last input ended: driver.cpp keeps inputs that ended in a new way.
inline std::string fuzz_outcome;

#define FUZZ_CHECK(e)                                                               \
    do {                                                                            \
        if (!(e)) {                                                                 \
            fprintf(stderr, "%s:%d: `%s` does not hold\n", __FILE__, __LINE__, #e); \
            std::abort();                                                           \
        }                                                                           \
    } while (0)

// Nothing but an Error of this status, with a printable sentence of sensible length, may come out of a parser.
template <class F>
void fuzz_guarded(F&& body, std::initializer_list<int> statuses = {KD_E_MODEL}) {
    fuzz_outcome = "accepted";
    try {
        body();
    } catch (const kd::Error& e) {
        bool known = false;
        for (const int status : statuses) known = known || e.status == status;
        FUZZ_CHECK(known);
        fuzz_outcome = e.what();
        FUZZ_CHECK(fuzz_outcome.size() > 10 && fuzz_outcome.size() < 1000);
        for (const char c : fuzz_outcome) FUZZ_CHECK(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f);
    }
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
