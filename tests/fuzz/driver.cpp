// Stands in for libFuzzer:  <target> SECONDS SEED FILE...   mutates the files, and every input that ended in a new way.
// No coverage is measured; the sentence of a refusal, digits and names taken out, says which guard an input reached.
#include <chrono>
#include <fstream>
#include <iterator>
#include <random>
#include <set>
#include <vector>

#include "fuzz.h"

namespace {

constexpr size_t kMaxInput = 1 << 16, kMaxCorpus = 4096;
constexpr std::string_view kTokens[] = {
    "0",
    "1",
    "-1",
    "2",
    "31",
    "32",
    "255",
    "1e999",
    "1e-300",
    "0.5",
    "2147483647",
    "2147483648",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "-9223372036854775808",
    "null",
    "true",
    "false",
    "\"\"",
    "[]",
    "{}",
    "[[]]",
    "{\"a\":1}",
    ",",
    ":",
    "\"",
    "\\",
    "\\u0000",
    "\\ud800",
    "\\ud83d\\ude00",
    "\xc0\xaf",
    "\xed\xa0\x80",
    "\xf4\x90\x80\x80",
    "[[[[[[[[[[[[[[[[",
    "\"type\":\"yarn\"",
    "\"BF16\"",
    "\"F64\"",
    "\"data_offsets\"",
    "\"shape\"",
    "\"../x.safetensors\"",
    "\"x.safetensors\"",
    "\"sliding_attention\"",
    "\"attn_bias\":true",
    "\"rope_parameters\"",
    "\"__metadata__\":{},",
};

std::mt19937_64 engine;
size_t below(size_t n) { return n == 0 ? 0 : engine() % n; }

bool is_number(char c) { return (c >= '0' && c <= '9') || c == '-' || c == '.'; }

void mutate(std::string& s, const std::vector<std::string>& corpus) {
    const size_t at = below(s.size() + 1), n = std::min(s.size() - at, below(below(64) + 1) + 1);
    switch (below(9)) {
        case 0:
            if (at < s.size()) s[at] = static_cast<char>(s[at] ^ (1 << below(8)));
            break;
        case 1:
            if (at < s.size()) s[at] = static_cast<char>(engine());
            break;
        case 2: s.erase(at, n); break;
        case 3: s.insert(below(s.size() + 1), s.substr(at, n)); break;
        case 4: s.insert(at, kTokens[below(std::size(kTokens))]); break;
        case 5:
        case 6: {  // a number becomes another
            size_t begin = at;
            while (begin < s.size() && !is_number(s[begin])) ++begin;
            size_t end = begin;
            while (end < s.size() && is_number(s[end])) ++end;
            if (begin < end) s.replace(begin, end - begin, kTokens[below(std::size(kTokens))]);
            break;
        }
        case 7: {  // a value becomes another
            const size_t colon = s.find(':', at), end = s.find_first_of(",}", colon);
            if (end != std::string::npos) s.replace(colon + 1, end - colon - 1, kTokens[below(std::size(kTokens))]);
            break;
        }
        case 8: {  // the rest comes from elsewhere
            const std::string& other = corpus[below(corpus.size())];
            s = s.substr(0, at) + other.substr(std::min(other.size(), at));
            break;
        }
    }
    if (s.size() > kMaxInput) s.resize(kMaxInput);
}

std::string kind_of(const std::string& outcome) {
    std::string kind;
    bool quoted = false;
    for (const char c : outcome) {
        if (c == '\'' || c == '"')
            quoted = !quoted;
        else if (!quoted && !(c >= '0' && c <= '9'))
            kind += c;
    }
    return kind;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 4) {
        fprintf(stderr, "usage: %s SECONDS SEED FILE...\n", argv[0]);
        return 64;
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(atof(argv[1]));
    engine.seed(strtoull(argv[2], nullptr, 10));
    std::vector<std::string> corpus;
    for (int i = 3; i < argc; ++i) {
        std::ifstream file(argv[i], std::ios::binary);
        corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    std::set<std::string> kinds;
    const auto run = [&](const std::string& s) {
        // a copy of exactly this size on the heap: the sanitizer sees a read past its end
        const std::vector<uint8_t> exact(s.begin(), s.end());
        LLVMFuzzerTestOneInput(exact.data(), exact.size());
        return kinds.insert(kind_of(fuzz_outcome)).second;
    };
    size_t accepted = 0, runs = 0;
    for (const std::string& s : corpus) {
        run(s);
        accepted += fuzz_outcome == "accepted";
    }
    printf("%zu of %zu seeds accepted", accepted, corpus.size());
    for (; std::chrono::steady_clock::now() < end; ++runs) {
        std::string s = corpus[below(corpus.size())];
        for (size_t n = 1 + below(4); n != 0; --n) mutate(s, corpus);
        if (run(s) && corpus.size() < kMaxCorpus) corpus.push_back(s);
    }
    printf(", %zu runs, %zu ways to end\n", runs, kinds.size());
    return accepted == 0;
}
