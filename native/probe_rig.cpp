#include "probe_rig.h"

#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>

namespace kd::probe {
namespace {

thread_local std::string last_error;  // of kd_probe_error()

std::mutex groups_mutex;

// Groups live as long as the process: opening one starts threads. Never destroyed, so that exit waits for nobody.
using Groups = std::map<std::tuple<int, int, int, std::string>, std::shared_ptr<device::Group>>;
Groups& groups() {
    static auto* all = new Groups;
    return *all;
}

// Nearest, ties to even; NaN stays NaN.
uint16_t to_bf16(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>(bits >> 16 | 1);
    return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

}  // namespace

int32_t remember(const Error& e) {
    last_error = e.what();
    return e.status;
}

Rig::~Rig() {
    if (!met_) ready_.arrive_and_drop();  // the others do not wait for a rank that failed
    for (const Buffer& b : buffers_) device::release(b.device);
}

void* Rig::place(void* host, size_t begin, size_t stride, size_t piece, size_t pieces, size_t total, const void* poison,
                 size_t poison_size, bool read, bool written) {
    Buffer b;
    b.image.resize(total);
    for (size_t i = 0; i + poison_size <= total; i += poison_size) std::memcpy(&b.image[i], poison, poison_size);
    for (size_t i = 0; i < pieces; i++) {
        char* to = b.image.data() + begin + i * stride;
        if (read)
            std::memcpy(to, static_cast<char*>(host) + i * piece, piece);
        else
            std::memset(to, 0xAA, piece);
    }
    b.device = device::alloc(total);
    b.host = written ? host : nullptr;
    b.begin = begin;
    b.stride = stride;
    b.piece = piece;
    b.pieces = pieces;
    device::upload(b.device, b.image.data(), total);
    buffers_.push_back(std::move(b));
    return buffers_.back().device;
}

Rig::Place Rig::place_of(int width) const {
    if (!aligned_) return {5, width + 7};
    return {8, (width + 7) / 8 * 8 + 8};
}

Rows Rig::rows(float* host, int n_rows, int width, bool read, bool written) {
    const int spare_rows = 2 + more_;
    const auto [offset, stride] = place_of(width);
    const size_t size = device::act_bytes(), values = static_cast<size_t>(n_rows) * width;
    std::vector<uint16_t> narrow;
    void* from = host;
    if (size == sizeof(uint16_t)) {
        narrow.resize(values);
        for (size_t i = 0; i < values && read; i++) narrow[i] = to_bf16(host[i]);
        from = narrow.data();
    }
    const uint32_t poison = !read ? 0xAAAAAAAA : size == sizeof(kSignallingAct) ? kSignallingAct : kSignalling;
    void* p = place(from, offset * size, stride * size, width * size, n_rows,
                    static_cast<size_t>(n_rows + spare_rows) * stride * size, &poison, size, read, written);
    buffers_.back().act = size == sizeof(uint16_t);
    buffers_.back().host = written ? host : nullptr;
    return {p, stride, offset};
}

Rig::Floats Rig::out_floats(float* host, int n_rows, int width) {
    const int spare_rows = 2 + more_;
    const auto [offset, stride] = place_of(width);
    const uint32_t poison = 0xAAAAAAAA;
    void* p =
        place(host, offset * sizeof(float), stride * sizeof(float), width * sizeof(float), n_rows,
              static_cast<size_t>(n_rows + spare_rows) * stride * sizeof(float), &poison, sizeof poison, false, true);
    return {Dev<float>(static_cast<float*>(p) + offset), stride};
}

std::vector<char> Rig::widened(const std::vector<char>& acts) const {
    std::vector<char> floats(acts.size() * 2);
    for (size_t i = 0; i < acts.size() / 2; i++) {
        uint16_t narrow;
        std::memcpy(&narrow, &acts[2 * i], sizeof narrow);
        const uint32_t wide = static_cast<uint32_t>(narrow) << 16;
        std::memcpy(&floats[4 * i], &wide, sizeof wide);
    }
    return floats;
}

Rope Rig::rope(const kd_probe_rope* r) {
    const size_t n = static_cast<size_t>(r->positions) * r->pairs;
    return {in_const(r->cos, n), in_const(r->sin, n), r->pairs};
}

View Rig::view(const kd_probe_view* v) {
    View to;
    to.n_rows = count(v->n_rows);
    to.n_streams = count(v->n_streams);
    to.n_out = count(v->n_out);
    to.max_pages = v->max_pages;
    to.token = in(v->token, v->n_rows);
    to.position = in(v->position, v->n_rows);
    to.stream = in(v->stream, v->n_rows);
    to.slot = in(v->slot, v->n_rows);
    to.prefix = in(v->prefix, v->n_rows);
    to.mask = in(v->mask, static_cast<size_t>(v->n_rows) * kMaskWords);
    to.page_table = in(v->page_table, static_cast<size_t>(v->n_streams) * v->max_pages);
    to.out_row = in(v->out_row, v->n_out);
    return to;
}

void Rig::settle() {
    for (Buffer& b : buffers_) device::download(b.image.data(), b.device, b.image.size());
}

void Rig::finish(const char* name) {
    for (const Buffer& b : buffers_) {
        std::vector<char> now(b.image.size());
        device::download(now.data(), b.device, now.size());
        std::vector<char> expected = b.image;
        if (b.host) {
            Result result{b.host, {}};
            for (size_t i = 0; i < b.pieces; i++) {
                const char* from = now.data() + b.begin + i * b.stride;
                result.bytes.insert(result.bytes.end(), from, from + b.piece);
                std::memcpy(&expected[b.begin + i * b.stride], from, b.piece);
            }
            if (b.act) result.bytes = widened(result.bytes);
            results.push_back(std::move(result));
        }
        for (size_t i = 0; i < now.size(); i++) {
            if (now[i] == expected[i]) continue;
            fail(KD_E_FATAL, "%s: rank %d: byte %zu of array %zu was overwritten, which is not part of a result", name,
                 rank, i, static_cast<size_t>(&b - buffers_.data()));
        }
    }
}

int32_t run(const char* name, const kd_probe_device* d, const std::function<void(Rig&)>& body) try {
    const std::tuple key{d->tp, d->threads, d->isa, std::string(d->transport ? d->transport : "")};
    std::shared_ptr<device::Group> group;
    {
        std::lock_guard lock(groups_mutex);
        auto& known = groups()[key];
        if (!known) known = device::open_group({d->tp, d->threads, d->isa, true, nullptr, d->transport});
        group = known;
    }

    std::vector<std::vector<Rig::Result>> results(d->tp);
    std::vector<int> status(d->tp, KD_OK);
    std::vector<std::string> sentence(d->tp);
    std::barrier<> ready(d->tp);
    std::vector<std::thread> ranks;
    for (int r = 0; r < d->tp; r++) {
        ranks.emplace_back([&, r] {
            try {
                device::bind(device::context(*group, r));
                Rig rig(r, d->aligned != 0, d->more, ready);
                body(rig);
                rig.finish(name);
                results[r] = std::move(rig.results);
            } catch (const Error& e) {
                status[r] = e.status;
                sentence[r] = e.what();
                device::abort(*group);
            }
            device::bind(nullptr);
        });
    }
    for (std::thread& rank : ranks) rank.join();
    for (int r = 0; r < d->tp; r++) {
        if (status[r] == KD_OK) continue;
        std::lock_guard lock(groups_mutex);
        groups().erase(key);
        // The first to fail says why; those it woke only say that somebody did.
        int first = r;
        for (int other = 0; other < d->tp; other++) {
            if (status[other] != KD_OK && sentence[other].find("another rank") == std::string::npos) first = other;
        }
        throw Error(status[first], sentence[first]);
    }
    for (size_t i = 0; i < results[0].size(); i++) {
        for (int r = 1; r < d->tp; r++) {
            if (results[r][i].bytes != results[0][i].bytes) {
                fail(KD_E_FATAL, "%s: result %zu of rank %d differs from that of rank 0", name, i, r);
            }
        }
        const Rig::Result& result = results[0][i];
        std::memcpy(result.host, result.bytes.data(), result.bytes.size());
    }
    return KD_OK;
} catch (const Error& e) {
    return remember(e);
}

}  // namespace kd::probe

extern "C" const char* kd_probe_error(void) { return kd::probe::last_error.c_str(); }

extern "C" int32_t kd_probe_isa(int32_t isa) try {
    kd::device::open_group({1, 1, isa});
    return KD_OK;
} catch (const kd::Error& e) {
    return kd::probe::remember(e);
}
