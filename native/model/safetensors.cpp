#include "model/safetensors.h"

#include <algorithm>
#include <map>

#include "model/json.h"
#include "model/refuse.h"

namespace kd::safetensors {

using model::refuse;

namespace {

struct TypeRow {
    const char* name;
    Type type;
    uint64_t bytes;
};
constexpr TypeRow kTypes[] = {
    {"BOOL", Type::boolean, 1},    {"U8", Type::u8, 1},   {"I8", Type::i8, 1},   {"F8_E4M3", Type::f8_e4m3, 1},
    {"F8_E5M2", Type::f8_e5m2, 1}, {"I16", Type::i16, 2}, {"U16", Type::u16, 2}, {"F16", Type::f16, 2},
    {"BF16", Type::bf16, 2},       {"I32", Type::i32, 4}, {"U32", Type::u32, 4}, {"F32", Type::f32, 4},
    {"I64", Type::i64, 8},         {"U64", Type::u64, 8}, {"F64", Type::f64, 8},
};

const TypeRow& row(Type type) {
    for (const TypeRow& r : kTypes)
        if (r.type == type) return r;
    fail(KD_E_FATAL, "broken invariant: element type %d has no row in the table", static_cast<int>(type));
}

bool has_control(std::string_view name) {  // names go into sentences and logs
    return std::any_of(name.begin(), name.end(), [](char c) { return (c >= 0 && c < 0x20) || c == 0x7f; });
}

[[noreturn]] void bad(const std::string& where, const std::string& tensor, const char* what) {
    refuse(where, "tensor '" + model::printable(tensor, 200) + "' " + what + "; the file is damaged, fetch it again");
}

Type read_type(json::Cursor& in, const std::string& tensor) {
    const size_t at = in.offset();
    const std::string name = in.string();
    for (const TypeRow& r : kTypes)
        if (name == r.name) return r.type;
    in.error(at, "tensor '" + tensor.substr(0, 200) + "' has the unknown dtype '" + name.substr(0, 32) + "'");
}

uint64_t read_count(json::Cursor& in, const std::string& where, const std::string& tensor, const char* what) {
    const int64_t n = in.integer();
    if (n < 0) bad(where, tensor, what);
    return static_cast<uint64_t>(n);
}

// Offsets are relative to the data here; parse() moves them.
Tensor read_tensor(json::Cursor& in, const std::string& name, const std::string& where) {
    if (name.empty() || name.size() > kMaxNameBytes)
        refuse(where, "a tensor name has " + std::to_string(name.size()) + " bytes, 1 to " +
                          std::to_string(kMaxNameBytes) + " are allowed; the file is damaged, fetch it again");
    if (has_control(name)) bad(where, name, "has a control character in its name");
    Tensor t;
    t.name = name;
    bool has_type = false, has_shape = false, has_offsets = false;
    in.object([&](const std::string& key) {
        if (key == "dtype") {
            t.type = read_type(in, name);
            has_type = true;
        } else if (key == "shape") {
            in.array([&] {
                if (t.rank == kMaxRank) bad(where, name, "has more than 8 dimensions");
                t.shape[t.rank++] = read_count(in, where, name, "has a negative dimension");
            });
            has_shape = true;
        } else if (key == "data_offsets") {
            int n = 0;
            in.array([&] {
                const uint64_t at = read_count(in, where, name, "has a negative offset");
                if (n == 2) bad(where, name, "has more than two data_offsets");
                (n++ == 0 ? t.begin : t.end) = at;
            });
            if (n != 2) bad(where, name, "has fewer than two data_offsets");
            has_offsets = true;
        } else {
            in.error(in.offset(),
                     "tensor '" + name.substr(0, 200) + "' has the unknown key '" + key.substr(0, 64) + "'");
        }
    });
    if (!has_type) bad(where, name, "has no dtype");
    if (!has_shape) bad(where, name, "has no shape");
    if (!has_offsets) bad(where, name, "has no data_offsets");
    if (t.begin > t.end) bad(where, name, "ends before it begins");
    uint64_t bytes = type_bytes(t.type);
    for (int i = 0; i < t.rank; ++i)
        if (__builtin_mul_overflow(bytes, t.shape[i], &bytes)) bad(where, name, "has a shape that overflows 64 bits");
    if (bytes != t.end - t.begin) bad(where, name, "has data_offsets that do not match its shape and dtype");
    return t;
}

}  // namespace

const char* type_name(Type type) { return row(type).name; }
uint64_t type_bytes(Type type) { return row(type).bytes; }

std::string Tensor::shape_text() const {
    std::string s = "[";
    for (int i = 0; i < rank; ++i) s += (i ? ", " : "") + std::to_string(shape[i]);
    return s + "]";
}

uint64_t header_bytes(const uint8_t prefix[kPrefixBytes], uint64_t file_bytes, const std::string& where) {
    uint64_t n = 0;
    for (int i = 0; i < 8; ++i) n |= static_cast<uint64_t>(prefix[i]) << (8 * i);
    if (file_bytes < kPrefixBytes || n > file_bytes - kPrefixBytes)
        refuse(where, "its header should have " + std::to_string(n) + " bytes, the file has " +
                          std::to_string(file_bytes) + "; it is truncated or no safetensors file, fetch it again");
    if (n > kMaxHeaderBytes || n < 2)
        refuse(where, "its header should have " + std::to_string(n) + " bytes, 2 to " +
                          std::to_string(kMaxHeaderBytes) + " are allowed; this is no safetensors file");
    return n + kPrefixBytes;
}

Header parse(std::string_view bytes, uint64_t file_bytes, const std::string& where) {
    Header h;
    h.data_begin = bytes.size();
    const std::string_view text = bytes.substr(kPrefixBytes);
    if (text[0] != '{') refuse(where, "its header does not start with '{'; this is no safetensors file");

    json::Cursor in(text, where + " (header)");
    in.object([&](const std::string& name) {
        if (name == "__metadata__") {
            in.object([&](const std::string& key) { h.metadata[key] = in.string(); });
            return;
        }
        if (h.tensors.size() == kMaxTensors)
            refuse(where, "more than " + std::to_string(kMaxTensors) + " tensors in one file");
        h.tensors.push_back(read_tensor(in, name, where));
    });
    in.end();

    std::sort(h.tensors.begin(), h.tensors.end(), [](const Tensor& a, const Tensor& b) {
        return a.begin != b.begin ? a.begin < b.begin : a.end != b.end ? a.end < b.end : a.name < b.name;
    });
    const uint64_t data_bytes = file_bytes - h.data_begin;
    uint64_t next = 0;
    for (Tensor& t : h.tensors) {
        if (t.begin < next) bad(where, t.name, "overlaps another");
        if (t.begin > next) bad(where, t.name, "has a hole before it");
        if (t.end > data_bytes)
            refuse(where, "the file is truncated: tensor '" + model::printable(t.name, 200) + "' ends at byte " +
                              std::to_string(h.data_begin + t.end) + ", the file has " + std::to_string(file_bytes) +
                              "; fetch it again");
        next = t.end;
        t.begin += h.data_begin;
        t.end += h.data_begin;
    }
    if (next != data_bytes)
        refuse(where, std::to_string(data_bytes - next) +
                          " bytes follow the last tensor; the file is damaged, fetch it "
                          "again");
    return h;
}

static bool plain_name(const std::string& file) {
    static constexpr std::string_view kSuffix = ".safetensors";
    return file.size() > kSuffix.size() && file.size() <= 255 && file.ends_with(kSuffix) && file[0] != '.' &&
           file.find('/') == std::string::npos && file.find('\\') == std::string::npos && !has_control(file);
}

Index parse_index(std::string_view text, const std::string& where) {
    std::vector<std::pair<std::string, std::string>> entries;
    std::map<std::string, size_t> files;
    bool has_map = false;
    json::Cursor in(text, where);
    in.object([&](const std::string& key) {
        if (key != "weight_map") return in.skip();
        has_map = true;
        in.object([&](const std::string& name) {
            std::string file = in.string();
            if (!plain_name(file))
                refuse(where, "tensor '" + model::printable(name, 200) + "' is said to be in '" +
                                  model::printable(file, 100) +
                                  "'; only plain names of .safetensors files in the same "
                                  "folder are allowed");
            if (entries.size() == kMaxTensors)
                refuse(where, "more than " + std::to_string(kMaxTensors) + " tensors in one index");
            files[file] = 0;
            if (files.size() > kMaxFiles)
                refuse(where, "more than " + std::to_string(kMaxFiles) + " files in one index");
            entries.emplace_back(name, std::move(file));
        });
    });
    in.end();
    if (!has_map || entries.empty()) refuse(where, "no weight_map in it, or an empty one; fetch the file again");

    Index index;
    for (auto& [file, number] : files) {
        number = index.files.size();
        index.files.push_back(file);
    }
    for (const auto& [name, file] : entries) index.file_of.emplace(name, files.at(file));
    return index;
}

}  // namespace kd::safetensors
