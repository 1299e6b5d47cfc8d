#include "model/fill.h"

#include <atomic>
#include <cstring>

#include "model/hash.h"
#include "model/readers.h"
#include "model/refuse.h"

namespace kd::model {

void pause(const Progress& progress) {
    if (progress.cancelled()) fail(KD_E_CANCELLED, "the load was cancelled");
}

namespace {

// Index of the first element that is NaN or infinite, or n. The exponent is all ones then.
template <class T>
size_t first_wild(const uint8_t* p, size_t n, T exponent) {
    constexpr size_t kBlock = 1024;  // without an early exit the compiler vectorises
    for (size_t begin = 0; begin < n; begin += kBlock) {
        const size_t end = std::min(n, begin + kBlock);
        size_t wild = 0;
        for (size_t i = begin; i < end; ++i) {
            T v;
            memcpy(&v, p + sizeof(T) * i, sizeof v);
            wild += (v & exponent) == exponent;
        }
        for (size_t i = begin; wild != 0 && i < end; ++i) {
            T v;
            memcpy(&v, p + sizeof(T) * i, sizeof v);
            if ((v & exponent) == exponent) return i;
        }
    }
    return n;
}

constexpr uint64_t kAhead = uint64_t{16} << 20;  // what the system is told of at once

// One reader's turn: one tensor.
class Filler {
  public:
    Filler(Loaded& loaded, Progress& progress, const Checkpoint& files, Buffers& buffers, const Stop& stop)
        : loaded_(loaded),
          progress_(progress),
          files_(files),
          chunk_(buffers.chunk()),
          share_(buffers.share()),
          stop_(stop) {}

    // The tensor's hash.
    uint64_t fill(const Place& p) {
        const safetensors::Tensor& t = *p.found->tensor;
        const File& file = *files_.files[p.found->file];
        const uint64_t row_bytes = p.cols * safetensors::type_bytes(t.type);
        const uint64_t rows_a_chunk = std::max<uint64_t>(1, read_bytes() / row_bytes);
        Hash hash;
        hash.add(t.name);
        hash.add(safetensors::type_name(t.type));
        hash.add(t.shape_text());
        for (uint64_t row = 0; row < p.rows; row += rows_a_chunk) {
            pause(progress_);
            if (stop_()) return 0;
            const uint64_t n = std::min(rows_a_chunk, p.rows - row);
            const uint64_t bytes = n * row_bytes;
            const uint64_t at = t.begin + row * row_bytes;
            if (const uint64_t ahead = kAhead / row_bytes / rows_a_chunk * rows_a_chunk; ahead == 0 || row % ahead == 0)
                file.expect(at, std::min<uint64_t>(std::max(kAhead, bytes), t.end - at));
            uint8_t* const lands = place_of(p, row * row_bytes);
            file.read(lands, bytes, at, "tensor '" + t.name + "'");
            hash.add(lands, bytes);
            check(p, lands, row, n);
            if (p.stored != Stored::shape && lands == chunk_)
                for (size_t r = 0; r < loaded_.ranks.size(); ++r) share_out(p, row, n, static_cast<int>(r));
            progress_.bytes_done += bytes;
        }
        return hash.value();
    }

  private:
    struct Part {  // stored rows begin .. end - 1, columns from col on, go to offset `at`
        uint64_t begin, end, at;
    };

    // Where to read what lies so far into the tensor: where it stays, if that is one stretch of memory which the host writes itself.
    uint8_t* place_of(const Place& p, uint64_t begin) const {
        const bool widen = p.stored == Stored::fp32 && p.found->tensor->type == safetensors::Type::bf16;
        if (loaded_.ranks.size() != 1 || p.stored == Stored::shape || widen || p.split == Split::kv_b) return chunk_;
        return static_cast<uint8_t*>(device::landing(loaded_.arena(0) + p.at + begin, chunk_));
    }

    void check(const Place& p, const uint8_t* read, uint64_t row, uint64_t n) const {
        const safetensors::Tensor& t = *p.found->tensor;
        const std::string& path = files_.files[p.found->file]->path;
        const std::string name = "tensor '" + printable(t.name, 200) + "' ";
        if (p.stored == Stored::shape) {
            int64_t stored[2];
            for (int i = 0; i < 2; ++i) {
                int32_t narrow;
                if (t.type == safetensors::Type::i64) {
                    memcpy(&stored[i], read + 8 * i, 8);
                } else {
                    memcpy(&narrow, read + 4 * i, 4);
                    stored[i] = narrow;
                }
            }
            if (stored[0] != static_cast<int64_t>(p.want_out) || stored[1] != static_cast<int64_t>(p.want_in))
                refuse(path, name + "holds [" + std::to_string(stored[0]) + ", " + std::to_string(stored[1]) +
                                 "], the packed tensor beside it is for [" + std::to_string(p.want_out) + ", " +
                                 std::to_string(p.want_in) + "]; the file is damaged, fetch it again");
            return;
        }
        if (p.stored == Stored::packed) return;  // every bit pattern is a weight
        const size_t count = static_cast<size_t>(n * p.cols);
        const bool wide = t.type == safetensors::Type::f32;
        const size_t wild =
            wide ? first_wild<uint32_t>(read, count, 0x7f800000) : first_wild<uint16_t>(read, count, 0x7f80);
        if (wild != count)
            refuse(path, name + "holds a NaN or infinity at element " + std::to_string(row * p.cols + wild) +
                             "; the file is damaged, fetch it again");
    }

    std::vector<Part> parts(const Place& p, const Shape& s) const {
        const auto tp = static_cast<uint64_t>(s.tp), rank = static_cast<uint64_t>(s.rank);
        switch (p.split) {
            case Split::whole:
            case Split::cols: return {{0, p.rows, p.at}};
            case Split::rows: return {{rank * (p.rows / tp), (rank + 1) * (p.rows / tp), p.at}};
            case Split::vocab: {
                const auto begin = static_cast<uint64_t>(s.vocab_begin);
                return {{begin, begin + static_cast<uint64_t>(s.vocab_rank), p.at}};
            }
            case Split::kv_b: break;
        }
        std::vector<Part> parts;
        const auto nope = static_cast<uint64_t>(s.nope), v_head = static_cast<uint64_t>(s.v_head);
        const uint64_t row_bytes = p.cols * 2;
        for (uint64_t i = 0; i < static_cast<uint64_t>(s.heads_rank); ++i) {
            const uint64_t first = (rank * static_cast<uint64_t>(s.heads_rank) + i) * (nope + v_head);
            parts.push_back({first, first + nope, p.at + i * nope * row_bytes});
            parts.push_back({first + nope, first + nope + v_head, p.at_v + i * v_head * row_bytes});
        }
        return parts;
    }

    // The chunk holds rows row .. row + n - 1 of the tensor: give a rank its share.
    void share_out(const Place& p, uint64_t row, uint64_t n, int rank) {
        const Shape& s = loaded_.ranks[static_cast<size_t>(rank)].shape;
        const safetensors::Type type = p.found->tensor->type;
        const uint64_t element = safetensors::type_bytes(type);
        const bool widen = p.stored == Stored::fp32 && type == safetensors::Type::bf16;
        const uint64_t tp = p.split == Split::cols ? static_cast<uint64_t>(s.tp) : 1;
        const uint64_t cols = p.cols / tp, first_col = tp == 1 ? 0 : cols * static_cast<uint64_t>(rank);
        const uint64_t to_row_bytes = cols * (widen ? 4 : element);
        bool bound = false;
        for (const Part& part : parts(p, s)) {
            const uint64_t begin = std::max(part.begin, row), end = std::min(part.end, row + n);
            if (begin >= end) continue;
            const uint8_t* from = chunk_ + ((begin - row) * p.cols + first_col) * element;
            const uint64_t count = end - begin;
            if (tp != 1 || widen) {
                gather(share_, from, count, cols, p.cols, element, widen);
                from = share_;
            }
            if (!bound) device::bind(device::context(loaded_.group(), rank));
            bound = true;
            device::upload(loaded_.arena(rank) + part.at + (begin - part.begin) * to_row_bytes, from,
                           count * to_row_bytes);
        }
        if (bound) device::settle();  // the buffers are filled again
    }

    static void gather(uint8_t* to, const uint8_t* from, uint64_t rows, uint64_t cols, uint64_t stride,
                       uint64_t element, bool widen) {
        for (uint64_t i = 0; i < rows; ++i) {
            const uint8_t* line = from + i * stride * element;
            if (!widen) {
                memcpy(to, line, cols * element);
                to += cols * element;
                continue;
            }
            for (uint64_t j = 0; j < cols; ++j, to += 4) {
                uint16_t narrow;
                memcpy(&narrow, line + 2 * j, 2);
                const uint32_t wide = static_cast<uint32_t>(narrow) << 16;  // bf16 is the upper half of a float
                memcpy(to, &wide, 4);
            }
        }
    }

    Loaded& loaded_;
    Progress& progress_;
    const Checkpoint& files_;
    uint8_t* const chunk_;
    uint8_t* const share_;
    const Stop& stop_;
};

}  // namespace

uint64_t fill(Loaded& loaded, Progress& progress, const Checkpoint& files, const Plan& plan) {
    std::atomic<uint64_t> sum{0};
    read_parallel(plan.places.size(), reader_count(plan.read_bytes), device::context(loaded.group(), 0),
                  [&](size_t job, Buffers& buffers, const Stop& stop) {
                      sum += Filler(loaded, progress, files, buffers, stop).fill(plan.places[job]);
                  });
    return sum;
}

}  // namespace kd::model
