#include "self_check.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "device.h"
#include "error.h"
#include "ops.h"

namespace kd {
namespace {

// What bf16 sums in another order may be off by: of the typical value, and of the value itself.
constexpr double kOfTypical = 0.03, kOfValue = 0.01;

uint16_t bf16(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
float widened(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// Memory of one check, and the numbers in it. All numbers are those of bf16, so that every backend is given the same.
class Bench {
  public:
    Bench(const char* device_name, const char* spoil) : device_(device_name), spoil_(spoil) {}
    ~Bench() {
        for (void* p : owned_) device::release(p);
    }
    Bench(const Bench&) = delete;
    Bench& operator=(const Bench&) = delete;

    uint32_t bits() { return state_ = state_ * 1664525u + 1013904223u; }
    std::vector<float> numbers(size_t n, float scale = 1) {
        std::vector<float> v(n);
        for (float& x : v) x = widened(bf16(scale * (static_cast<float>(bits() >> 8) / 8388608.0f - 1)));
        return v;
    }

    // Rows that start at multiples of 16 bytes, or, with offset 3, that do not.
    Rows rows(const std::vector<float>& v, int n, int offset = 0) {
        const int width = static_cast<int>(v.size()) / n;
        const Rows r = device::alloc_rows(static_cast<size_t>(n), width + offset);
        owned_.push_back(r.p);
        const size_t size = device::act_bytes(), stride = static_cast<size_t>(r.stride);
        std::vector<char> image(static_cast<size_t>(n) * stride * size);
        for (int i = 0; i < n; i++)
            for (int j = 0; j < width; j++)
                put(&image[(static_cast<size_t>(i) * stride + static_cast<size_t>(offset + j)) * size],
                    v[static_cast<size_t>(i) * static_cast<size_t>(width) + static_cast<size_t>(j)]);
        device::upload(r.p, image.data(), image.size());
        return r.from(offset);
    }
    std::vector<float> values(Rows r, int n, int width) {
        const size_t size = device::act_bytes(), stride = static_cast<size_t>(r.stride);
        std::vector<char> image(static_cast<size_t>(n) * stride * size);
        device::download(image.data(), r.p, image.size());
        std::vector<float> v;
        for (int i = 0; i < n; i++)
            for (int j = 0; j < width; j++)
                v.push_back(get(&image[(static_cast<size_t>(i) * stride + static_cast<size_t>(r.offset + j)) * size]));
        return v;
    }
    template <class T>
    Dev<T> array(const std::vector<T>& v) {
        const Dev<T> d = device::alloc_array<T>(v.size());
        owned_.push_back(std::bit_cast<void*>(d));
        device::upload(d, v.data(), v.size());
        return d;
    }
    Mat mat(const std::vector<float>& v, int n) {
        std::vector<uint16_t> narrow;
        for (const float x : v) narrow.push_back(bf16(x));
        return {array(narrow), n, static_cast<int>(v.size()) / n};
    }
    // Rows of one stream that see all before them, at these positions.
    View view(const std::vector<int32_t>& position, const std::vector<int32_t>& prefix, int pages) {
        const int n = static_cast<int>(position.size());
        std::vector<int32_t> table, zero(position.size());
        std::vector<uint64_t> mask(position.size() * kMaskWords);
        for (int i = 0; i < pages; i++) table.push_back(pages - 1 - i);
        for (int i = 0; i < n; i++) mask[static_cast<size_t>(i) * kMaskWords] = 1;
        View v;
        v.n_rows = n;
        v.n_streams = 1;
        v.max_pages = pages;
        v.token = v.stream = array(zero);
        v.position = v.slot = array(position);
        v.prefix = array(prefix);
        v.mask = array(mask);
        v.page_table = array(table);
        return v;
    }

    void expect(const char* op, const std::vector<float>& got, const std::vector<double>& want) const {
        double square = 0;
        for (const double x : want) square += x * x;
        const double typical = std::sqrt(square / static_cast<double>(want.size()));
        for (size_t i = 0; i < want.size(); i++) {
            const double right = want[i] + (strcmp(op, spoil_) == 0 ? typical : 0), value = static_cast<double>(got[i]);
            if (!(std::abs(value - right) <= kOfTypical * typical + kOfValue * std::abs(right)))
                fail(KD_E_DEVICE,
                     "%s computes %s wrongly (%g where %g is right): the device or its driver is faulty, or this "
                     "library "
                     "does not fit it; do not serve with it",
                     device_, op, value, right);
        }
    }

  private:
    static void put(char* to, float x) {
        const uint16_t narrow = bf16(x);
        if (device::act_bytes() == sizeof x)
            memcpy(to, &x, sizeof x);
        else
            memcpy(to, &narrow, sizeof narrow);
    }
    static float get(const char* from) {
        float x;
        uint16_t narrow;
        memcpy(&x, from, device::act_bytes() == sizeof x ? sizeof x : 0);
        if (device::act_bytes() == sizeof x) return x;
        memcpy(&narrow, from, sizeof narrow);
        return widened(narrow);
    }

    const char* const device_;
    const char* const spoil_;
    uint32_t state_ = 12345;
    std::vector<void*> owned_;
};

double dot(const float* a, const float* b, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
    return sum;
}
double silu(double x) { return x / (1 + std::exp(-x)); }

void check_products(Bench& b, int offset, int rows) {
    constexpr int k = 512, n = 96;
    const auto x = b.numbers(static_cast<size_t>(rows) * k), w = b.numbers(static_cast<size_t>(n) * k, 0.05f);
    std::vector<double> want;
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < n; j++)
            want.push_back(dot(&x[static_cast<size_t>(r) * k], &w[static_cast<size_t>(j) * k], k));
    const Rows in = b.rows(x, rows, offset);
    const Mat m = b.mat(w, n);
    const Rows y = b.rows(std::vector<float>(want.size()), rows, offset);
    ops::linear(y, in, m, rows);
    b.expect("linear", b.values(y, rows, n), want);

    std::vector<float> fp32(want.size());
    const Dev<float> out = b.array(fp32);
    ops::logits(out, n, in, m, rows);
    device::download(fp32.data(), out, fp32.size());
    b.expect("logits", fp32, want);
}

void check_experts(Bench& b) {
    constexpr int rows = 5, experts = 4, slots = 2, hidden = 256, inter = 64;
    struct Weights {
        std::vector<uint32_t> q;
        std::vector<uint16_t> s;
        std::vector<float> value;
    };
    const auto weights = [&](int n, int k) {
        Weights w;
        for (int i = 0; i < experts * n * k / 8; i++) w.q.push_back(b.bits());
        for (const float s : b.numbers(static_cast<size_t>(experts * n * k / 32), 0.02f)) w.s.push_back(bf16(s));
        for (int i = 0; i < experts * n * k; i++)
            w.value.push_back((static_cast<float>(w.q[static_cast<size_t>(i / 8)] >> (i % 8 * 4) & 15) - 8) *
                              widened(w.s[static_cast<size_t>(i / 32)]));
        return w;
    };
    const Weights up = weights(2 * inter, hidden), down = weights(hidden, inter);
    Experts e;
    e.count = experts;
    e.gate_up = {b.array(up.q), b.array(up.s), 2 * inter, hidden};
    e.down = {b.array(down.q), b.array(down.s), hidden, inter};
    ops::pack_experts(e);

    const auto h = b.numbers(rows * hidden), y = b.numbers(rows * hidden);
    std::vector<int32_t> expert;
    std::vector<float> weight;
    std::vector<double> want(y.begin(), y.end());
    for (int r = 0; r < rows; r++) {
        for (int slot = 0; slot < slots; slot++) {
            const int chosen = (r + slot) % experts;
            expert.push_back(chosen);
            weight.push_back(0.25f + 0.5f * static_cast<float>(slot));
            std::vector<float> act;
            for (int i = 0; i < inter; i++) {
                const float* gate = &up.value[static_cast<size_t>((chosen * 2 * inter + i) * hidden)];
                const double g = dot(gate, &h[static_cast<size_t>(r * hidden)], hidden);
                const double u = dot(gate + inter * hidden, &h[static_cast<size_t>(r * hidden)], hidden);
                act.push_back(static_cast<float>(silu(g) * u));
            }
            for (int i = 0; i < hidden; i++)
                want[static_cast<size_t>(r * hidden + i)] +=
                    static_cast<double>(weight.back()) *
                    dot(act.data(), &down.value[static_cast<size_t>((chosen * hidden + i) * inter)], inter);
        }
    }
    Shape s;
    s.hidden = hidden;
    s.moe_inter = s.moe_inter_rank = inter;
    s.experts = experts;
    s.experts_per_token = slots;
    const Rows out = b.rows(y, rows);
    ops::moe(out, b.rows(h, rows), b.array(expert), b.array(weight), e, rows, s);
    b.expect("moe", b.values(out, rows, hidden), want);
}

// softmax(score) * value over keys; `key` and `value` give a key's numbers.
template <class Key, class Value>
void attend(std::vector<double>& out, const float* q, int keys, int dk, int dv, double scale, Key key, Value value) {
    std::vector<double> p;
    for (int i = 0; i < keys; i++) p.push_back(dot(q, key(i), dk) * scale);
    const double most = *std::max_element(p.begin(), p.end());
    double sum = 0;
    for (double& x : p) sum += x = std::exp(x - most);
    for (int c = 0; c < dv; c++) {
        double o = 0;
        for (int i = 0; i < keys; i++) o += p[static_cast<size_t>(i)] / sum * static_cast<double>(value(i)[c]);
        out.push_back(o);
    }
}

void check_attention(Bench& b, int offset) {
    constexpr int heads = 8, lora = 512, rope = 64, row = lora + rope, pages = 5;
    const std::vector<int32_t> position{40, 299};
    const int rows = 2;
    Shape s;
    s.heads = s.heads_rank = heads;
    s.kv_lora = lora;
    s.rope = rope;
    s.score_scale = 0.1f;
    const auto q = b.numbers(static_cast<size_t>(rows * heads * row), 0.5f);
    const auto kv = b.numbers(static_cast<size_t>(pages * KD_PAGE_TOKENS * row));
    const View v = b.view(position, position, pages);
    const auto key = [&](int slot) {
        const int page = pages - 1 - slot / KD_PAGE_TOKENS;
        return &kv[static_cast<size_t>((page * KD_PAGE_TOKENS + slot % KD_PAGE_TOKENS) * row)];
    };
    std::vector<double> want;
    for (int r = 0; r < rows; r++)
        for (int head = 0; head < heads; head++)
            attend(want, &q[static_cast<size_t>((r * heads + head) * row)], position[static_cast<size_t>(r)] + 1, row,
                   lora, static_cast<double>(s.score_scale), key, key);
    const Rows o = b.rows(std::vector<float>(want.size()), rows, offset);
    ops::mla_attention(o, b.rows(q, rows, offset), b.rows(kv, pages * KD_PAGE_TOKENS, offset), v, s);
    b.expect("mla_attention", b.values(o, rows, heads * lora), want);
}

void check_draft_attention(Bench& b) {
    constexpr int heads = 4, dim = 64, block = 8, pages = 2, prefix = 100;
    DraftShape d;
    d.heads = d.heads_rank = heads;
    d.kv_heads = d.kv_heads_rank = 1;
    d.head_dim = dim;
    d.block = block;
    std::vector<int32_t> position, before(block, prefix);
    for (int i = 0; i < block; i++) position.push_back(prefix + i);
    const auto qkv = b.numbers(static_cast<size_t>(block * (heads + 2) * dim));
    const auto k = b.numbers(static_cast<size_t>(pages * KD_PAGE_TOKENS * dim)),
               value = b.numbers(static_cast<size_t>(pages * KD_PAGE_TOKENS * dim));
    const auto at = [&](const std::vector<float>& pool, int own, int i) {
        if (i >= prefix) return &qkv[static_cast<size_t>(((i - prefix) * (heads + 2) + heads + own) * dim)];
        const int page = pages - 1 - i / KD_PAGE_TOKENS;
        return &pool[static_cast<size_t>((page * KD_PAGE_TOKENS + i % KD_PAGE_TOKENS) * dim)];
    };
    std::vector<double> want;
    for (int r = 0; r < block; r++)
        for (int head = 0; head < heads; head++)
            attend(
                want, &qkv[static_cast<size_t>((r * (heads + 2) + head) * dim)], prefix + block, dim, dim,
                1 / std::sqrt(double{dim}), [&](int i) { return at(k, 0, i); }, [&](int i) { return at(value, 1, i); });
    const Rows o = b.rows(std::vector<float>(want.size()), block);
    ops::draft_attention(o, b.rows(qkv, block), b.rows(k, pages * KD_PAGE_TOKENS),
                         b.rows(value, pages * KD_PAGE_TOKENS), b.view(position, before, pages), 0, d);
    b.expect("draft_attention", b.values(o, block, heads * dim), want);
}

}  // namespace

void self_check(const char* device_name, const char* spoil) {
    for (const int offset : {0, 3}) {
        for (const int rows : {1, 20}) {
            Bench b(device_name, spoil);
            check_products(b, offset, rows);
        }
        Bench b(device_name, spoil);
        check_attention(b, offset);
    }
    Bench b(device_name, spoil);
    check_experts(b);
    check_draft_attention(b);
}

}  // namespace kd
