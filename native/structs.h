// The rule of kd.h for structs that cross the C boundary, in one place: `size` says how much the caller has; what is missing is
// zero, what this library does not know must be zero, and a number that cannot be a size is refused before anything behind
// the struct is read.
#pragma once

#include <algorithm>
#include <cstring>

#include "error.h"

namespace kd {

constexpr uint32_t kMaxStruct = 4096;  // bytes; a larger `size` is no size

template <class T>
T& required(T* p, const char* name) {
    if (!p) fail(KD_E_INVALID, "%s is NULL", name);
    return *p;
}

template <class T>
void check_size(const T* s, const char* name) {
    const uint32_t size = required(s, name).size;
    if (size < sizeof(T) || size > kMaxStruct)
        fail(KD_E_SIZE, "%s.size is %u: set it to sizeof(%s), %zu here", name, size, name, sizeof(T));
}

// Checks an input struct and leaves it where it is.
template <class T>
void check_input(const T* s, const char* name) {
    check_size(s, name);
    const char* bytes = reinterpret_cast<const char*>(s);
    for (uint32_t i = sizeof(T); i < s->size; i++)
        if (bytes[i])
            fail(KD_E_TOO_NEW, "%s has a field at byte %u that this library (ABI %d) does not know", name, i,
                 KD_ABI_VERSION);
    if constexpr (requires { s->reserved0; })
        if (s->reserved0) fail(KD_E_TOO_NEW, "%s.reserved0 is %u: zero it", name, unsigned(s->reserved0));
}

template <class T>
T read_struct(const T* from, const char* name) {
    check_input(from, name);
    T value{};
    memcpy(&value, from, sizeof(T));
    return value;
}

template <class T>
void write_struct(T* to, T value, const char* name) {
    check_size(to, name);
    value.size = to->size;
    memset(reinterpret_cast<char*>(to) + sizeof(T), 0, value.size - sizeof(T));
    memcpy(to, &value, sizeof(T));
}

}  // namespace kd
