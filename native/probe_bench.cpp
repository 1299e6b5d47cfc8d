// Operations at work, over and over. See probe_bench.h.

#include "probe_bench.h"

#include <bit>
#include <chrono>
#include <random>
#include <vector>

#include "probe_bench_rig.h"

using namespace kd;
using namespace kd::probe;

extern "C" {

// ---- the device -------------------------------------------------------------------------------------------------------

int32_t kd_bench_read(const kd_bench* b, double* us, int64_t bytes) {
    return measure("read", b, us, [&](Room& room) -> Body {
        const int copies = room.copies(static_cast<size_t>(bytes));
        const Dev<char> p = room.empty<char>(static_cast<size_t>(bytes) * copies);
        return [=](int turn) {
            probe::read_all(std::bit_cast<void*>(p + static_cast<size_t>(bytes) * (turn % copies)),
                            static_cast<size_t>(bytes));
        };
    });
}

int32_t kd_bench_download(const kd_bench* b, double* us, int64_t bytes) {
    const kd_probe_device where{1, b->threads, KD_ISA_AUTO, 1, 0, nullptr};
    return probe::run("download", &where, [&](probe::Rig&) {
        Room room(*b);
        const Dev<char> p = room.empty<char>(static_cast<size_t>(bytes));
        std::vector<char> host(static_cast<size_t>(bytes));
        for (int i = -1; i < b->plays; i++) {
            const auto began = std::chrono::steady_clock::now();
            for (int turn = 0; turn < b->calls; turn++) device::download(host.data(), p, host.size());
            const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - began;
            if (i >= 0) us[i] = took.count() / b->calls;
        }
    });
}

int32_t kd_bench_upload(const kd_bench* b, double* us, int64_t bytes) {
    const kd_probe_device where{1, b->threads, KD_ISA_AUTO, 1, 0, nullptr};
    return probe::run("upload", &where, [&](probe::Rig&) {
        Room room(*b);
        const Dev<char> p = room.empty<char>(static_cast<size_t>(bytes));
        const std::vector<char> host(static_cast<size_t>(bytes));
        for (int i = -1; i < b->plays; i++) {
            const auto began = std::chrono::steady_clock::now();
            for (int turn = 0; turn < b->calls; turn++) device::upload(p, host.data(), host.size());
            const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - began;
            if (i >= 0) us[i] = took.count() / b->calls;
        }
    });
}

// ---- rows and products --------------------------------------------------------------------------------------------------

int32_t kd_bench_linear(const kd_bench* b, double* us, int32_t rows, int32_t n, int32_t k, int32_t logits) {
    return measure("linear", b, us, [&](Room& room) -> Body {
        std::vector<Mat> w(room.copies(static_cast<size_t>(n) * k * sizeof(uint16_t)));
        for (Mat& m : w) m = room.mat(n, k);
        const Rows x = room.rows(rows, k);
        if (logits) {
            const Dev<float> y = room.empty<float>(static_cast<size_t>(rows) * n);
            return [=](int turn) { ops::logits(y, n, x, w[turn % w.size()], rows); };
        }
        const Rows y = room.rows(rows, n);
        return [=](int turn) { ops::linear(y, x, w[turn % w.size()], rows); };
    });
}

int32_t kd_bench_rms_norm(const kd_bench* b, double* us, int32_t rows, int32_t width) {
    return measure("rms_norm", b, us, [&](Room& room) -> Body {
        const Rows y = room.rows(rows, width), x = room.rows(rows, width);
        const Vec w = room.floats(width);
        return [=](int) { ops::rms_norm(y, x, w, rows, width, 1e-5f); };
    });
}

int32_t kd_bench_add_norm(const kd_bench* b, double* us, int32_t rows, int32_t width) {
    return measure("add_norm", b, us, [&](Room& room) -> Body {
        const Rows h = room.rows(rows, width), y = room.rows(rows, width, 1e-3f);
        const Dev<float> x = room.floats(static_cast<size_t>(rows) * width);
        const Vec w = room.floats(width);
        return [=](int) { ops::add_norm(h, x, y, w, rows, width, 1e-5f); };
    });
}

int32_t kd_bench_swiglu(const kd_bench* b, double* us, int32_t rows, int32_t width) {
    return measure("swiglu", b, us, [&](Room& room) -> Body {
        const Rows y = room.rows(rows, width), x = room.rows(rows, 2 * width);
        return [=](int) { ops::swiglu(y, x, rows, width); };
    });
}

// ---- experts --------------------------------------------------------------------------------------------------------------

int32_t kd_bench_route(const kd_bench* b, double* us, int32_t rows, int32_t hidden, int32_t experts, int32_t slots,
                       int32_t bf16) {
    return measure("route", b, us, [&](Room& room) -> Body {
        Shape s;
        s.hidden = hidden;
        s.experts = experts;
        s.experts_per_token = slots;
        s.routed_scale = 1;
        const size_t size = static_cast<size_t>(experts) * hidden;
        std::vector<Dev<const float>> router(room.copies(size * sizeof(float)));
        std::mt19937 engine(7);
        std::vector<float> values(size);
        for (float& v : values) {
            v = std::uniform_real_distribution<float>(-0.04f, 0.04f)(engine);
            if (bf16) v = std::bit_cast<float>(std::bit_cast<uint32_t>(v) & 0xFFFF0000u);
        }
        for (auto& w : router) w = room.of(values);
        const Rows h = room.rows(rows, hidden);
        const Vec bias = room.floats(experts, 0.1f);
        const Dev<int32_t> expert = room.empty<int32_t>(static_cast<size_t>(rows) * slots);
        const Dev<float> weight = room.empty<float>(static_cast<size_t>(rows) * slots);
        return [=](int turn) { ops::route(expert, weight, h, router[turn % router.size()], bias, rows, s); };
    });
}

int32_t kd_bench_moe(const kd_bench* b, double* us, const int32_t* expert, int32_t rows, int32_t hidden, int32_t inter,
                     int32_t experts, int32_t slots) {
    return measure("moe", b, us, [&](Room& room) -> Body {
        Shape s;
        s.hidden = hidden;
        s.moe_inter = s.moe_inter_rank = inter;
        s.experts = experts;
        s.experts_per_token = slots;
        const size_t size = static_cast<size_t>(experts) * inter * hidden;  // weights of one of the three
        std::vector<Experts> layer(room.copies(3 * size * 9 / 16));
        for (Experts& e : layer) {
            e.gate_up = {room.nibbles(2 * size / 8), room.bf16(2 * size / 32, 0.003f), 2 * inter, hidden};
            e.down = {room.nibbles(size / 8), room.bf16(size / 32, 0.003f), hidden, inter};
            e.count = experts;
            ops::pack_experts(e);
        }
        const size_t pairs = static_cast<size_t>(rows) * slots;
        const Dev<int32_t> sent = room.of(std::vector<int32_t>(expert, expert + pairs * b->calls));
        const Dev<float> weight = room.of(std::vector<float>(pairs, 0.125f));
        const Rows y = room.rows(rows, hidden, 0), h = room.rows(rows, hidden);
        return [=](int turn) {
            ops::moe(y, h, sent + pairs * static_cast<size_t>(turn), weight, layer[turn % layer.size()], rows, s);
        };
    });
}

// ---- attention --------------------------------------------------------------------------------------------------------------

int32_t kd_bench_attention(const kd_bench* b, double* us, int32_t streams, int32_t rows, int32_t context,
                           int32_t heads) {
    return measure("attention", b, us, [&](Room& room) -> Body {
        const Shape s = latent_shape(heads);
        const Forest forest(room, streams, rows, context);
        const size_t pool = static_cast<size_t>(forest.pages) * KD_PAGE_TOKENS;
        std::vector<Rows> kv(room.copies(pool * (kKvLora + kRope) * device::act_bytes()));
        for (Rows& r : kv) r = room.rows(pool, s.kv_row());
        const size_t n = static_cast<size_t>(streams) * rows;
        const Rows q = room.rows(n, heads * s.kv_row()), o = room.rows(n, heads * kKvLora);
        return [=, v = forest.view](int turn) { ops::mla_attention(o, q, kv[turn % kv.size()], v, s); };
    });
}

int32_t kd_bench_mla_query(const kd_bench* b, double* us, int32_t rows, int32_t heads) {
    return measure("mla_query", b, us, [&](Room& room) -> Body {
        const Shape s = latent_shape(heads);
        std::vector<Mat> w(room.copies(static_cast<size_t>(heads) * kNope * kKvLora * sizeof(uint16_t)));
        for (Mat& m : w) m = room.mat(heads * kNope, kKvLora);
        const Forest forest = small_forest(room, rows);
        const Rope rope = room.rope(kSmallContext + rows, kRope / 2);
        const Rows q = room.rows(rows, heads * (kNope + kRope)), y = room.rows(rows, heads * s.kv_row());
        return [=, v = forest.view](int turn) { ops::mla_query(y, q, w[turn % w.size()], rope, v, s); };
    });
}

int32_t kd_bench_mla_latent(const kd_bench* b, double* us, int32_t rows, int32_t heads) {
    return measure("mla_latent", b, us, [&](Room& room) -> Body {
        Shape s = latent_shape(heads);
        s.max_positions = kSmallContext + rows;
        const Forest forest = small_forest(room, rows);
        const Rope rope = room.rope(s.max_positions, kRope / 2);
        const Rows kv = room.rows(static_cast<size_t>(forest.pages) * KD_PAGE_TOKENS, s.kv_row());
        const Rows x = room.rows(rows, s.q_lora + s.kv_row()), y = room.rows(rows, heads * (kNope + kRope));
        const Dev<float> q_norm = room.floats(s.q_lora), kv_norm = room.floats(kKvLora);
        std::vector<Mat> w(room.copies(static_cast<size_t>(heads) * (kNope + kRope) * s.q_lora * sizeof(uint16_t)));
        for (Mat& m : w) m = room.mat(heads * (kNope + kRope), s.q_lora);
        return [=, v = forest.view](int turn) {
            ops::mla_latent(y, kv, x, q_norm, w[turn % w.size()], kv_norm, rope, v, s);
        };
    });
}

int32_t kd_bench_mla_value(const kd_bench* b, double* us, int32_t rows, int32_t heads) {
    return measure("mla_value", b, us, [&](Room& room) -> Body {
        const Shape s = latent_shape(heads);
        std::vector<Mat> w(room.copies(static_cast<size_t>(heads) * kNope * kKvLora * sizeof(uint16_t)));
        for (Mat& m : w) m = room.mat(heads * kNope, kKvLora);
        const Rows x = room.rows(rows, heads * kKvLora), y = room.rows(rows, heads * kNope);
        return [=](int turn) { ops::mla_value(y, x, w[turn % w.size()], rows, s); };
    });
}

}  // extern "C"
