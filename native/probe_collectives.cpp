// All-reduces at work, over and over. See probe_bench.h.
#include <mutex>

#include "probe_bench_rig.h"

using namespace kd;
using namespace kd::probe;

extern "C" int32_t kd_bench_all_reduce(const kd_bench* b, double* us, int32_t tp, const char* transport, int32_t way,
                                       int32_t rows, int32_t width) {
    const kd_probe_device where{tp, b->threads, KD_ISA_AUTO, 1, 0, transport};
    return run("all_reduce", &where, [&](Rig& rig) {
        static std::mutex preparing;
        std::unique_lock lock(preparing);
        Room room(*b);
        const Rows h = room.rows(rows, width), y = room.rows(rows, width, 1e-3f);
        const Dev<float> x = room.floats(static_cast<size_t>(rows) * width);
        const Vec w = room.floats(width);
        static std::atomic<uint64_t> next{uint64_t{1} << 40};
        const uint64_t key = next++;
        lock.unlock();
        rig.all_ready();
        const auto all = [&] {
            for (int i = 0; i < b->calls; i++) {
                if (way == 0)
                    ops::add_norm(h, x, y, w, rows, width, 1e-5f);
                else if (way == 1)
                    vendor_add_norm(h, x, y, w, rows, width, 1e-5f);
                else
                    add_norm_as_of_eight(h, x, y, w, rows, width, 1e-5f, way == 3);
            }
        };
        for (int i = 0; i < 2; i++) device::replay(key, all);
        Stopwatch watch;
        for (int i = 0; i < b->plays; i++) {
            watch.start();
            device::replay(key, all);
            const double took = watch.stop_us() / b->calls;
            if (rig.rank == 0) us[i] = took;
        }
        device::forget();
    });
}

extern "C" int32_t kd_bench_switch_over(const kd_bench* b, double* elements, int32_t tp) {
    const kd_probe_device where{tp, b->threads, KD_ISA_AUTO, 1, 0, nullptr};
    return run("switch_over", &where, [&](Rig& rig) {
        rig.all_ready();
        device::measure_transport();
        if (rig.rank == 0) elements[0] = double(two_shots_from());
    });
}
