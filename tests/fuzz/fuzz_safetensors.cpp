// native/model/safetensors: whatever is accepted tiles the file with tensors whose shapes and sizes agree.
//
// Input: a byte that says what follows; a file's first bytes (the length is put right for every other value of that
// byte, or nearly nothing would get past it), or an index.
#include <cstring>

#include "fuzz.h"
#include "model/safetensors.h"

namespace st = kd::safetensors;

static void check_header(std::string bytes, uint64_t data_bytes) {
    uint8_t prefix[st::kPrefixBytes];
    memcpy(prefix, bytes.data(), sizeof prefix);
    const uint64_t file_bytes = bytes.size() + data_bytes;
    const uint64_t n = st::header_bytes(prefix, file_bytes, "file");
    FUZZ_CHECK(n >= st::kPrefixBytes + 2 && n <= file_bytes);
    if (n > bytes.size()) return;
    const st::Header h = st::parse(std::string_view(bytes).substr(0, n), file_bytes, "file");
    uint64_t next = n;
    for (const st::Tensor& t : h.tensors) {
        FUZZ_CHECK(t.begin == next && t.end >= t.begin && t.rank >= 0 && t.rank <= st::kMaxRank);
        uint64_t size = st::type_bytes(t.type);
        for (int i = 0; i < t.rank; ++i) FUZZ_CHECK(!__builtin_mul_overflow(size, t.shape[i], &size));
        FUZZ_CHECK(size == t.end - t.begin && !t.name.empty() && t.name.size() <= st::kMaxNameBytes);
        next = t.end;
    }
    FUZZ_CHECK(next == file_bytes);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size < 1 + st::kPrefixBytes) return 0;
    const uint8_t how = data[0];
    std::string bytes(reinterpret_cast<const char*>(data + 1), size - 1);
    if (how & 2) {
        fuzz_guarded([&] {
            const st::Index index = st::parse_index(bytes, "index");
            FUZZ_CHECK(!index.files.empty() && index.files.size() <= st::kMaxFiles);
            for (const auto& [name, file] : index.file_of) FUZZ_CHECK(file < index.files.size());
            for (const std::string& file : index.files)
                FUZZ_CHECK(file.find('/') == std::string::npos && file[0] != '.' && file.ends_with(".safetensors"));
        });
        return 0;
    }
    uint64_t data_bytes = 0;
    if (how & 1) {
        const uint64_t n = bytes.size() - st::kPrefixBytes;
        memcpy(bytes.data(), &n, sizeof n);
        data_bytes = 18;  // of the seeds
    }
    fuzz_guarded([&] { check_header(bytes, data_bytes); });
    return 0;
}
