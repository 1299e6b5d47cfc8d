// What measurements of operations are made with: memory and its contents, the loop, trees as rows.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <random>
#include <vector>

#include "ops.h"
#include "probe_bench.h"
#include "probe_device.h"
#include "probe_rig.h"

namespace kd::probe {

constexpr size_t kPatternBytes = (size_t{4} << 20) + 64;  // no power of two, so that rows differ
constexpr int kQLora = 1536, kKvLora = 512, kRope = 64, kNope = 128;
constexpr int kSmallContext = 1000;  // where it does not matter

inline Shape latent_shape(int heads) {
    Shape s;
    s.heads = s.heads_rank = heads;
    s.q_lora = kQLora;
    s.kv_lora = kKvLora;
    s.rope = kRope;
    s.nope = s.v_head = kNope;
    s.score_scale = 0.07f;
    s.rms_eps_lora = 1e-6f;
    return s;
}

// Memory of a measurement and what it is filled with.
class Room {
  public:
    explicit Room(const kd_bench& b) : b_(b) {}
    ~Room() {
        for (void* p : owned_) device::release(p);
    }
    Room(const Room&) = delete;
    Room& operator=(const Room&) = delete;

    // How many copies of what a call reads.
    int copies(size_t bytes) const {
        const size_t wanted = (static_cast<size_t>(b_.rotate_bytes) + bytes - 1) / std::max<size_t>(bytes, 1);
        return static_cast<int>(std::clamp<size_t>(wanted, 1, static_cast<size_t>(b_.calls)));
    }

    template <class T>
    Dev<T> empty(size_t n) {
        return Dev<T>(static_cast<T*>(memory(n * sizeof(T))));
    }
    template <class T>
    Dev<T> of(const std::vector<T>& values) {
        const Dev<T> to = empty<T>(values.size());
        device::upload(to, values.data(), values.size());
        return to;
    }
    Dev<float> floats(size_t n, float spread = 1) { return random<float>(n, spread); }
    Dev<uint16_t> bf16(size_t n, float spread = 1) { return random<uint16_t>(n, spread); }
    Dev<uint32_t> nibbles(size_t n) { return random<uint32_t>(n, 1); }
    Rows rows(size_t n, int width, float spread = 1) {
        Rows r = device::alloc_rows(n, width);
        owned_.push_back(r.p);
        const size_t values = n * static_cast<size_t>(r.stride);
        if (device::act_bytes() == sizeof(float))
            fill(Dev<float>(static_cast<float*>(r.p)), values, spread);
        else
            fill(Dev<uint16_t>(static_cast<uint16_t*>(r.p)), values, spread);
        return r;
    }
    Rope rope(int positions, int pairs) {
        const size_t n = static_cast<size_t>(positions + KD_MAX_DEPTH) * static_cast<size_t>(pairs);
        return {floats(n), floats(n), pairs};
    }
    Mat mat(int n, int k) { return {bf16(static_cast<size_t>(n) * static_cast<size_t>(k), 0.02f), n, k}; }

  private:
    void* memory(size_t bytes) {
        owned_.push_back(device::alloc(bytes));
        return owned_.back();
    }
    template <class T>
    Dev<T> random(size_t n, float spread) {
        const Dev<T> to = empty<T>(n);
        fill(to, n, spread);
        return to;
    }
    // The same pattern again and again: what is in it does not matter to the time, that it is finite and various does.
    template <class T>
    void fill(Dev<T> to, size_t n, float spread) {
        const std::vector<T>& pattern = pattern_of<T>(spread);
        for (size_t at = 0; at < n; at += pattern.size()) {
            device::upload(to + at, pattern.data(), std::min(pattern.size(), n - at));
        }
    }
    template <class T>
    static const std::vector<T>& pattern_of(float spread) {
        static std::map<float, std::vector<T>> made;
        std::vector<T>& pattern = made[spread];
        if (!pattern.empty()) return pattern;
        pattern.resize(kPatternBytes / sizeof(T));
        std::mt19937 engine(7);
        std::normal_distribution<float> normal(0, spread);
        for (T& value : pattern) {
            if constexpr (std::is_same_v<T, float>) value = normal(engine);
            if constexpr (std::is_same_v<T, uint16_t>)
                value = static_cast<uint16_t>(std::bit_cast<uint32_t>(normal(engine)) >> 16);
            if constexpr (std::is_same_v<T, uint32_t>) value = static_cast<uint32_t>(engine());
        }
        return pattern;
    }

    const kd_bench& b_;
    std::vector<void*> owned_;
};

using Body = std::function<void(int turn)>;

// prepare(room) makes the arrays and returns the call that is measured.
template <class F>
int32_t measure(const char* name, const kd_bench* b, double* us, F&& prepare) {
    const kd_probe_device where{1, b->threads, KD_ISA_AUTO, 1, 0, nullptr};
    return run(name, &where, [&](Rig&) {
        static std::atomic<uint64_t> key{1};
        Room room(*b);
        const Body body = prepare(room);
        const uint64_t own = key++;
        const auto all = [&] {
            for (int turn = 0; turn < b->calls; turn++) body(turn);
        };
        for (int i = 0; i < 2; i++) device::replay(own, all);
        Stopwatch watch;
        for (int i = 0; i < b->plays; i++) {
            watch.start();
            device::replay(own, all);
            us[i] = watch.stop_us() / b->calls;
        }
        device::forget();
    });
}

// Streams with trees of `rows` rows each whose roots are at position `context`; node i hangs below node (i - 1) / 2, so that
// half of the nodes have two children.
struct Forest {
    View view;
    Trees trees;
    std::vector<int32_t> parent, token;  // of one stream
    int pages = 0;                       // of all streams

    Forest(Room& room, int streams, int rows, int context) {
        std::vector<int32_t> position, stream, slot, prefix, table, first{0}, all_parent, all_token, out_row;
        std::vector<uint64_t> mask;
        KD_CHECK(rows <= KD_MAX_NODES + 1);
        const int each = (context + rows + KD_PAGE_TOKENS - 1) / KD_PAGE_TOKENS;
        for (int i = 0; i < rows; i++) {
            parent.push_back(i ? (i - 1) / 2 : -1);
            token.push_back(1000 + i);
        }
        for (int s = 0; s < streams; s++) {
            std::vector<std::vector<uint64_t>> seen(rows, std::vector<uint64_t>(kMaskWords));
            std::vector<int> depth(rows);
            for (int i = 0; i < rows; i++) {
                if (i) seen[i] = seen[parent[i]], depth[i] = depth[parent[i]] + 1;
                seen[i][i / 64] |= uint64_t{1} << (i % 64);
                position.push_back(context + depth[i]);
                stream.push_back(s);
                slot.push_back(context + i);
                prefix.push_back(context);
                all_parent.push_back(parent[i]);
                all_token.push_back(token[i]);
                out_row.push_back(s * rows + i);
                mask.insert(mask.end(), seen[i].begin(), seen[i].end());
            }
            for (int p = 0; p < each; p++) table.push_back(s * each + (p * 7 + 3) % each);
            first.push_back((s + 1) * rows);
        }
        pages = streams * each;
        view.n_rows = view.n_out = streams * rows;
        view.n_streams = streams;
        view.max_pages = each;
        view.token = room.of(all_token);
        view.position = room.of(position);
        view.stream = room.of(stream);
        view.slot = room.of(slot);
        view.prefix = room.of(prefix);
        view.mask = room.of(mask);
        view.page_table = room.of(table);
        view.out_row = room.of(out_row);
        trees = {room.of(first), room.of(all_parent)};
    }

    // The path to the last node that is at depth kept - 1 or less: node, from the root.
    std::vector<int32_t> path(int kept) const {
        std::vector<int32_t> nodes;
        for (int32_t at = static_cast<int32_t>(parent.size()) - 1; at >= 0; at = parent[at]) nodes.push_back(at);
        std::reverse(nodes.begin(), nodes.end());
        nodes.resize(std::min<size_t>(nodes.size(), static_cast<size_t>(kept)));
        return nodes;
    }

    Accepted kept(Room& room, int streams, int n) const {
        const std::vector<int32_t> nodes = path(n);
        std::vector<int32_t> all(static_cast<size_t>(streams) * (KD_MAX_DEPTH + 1), -1);
        for (int s = 0; s < streams; s++) std::copy(nodes.begin(), nodes.end(), &all[s * (KD_MAX_DEPTH + 1)]);
        return {room.of(std::vector<int32_t>(streams, static_cast<int32_t>(nodes.size()))), room.of(all)};
    }
};

// `rows` rows where it matters little whose they are.
inline Forest small_forest(Room& room, int rows) {
    const int each = std::min(rows, 64);
    return Forest(room, rows / each, each, kSmallContext);
}

}  // namespace kd::probe
