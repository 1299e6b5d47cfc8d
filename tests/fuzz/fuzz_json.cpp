// native/model/json: a tree and a skipping cursor accept the same texts.
#include "fuzz.h"
#include "model/json.h"

using kd::json::Value;

static size_t depth_of(const Value& v) {
    size_t deepest = 0;
    for (const Value& e : v.array) deepest = std::max(deepest, depth_of(e));
    for (const auto& [key, e] : v.object) deepest = std::max(deepest, depth_of(e));
    return deepest + (v.kind == kd::json::Kind::array || v.kind == kd::json::Kind::object);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    fuzz_guarded([&] {
        kd::json::Cursor cursor(text, "text");
        cursor.skip();
        cursor.end();
    });
    const std::string skipped = fuzz_outcome;
    fuzz_guarded([&] { FUZZ_CHECK(depth_of(kd::json::parse(text, "text")) <= kd::json::kMaxDepth); });
    FUZZ_CHECK(fuzz_outcome == skipped);
    return 0;
}
