// The header of a safetensors file: pure, no file system.
//
// A file is: u64 little-endian length n, n bytes of JSON, the data. The JSON is an object: tensor name ->
// {"dtype": "BF16", "shape": [..], "data_offsets": [begin, end]} with offsets into the data, and optionally
// "__metadata__" -> {string: string}. The tensors tile the data: no hole, no overlap, nothing after the last.
// All failures are Error(KD_E_MODEL).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace kd::safetensors {

constexpr uint64_t kPrefixBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr uint64_t kMaxTensors = 1'000'000;        // of one file, and of one index
constexpr uint64_t kMaxNameBytes = 1024;
constexpr int kMaxRank = 8;
constexpr uint64_t kMaxIndexBytes = 256u << 20;
constexpr uint64_t kMaxFiles = 512;  // of one folder: all of them are open during a load

enum class Type { boolean, u8, i8, f8_e4m3, f8_e5m2, i16, u16, f16, bf16, i32, u32, f32, i64, u64, f64 };

const char* type_name(Type type);  // as the format spells it: "BF16"
uint64_t type_bytes(Type type);

struct Tensor {
    std::string name;
    Type type = Type::u8;
    int rank = 0;
    uint64_t shape[kMaxRank] = {};
    uint64_t begin = 0;  // offset in the file
    uint64_t end = 0;

    std::string shape_text() const;  // "[256, 32]"
};

struct Header {
    uint64_t data_begin = 0;      // offset in the file
    std::vector<Tensor> tensors;  // in the file's order
    std::unordered_map<std::string, std::string> metadata;
};

// Bytes of prefix and header together, from the file's first 8 bytes. `where` names the file in sentences.
uint64_t header_bytes(const uint8_t prefix[kPrefixBytes], uint64_t file_bytes, const std::string& where);

// `bytes`: prefix and header, header_bytes() of them.
Header parse(std::string_view bytes, uint64_t file_bytes, const std::string& where);

// model.safetensors.index.json: tensor name -> file name. File names are plain names ending in ".safetensors": no
// folder.
struct Index {
    std::vector<std::string> files;                   // distinct, ascending
    std::unordered_map<std::string, size_t> file_of;  // index into files
};
Index parse_index(std::string_view text, const std::string& where);

}  // namespace kd::safetensors
