// Runs an operation on every rank of a group, in device memory laid out to catch what should not be read or written.
#pragma once

#include <barrier>
#include <bit>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>
#include <vector>

#include "device.h"
#include "error.h"
#include "probe.h"

namespace kd::probe {

constexpr int32_t kWildIndex = 2147480000;  // an index that nobody may follow
// Around values that are read: a signalling NaN. Whatever is computed from it is NaN with other bits, so that writing it back
// does not go unnoticed. Around values that are only written, and in their place: 0xAA.
constexpr uint32_t kSignalling = 0x7FA5DEAD;
constexpr uint16_t kSignallingAct = 0x7FA5;  // of a two-byte Act

// One rank's memory during a probe.
class Rig {
  public:
    // With `aligned`, rows start at multiples of 16 bytes, as a model's mostly do; else nowhere in particular.
    // The numbers of rows it is told could be `more` more. `ready` is for all ranks.
    Rig(int rank, bool aligned, int more, std::barrier<>& ready)
        : rank(rank), aligned_(aligned), more_(more), ready_(ready) {}
    ~Rig();
    Rig(const Rig&) = delete;
    Rig& operator=(const Rig&) = delete;

    const int rank;

    // Rows of Act; the host's floats are rounded to it and results are widened.
    Rows in(const float* host, int n_rows, int width) {
        return rows(const_cast<float*>(host), n_rows, width, true, false);
    }
    Rows out(float* host, int n_rows, int width) { return rows(host, n_rows, width, false, true); }
    Rows inout(float* host, int n_rows, int width) { return rows(host, n_rows, width, true, true); }

    // Rows of fp32 that are only written: row r at p + r * stride.
    struct Floats {
        Dev<float> p;
        int stride;
    };
    Floats out_floats(float* host, int n_rows, int width);

    // Arrays; a null `host` gives a null Dev.
    template <class T>
    Dev<T> in(const T* host, size_t n) {
        return array(const_cast<T*>(host), n, true, false);
    }
    template <class T>
    Dev<T> out(T* host, size_t n) {
        return array(host, n, false, true);
    }
    template <class T>
    Dev<T> inout(T* host, size_t n) {
        return array(host, n, true, true);
    }
    Mat mat(const uint16_t* host, int n, int k) { return {in_const(host, static_cast<size_t>(n) * k), n, k}; }
    template <class T>
    Dev<const T> in_const(const T* host, size_t n) {
        return Dev<const T>(static_cast<const T*>(std::bit_cast<void*>(in(host, n))));
    }
    // The number as the operations of a round get it.
    Count count(int n) {
        if (more_ == 0) return n;
        return device::known({n + more_, in(&n, 1)});
    }
    Rope rope(const kd_probe_rope* r);
    View view(const kd_probe_view* v);

    // Every rank's memory is there; once a rig, before an operation whose ranks wait for one another on the GPU. Allocating may
    // wait for the GPU, so a rank must not wait there for one that still allocates.
    void all_ready() {
        met_ = true;
        ready_.arrive_and_wait();
    }

    // What memory holds now was prepared, not computed: from here on it is what every array started from.
    void settle();

    // After the operation: checks that only results were written and keeps these.
    void finish(const char* name);

    struct Result {
        void* host;
        std::vector<char> bytes;
    };
    std::vector<Result> results;

  private:
    struct Buffer {
        void* device = nullptr;
        void* host = nullptr;                                 // where results go; nullptr: an input
        std::vector<char> image;                              // what was uploaded
        size_t begin = 0, stride = 0, piece = 0, pieces = 0;  // bytes of the values; the rest is guard
        bool act = false;                                     // the host's values are float, the device's Act
    };

    // A row's place among poison, in elements.
    struct Place {
        int offset, stride;
    };
    Place place_of(int width) const;
    std::vector<char> widened(const std::vector<char>& acts) const;

    Rows rows(float* host, int n_rows, int width, bool read, bool written);
    // Puts values in the middle of poison.
    void* place(void* host, size_t begin, size_t stride, size_t piece, size_t pieces, size_t total, const void* poison,
                size_t poison_size, bool read, bool written);

    template <class T>
    Dev<T> array(T* host, size_t n, bool read, bool written) {
        if (!host) return {};
        // Behind the values, what rows that are not there would have.
        const size_t spare = 16 + std::min(n * static_cast<size_t>(more_), size_t{1} << 20);
        std::remove_const_t<T> poison;
        std::memset(static_cast<void*>(&poison), read ? 0xFF : 0xAA, sizeof poison);  // 0xFFFF is NaN in bf16
        if constexpr (std::is_same_v<std::remove_const_t<T>, int32_t>) poison = kWildIndex;
        if constexpr (std::is_same_v<std::remove_const_t<T>, float>) std::memcpy(&poison, &kSignalling, sizeof poison);
        const size_t bytes = n * sizeof(T);
        void* p = place(host, 0, bytes, bytes, 1, bytes + spare * sizeof(T), &poison, sizeof poison, read, written);
        return Dev<T>(static_cast<T*>(p));
    }

    const bool aligned_;
    const int more_;
    std::barrier<>& ready_;
    bool met_ = false;
    std::vector<Buffer> buffers_;
};

// The sentence is what kd_probe_error() gives to this thread from now on. Returns the status.
int32_t remember(const Error& e);

// body(rig) on every rank, then results to the host. Returns a kd_status; kd_probe_error() has the sentence.
int32_t run(const char* name, const kd_probe_device* device, const std::function<void(Rig&)>& body);

}  // namespace kd::probe
