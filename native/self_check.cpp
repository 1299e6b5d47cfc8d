#include "self_check.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>
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
    // n rows of k, which are those given, again and again.
    Mat mat(const std::vector<float>& v, int n, int k) {
        std::vector<uint16_t> narrow(static_cast<size_t>(n) * static_cast<size_t>(k));
        for (size_t i = 0; i < std::min(v.size(), narrow.size()); i++) narrow[i] = bf16(v[i]);
        for (size_t i = v.size(); i < narrow.size(); i += v.size())
            std::copy_n(narrow.begin(), std::min(v.size(), narrow.size() - i),
                        narrow.begin() + static_cast<ptrdiff_t>(i));
        return {array(narrow), n, k};
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

// y = x w^T of this size, every few columns of it. The rows of w repeat after a while, which saves most of the time.
void check_products(Bench& b, int offset, int rows, int n, int k) {
    const int period = std::min(n, 97), step = n / 24 + 1;
    const auto x = b.numbers(static_cast<size_t>(rows * k)), some = b.numbers(static_cast<size_t>(period * k), 0.05f);
    std::vector<double> want;
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < n; j += step)
            want.push_back(dot(&x[static_cast<size_t>(r * k)], &some[static_cast<size_t>(j % period * k)], k));
    const auto picked = [&](const std::vector<float>& all) {
        std::vector<float> got;
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < n; j += step) got.push_back(all[static_cast<size_t>(r * n + j)]);
        return got;
    };
    std::vector<float> fp32(static_cast<size_t>(rows * n));
    const Rows in = b.rows(x, rows, offset), y = b.rows(fp32, rows, offset);
    const Mat m = b.mat(some, n, k);
    ops::linear(y, in, m, rows);
    b.expect("linear", picked(b.values(y, rows, n)), want);

    const Dev<float> out = b.array(fp32);
    ops::logits(out, n, in, m, rows);
    device::download(fp32.data(), out, fp32.size());
    b.expect("logits", picked(fp32), want);
}

// Every few rows of this size.
void check_experts(Bench& b, int rows, int hidden, int inter) {
    constexpr int experts = 4, slots = 2;
    const int step = rows / 5;
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

    const auto h = b.numbers(static_cast<size_t>(rows * hidden)), y = b.numbers(static_cast<size_t>(rows * hidden));
    std::vector<int32_t> expert;
    std::vector<float> weight;
    for (int r = 0; r < rows; r++)
        for (int slot = 0; slot < slots; slot++) {
            expert.push_back((r + slot) % experts);
            weight.push_back(0.25f + 0.5f * static_cast<float>(slot));
        }
    std::vector<double> want;
    for (int r = 0; r < rows; r += step) {
        const float* in = &h[static_cast<size_t>(r * hidden)];
        std::vector<double> sum(y.begin() + r * hidden, y.begin() + (r + 1) * hidden);
        for (int slot = 0; slot < slots; slot++) {
            const int chosen = (r + slot) % experts;
            std::vector<float> act;
            for (int i = 0; i < inter; i++) {
                const float* gate = &up.value[static_cast<size_t>((chosen * 2 * inter + i) * hidden)];
                act.push_back(static_cast<float>(silu(dot(gate, in, hidden)) * dot(gate + inter * hidden, in, hidden)));
            }
            for (int i = 0; i < hidden; i++)
                sum[static_cast<size_t>(i)] +=
                    static_cast<double>(weight[static_cast<size_t>(slot)]) *
                    dot(act.data(), &down.value[static_cast<size_t>((chosen * hidden + i) * inter)], inter);
        }
        want.insert(want.end(), sum.begin(), sum.end());
    }
    Shape s;
    s.hidden = hidden;
    s.moe_inter = s.moe_inter_rank = inter;
    s.experts = experts;
    s.experts_per_token = slots;
    const Rows out = b.rows(y, rows);
    ops::moe(out, b.rows(h, rows), b.array(expert), b.array(weight), e, rows, s);
    const auto all = b.values(out, rows, hidden);
    std::vector<float> got;
    for (int r = 0; r < rows; r += step)
        got.insert(got.end(), all.begin() + r * hidden, all.begin() + (r + 1) * hidden);
    b.expect("moe", got, want);
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

// The products before and behind the attention: per head, with the rotation by position.
void check_heads(Bench& b, int offset, int rows) {
    constexpr int heads = 4, nope = 128, rope = 64, lora = 512, v_head = 128, positions = 200;
    Shape s;
    s.heads = s.heads_rank = heads;
    s.kv_lora = lora;
    s.nope = nope;
    s.rope = rope;
    s.v_head = v_head;
    const auto q = b.numbers(static_cast<size_t>(rows * heads * (nope + rope)));
    const auto k_up = b.numbers(heads * nope * lora, 0.1f), v_up = b.numbers(heads * v_head * lora, 0.05f);
    const auto cos = b.numbers(positions * rope / 2), sin = b.numbers(positions * rope / 2);
    std::vector<int32_t> position;
    for (int r = 0; r < rows; r++) position.push_back(r * 83 % positions);
    std::vector<double> want, value;
    for (int r = 0; r < rows; r++)
        for (int head = 0; head < heads; head++) {
            const float* in = &q[static_cast<size_t>((r * heads + head) * (nope + rope))];
            std::vector<double> latent(lora);
            for (int n = 0; n < nope; n++)
                for (int c = 0; c < lora; c++)
                    latent[static_cast<size_t>(c)] +=
                        static_cast<double>(in[n]) *
                        static_cast<double>(k_up[static_cast<size_t>((head * nope + n) * lora + c)]);
            want.insert(want.end(), latent.begin(), latent.end());
            for (int i = 0; i < rope / 2; i++) {
                const auto at = static_cast<size_t>(position[static_cast<size_t>(r)] * rope / 2 + i);
                const double x = static_cast<double>(in[nope + 2 * i]), y = static_cast<double>(in[nope + 2 * i + 1]);
                const double c = static_cast<double>(cos[at]), t = static_cast<double>(sin[at]);
                want.push_back(x * c - y * t);
                want.push_back(x * t + y * c);
            }
        }
    const Rows q_lat = b.rows(std::vector<float>(want.size()), rows, offset);
    const Rope table{b.array(cos), b.array(sin), rope / 2};
    ops::mla_query(q_lat, b.rows(q, rows, offset), b.mat(k_up, heads * nope, lora), table,
                   b.view(position, position, 1), s);
    b.expect("mla_query", b.values(q_lat, rows, heads * (lora + rope)), want);

    const auto o_lat = b.numbers(static_cast<size_t>(rows * heads * lora));
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < heads * v_head; i++)
            value.push_back(dot(&o_lat[static_cast<size_t>((r * heads + i / v_head) * lora)],
                                &v_up[static_cast<size_t>(i * lora)], lora));
    const Rows o = b.rows(std::vector<float>(value.size()), rows, offset);
    ops::mla_value(o, b.rows(o_lat, rows, offset), b.mat(v_up, heads * v_head, lora), rows, s);
    b.expect("mla_value", b.values(o, rows, heads * v_head), value);
}

void check_route(Bench& b, int offset) {
    constexpr int rows = 5, experts = 96, slots = 8, hidden = 256;
    Shape s;
    s.hidden = hidden;
    s.experts = experts;
    s.experts_per_token = slots;
    s.routed_scale = 2.5f;
    const auto h = b.numbers(rows * hidden), router = b.numbers(experts * hidden, 0.1f), bias = b.numbers(experts);
    // The weight of every expert of a row, those not chosen 0, and then the weights in order of preference.
    std::vector<double> want;
    for (int r = 0; r < rows; r++) {
        std::vector<double> score, all(experts);
        std::vector<size_t> order;
        for (size_t e = 0; e < experts; e++) {
            const double x = dot(&h[static_cast<size_t>(r * hidden)], &router[e * hidden], hidden);
            score.push_back(1 / (1 + std::exp(-x)));
            order.push_back(e);
        }
        std::stable_sort(order.begin(), order.end(), [&](size_t x, size_t y) {
            return score[x] + static_cast<double>(bias[x]) > score[y] + static_cast<double>(bias[y]);
        });
        order.resize(slots);
        double sum = 0;
        for (const size_t e : order) sum += score[e];
        for (const size_t e : order) all[e] = score[e] / sum * static_cast<double>(s.routed_scale);
        want.insert(want.end(), all.begin(), all.end());
        for (const size_t e : order) want.push_back(all[e]);
    }
    std::vector<int32_t> expert(rows * slots);
    std::vector<float> weight(rows * slots), got;
    const Dev<int32_t> to = b.array(expert);
    const Dev<float> share = b.array(weight);
    ops::route(to, share, b.rows(h, rows, offset), b.array(router), b.array(bias), rows, s);
    device::download(expert.data(), to, expert.size());
    device::download(weight.data(), share, weight.size());
    for (size_t r = 0; r < rows; r++) {
        std::vector<float> all(experts);
        for (size_t i = r * slots; i < (r + 1) * slots; i++)
            if (expert[i] >= 0 && expert[i] < experts) all[static_cast<size_t>(expert[i])] += weight[i];
        got.insert(got.end(), all.begin(), all.end());
        got.insert(got.end(), weight.begin() + static_cast<ptrdiff_t>(r * slots),
                   weight.begin() + static_cast<ptrdiff_t>((r + 1) * slots));
    }
    b.expect("route", got, want);
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
    for (const bool causal : {false, true}) {
        std::vector<double> want;
        for (int r = 0; r < block; r++)
            for (int head = 0; head < heads; head++)
                attend(
                    want, &qkv[static_cast<size_t>((r * (heads + 2) + head) * dim)], prefix + (causal ? r + 1 : block),
                    dim, dim, 1 / std::sqrt(double{dim}), [&](int i) { return at(k, 0, i); },
                    [&](int i) { return at(value, 1, i); });
        const Rows o = b.rows(std::vector<float>(want.size()), block);
        ops::draft_attention(o, b.rows(qkv, block), b.rows(k, pages * KD_PAGE_TOKENS),
                             b.rows(value, pages * KD_PAGE_TOKENS), b.view(position, before, pages), 0, causal, d);
        b.expect("draft_attention", b.values(o, block, heads * dim), want);
    }
}

}  // namespace

void self_check(const char* device_name, const char* spoil) {
    for (const int offset : {0, 3}) {
        for (const int rows : {1, 20}) {
            Bench b(device_name, spoil);
            check_products(b, offset, rows, 96, 512);
            check_heads(b, offset, rows);
        }
        Bench b(device_name, spoil);
        check_attention(b, offset);
        check_route(b, offset);
    }
    Bench b(device_name, spoil);
    check_experts(b, 5, 256, 64);
    // Where numbers are narrow there are matrix units, and ways of their own for many rows, few results, short sums, large
    // matrices, and experts cut among eight ranks.
    if (device::act_bytes() < sizeof(float)) {
        for (const int rows : {1, 12, 24, 50, 100})
            for (const auto& [n, k] : {std::pair{96, 128}, {96, 512}, {40, 2112}, {3264, 320}, {3264, 2112}}) {
                Bench each(device_name, spoil);
                check_products(each, 0, rows, n, k);
            }
        for (const int rows : {5, 300}) {
            Bench each(device_name, spoil);
            check_experts(each, rows, 1024, 256);
        }
    }
    check_draft_attention(b);
}

}  // namespace kd
