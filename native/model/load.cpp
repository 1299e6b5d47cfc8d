#include "model/load.h"

#include <ctime>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <new>

#include "model/config.h"
#include "model/files.h"
#include "model/hash.h"
#include "model/plan.h"
#include "model/refuse.h"
#include "ops.h"

namespace kd::model {

Loaded::~Loaded() {
    for (size_t r = 0; r < arenas_.size(); ++r) {
        device::bind(device::context(group_, static_cast<int>(r)));
        device::release(arenas_[r]);
    }
}

void Loaded::alloc(int tp, size_t bytes) {
    arenas_.reserve(static_cast<size_t>(tp));
    for (int r = 0; r < tp; ++r) {
        device::bind(device::context(group_, r));
        arenas_.push_back(device::alloc(bytes));
    }
}

namespace {

constexpr char kConfigName[] = "config.json";
constexpr char kGenerationName[] = "generation_config.json";
constexpr char kDraftName[] = "draft";

uint64_t now_us() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1'000'000 + static_cast<uint64_t>(t.tv_nsec) / 1'000;
}

void pause(const Progress& progress) {
    if (progress.cancelled()) fail(KD_E_CANCELLED, "the load was cancelled");
}

// Index of the first element that is NaN or infinite, or n. The exponent is all ones then.
template <class T>
size_t first_wild(const uint8_t* p, size_t n, T exponent) {
    constexpr size_t kBlock = 1024;  // without an early exit the compiler vectorises
    for (size_t begin = 0; begin < n; begin += kBlock) {
        const size_t end = std::min(n, begin + kBlock);
        size_t wild = 0;
        for (size_t i = begin; i < end; ++i) {
            T v;
            memcpy(&v, p + sizeof(T) * i, sizeof v);
            wild += (v & exponent) == exponent;
        }
        for (size_t i = begin; wild != 0 && i < end; ++i) {
            T v;
            memcpy(&v, p + sizeof(T) * i, sizeof v);
            if ((v & exponent) == exponent) return i;
        }
    }
    return n;
}

// Reads the tensors of one folder into all ranks, chunk by chunk.
class Filler {
  public:
    Filler(Loaded& loaded, Progress& progress, const Checkpoint& files, std::vector<uint8_t>& chunk,
           std::vector<uint8_t>& share)
        : loaded_(loaded), progress_(progress), files_(files), chunk_(chunk), share_(share) {}

    // Sum over tensors of the hash of name, type, shape and bytes: the order and the sharding do not matter.
    uint64_t fill(const Plan& plan) {
        uint64_t sum = 0;
        for (const Place& place : plan.places) sum += fill(place);
        return sum;
    }

  private:
    struct Part {  // stored rows begin .. end - 1, columns from col on, go to offset `at`
        uint64_t begin, end, at;
    };

    uint64_t fill(const Place& p) {
        const safetensors::Tensor& t = *p.found->tensor;
        const File& file = *files_.files[p.found->file];
        const uint64_t row_bytes = p.cols * safetensors::type_bytes(t.type);
        const uint64_t rows_a_chunk = std::max<uint64_t>(1, kChunkBytes / row_bytes);
        Hash hash;
        hash.add(t.name);
        hash.add(safetensors::type_name(t.type));
        hash.add(t.shape_text());
        for (uint64_t row = 0; row < p.rows; row += rows_a_chunk) {
            pause(progress_);
            const uint64_t n = std::min(rows_a_chunk, p.rows - row);
            const size_t bytes = static_cast<size_t>(n * row_bytes);
            file.read(chunk_.data(), bytes, t.begin + row * row_bytes, "tensor '" + t.name + "'");
            hash.add(chunk_.data(), bytes);
            check(p, row, n);
            if (p.stored != Stored::shape)
                for (size_t r = 0; r < loaded_.ranks.size(); ++r) share_out(p, row, n, static_cast<int>(r));
            progress_.bytes_done += bytes;
        }
        return hash.value();
    }

    void check(const Place& p, uint64_t row, uint64_t n) const {
        const safetensors::Tensor& t = *p.found->tensor;
        const std::string& path = files_.files[p.found->file]->path;
        const std::string name = "tensor '" + printable(t.name, 200) + "' ";
        if (p.stored == Stored::shape) {
            int64_t stored[2];
            for (int i = 0; i < 2; ++i) {
                int32_t narrow;
                if (t.type == safetensors::Type::i64) {
                    memcpy(&stored[i], chunk_.data() + 8 * i, 8);
                } else {
                    memcpy(&narrow, chunk_.data() + 4 * i, 4);
                    stored[i] = narrow;
                }
            }
            if (stored[0] != static_cast<int64_t>(p.want_out) || stored[1] != static_cast<int64_t>(p.want_in))
                refuse(path, name + "holds [" + std::to_string(stored[0]) + ", " + std::to_string(stored[1]) +
                                 "], the packed tensor beside it is for [" + std::to_string(p.want_out) + ", " +
                                 std::to_string(p.want_in) + "]; the file is damaged, fetch it again");
            return;
        }
        if (p.stored == Stored::packed) return;  // every bit pattern is a weight
        const size_t count = static_cast<size_t>(n * p.cols);
        const bool wide = t.type == safetensors::Type::f32;
        const size_t wild = wide ? first_wild<uint32_t>(chunk_.data(), count, 0x7f800000)
                                 : first_wild<uint16_t>(chunk_.data(), count, 0x7f80);
        if (wild != count)
            refuse(path, name + "holds a NaN or infinity at element " + std::to_string(row * p.cols + wild) +
                             "; the file is damaged, fetch it again");
    }

    std::vector<Part> parts(const Place& p, const Shape& s) const {
        const auto tp = static_cast<uint64_t>(s.tp), rank = static_cast<uint64_t>(s.rank);
        switch (p.split) {
            case Split::whole:
            case Split::cols: return {{0, p.rows, p.at}};
            case Split::rows: return {{rank * (p.rows / tp), (rank + 1) * (p.rows / tp), p.at}};
            case Split::vocab: {
                const auto begin = static_cast<uint64_t>(s.vocab_begin);
                return {{begin, begin + static_cast<uint64_t>(s.vocab_rank), p.at}};
            }
            case Split::kv_b: break;
        }
        std::vector<Part> parts;
        const auto nope = static_cast<uint64_t>(s.nope), v_head = static_cast<uint64_t>(s.v_head);
        const uint64_t row_bytes = p.cols * 2;
        for (uint64_t i = 0; i < static_cast<uint64_t>(s.heads_rank); ++i) {
            const uint64_t first = (rank * static_cast<uint64_t>(s.heads_rank) + i) * (nope + v_head);
            parts.push_back({first, first + nope, p.at + i * nope * row_bytes});
            parts.push_back({first + nope, first + nope + v_head, p.at_v + i * v_head * row_bytes});
        }
        return parts;
    }

    // The chunk holds rows row .. row + n - 1 of the tensor: give a rank its share.
    void share_out(const Place& p, uint64_t row, uint64_t n, int rank) {
        const Shape& s = loaded_.ranks[static_cast<size_t>(rank)].shape;
        const safetensors::Type type = p.found->tensor->type;
        const uint64_t element = safetensors::type_bytes(type);
        const bool widen = p.stored == Stored::fp32 && type == safetensors::Type::bf16;
        const uint64_t tp = p.split == Split::cols ? static_cast<uint64_t>(s.tp) : 1;
        const uint64_t cols = p.cols / tp, first_col = tp == 1 ? 0 : cols * static_cast<uint64_t>(rank);
        const uint64_t to_row_bytes = cols * (widen ? 4 : element);
        bool bound = false;
        for (const Part& part : parts(p, s)) {
            const uint64_t begin = std::max(part.begin, row), end = std::min(part.end, row + n);
            if (begin >= end) continue;
            const uint8_t* from = chunk_.data() + ((begin - row) * p.cols + first_col) * element;
            const uint64_t count = end - begin;
            if (tp != 1 || widen) {
                gather(share_.data(), from, count, cols, p.cols, element, widen);
                from = share_.data();
            }
            if (!bound) device::bind(device::context(loaded_.group(), rank));
            bound = true;
            device::upload(loaded_.arena(rank) + part.at + (begin - part.begin) * to_row_bytes, from,
                           count * to_row_bytes);
        }
    }

    static void gather(uint8_t* to, const uint8_t* from, uint64_t rows, uint64_t cols, uint64_t stride,
                       uint64_t element, bool widen) {
        for (uint64_t i = 0; i < rows; ++i) {
            const uint8_t* line = from + i * stride * element;
            if (!widen) {
                memcpy(to, line, cols * element);
                to += cols * element;
                continue;
            }
            for (uint64_t j = 0; j < cols; ++j, to += 4) {
                uint16_t narrow;
                memcpy(&narrow, line + 2 * j, 2);
                const uint32_t wide = static_cast<uint32_t>(narrow) << 16;  // bf16 is the upper half of a float
                memcpy(to, &wide, 4);
            }
        }
    }

    Loaded& loaded_;
    Progress& progress_;
    const Checkpoint& files_;
    std::vector<uint8_t>& chunk_;
    std::vector<uint8_t>& share_;
};

// Both tables of every rank, computed in double. `buffer` is a scratch of at least one row.
void fill_rope(Loaded& loaded, Progress& progress, const RopeSlabs& slabs, const Rotary& rotary, int dim,
               int max_positions, std::vector<uint8_t>& buffer) {
    const std::vector<double> frequencies = rope_frequencies(rotary, dim);
    const double amplitude = rope_amplitude(rotary);
    const size_t pairs = frequencies.size(), row_bytes = pairs * sizeof(float);
    const size_t rows = static_cast<size_t>(max_positions + kRopeMargin), rows_a_chunk = kChunkBytes / 8 / row_bytes;
    for (size_t row = 0; row < rows; row += rows_a_chunk) {
        const size_t n = std::min(rows_a_chunk, rows - row);
        for (const bool sine : {false, true}) {
            pause(progress);
            uint8_t* to = buffer.data();
            for (size_t i = row; i < row + n; ++i)
                for (size_t j = 0; j < pairs; ++j, to += sizeof(float)) {
                    const double angle = static_cast<double>(i) * frequencies[j];
                    const auto value = static_cast<float>(amplitude * (sine ? std::sin(angle) : std::cos(angle)));
                    memcpy(to, &value, sizeof value);
                }
            for (size_t r = 0; r < loaded.ranks.size(); ++r) {
                const int rank = static_cast<int>(r);
                device::bind(device::context(loaded.group(), rank));
                device::upload(loaded.arena(rank) + (sine ? slabs.sin : slabs.cos).row(row), buffer.data(),
                               n * row_bytes);
            }
        }
    }
}

struct DraftSource {
    std::unique_ptr<Folder> folder;
    std::string config_text;
    DraftConfig config;
    Checkpoint files;
};

std::unique_ptr<DraftSource> open_draft(const Folder& folder, const DraftChoice& choice, const Config& target,
                                        const std::function<void()>& pause) {
    if (choice.mode == DraftChoice::kNone || (choice.mode == DraftChoice::kAuto && !folder.has(kDraftName)))
        return nullptr;
    auto draft = std::make_unique<DraftSource>();
    draft->folder = choice.mode == DraftChoice::kPath ? std::make_unique<Folder>(choice.path)
                                                      : std::make_unique<Folder>(folder, kDraftName);
    draft->config_text = draft->folder->read_text(kConfigName, kMaxConfigBytes);
    draft->config = parse_draft_config(draft->config_text, draft->folder->path_of(kConfigName), target);
    draft->files = open_checkpoint(*draft->folder, pause);
    return draft;
}

std::unique_ptr<Loaded> load_folder(const std::string& path, const DraftChoice& choice, device::Group& group, int tp,
                                    Progress& progress) {
    const auto check = [&] { pause(progress); };
    check();
    const Folder folder(path);
    const std::string config_text = folder.read_text(kConfigName, kMaxConfigBytes);
    Config config = parse_config(config_text, folder.path_of(kConfigName));
    if (folder.has(kGenerationName))
        add_stop_ids(config, folder.read_text(kGenerationName, kMaxConfigBytes), folder.path_of(kGenerationName));
    Checkpoint files = open_checkpoint(folder, check);

    // The layout, once for all ranks, and what has to be read.
    auto loaded = std::make_unique<Loaded>(group);
    Info& info = loaded->info;
    info.stop_ids = config.stop_ids;
    Layout layout;
    Model sketch;
    const std::string prefix = target_prefix(files);
    Collector collector(files, folder.path(), prefix);
    const RopeSlabs rope =
        lay_out_target(sketch, info.expert_bytes, layout, &collector, rank_shape(config.shape, tp, 0));
    const Plan plan = collector.finish([&](std::string_view name) { return is_skipped(name, prefix, config); });
    info.parameters = plan.parameters;
    const auto draft = open_draft(folder, choice, config, check);
    Plan draft_plan;
    RopeSlabs draft_rope;
    if (draft) {
        Collector draft_collector(draft->files, draft->folder->path(), draft_prefix(draft->files));
        draft_rope = lay_out_draft(sketch, layout, &draft_collector, rank_shape(draft->config.shape, tp),
                                   config.shape.max_positions);
        draft_plan =
            draft_collector.finish([](std::string_view name) { return name.ends_with(".rotary_emb.inv_freq"); });
        info.draft_parameters = draft_plan.parameters;
    }
    info.expert_bytes *= static_cast<uint64_t>(tp);
    info.weight_bytes = layout.bytes() * static_cast<uint64_t>(tp);

    check();
    loaded->alloc(tp, layout.bytes());
    loaded->ranks.resize(static_cast<size_t>(tp));
    for (int r = 0; r < tp; ++r) {
        Model& model = loaded->ranks[static_cast<size_t>(r)];
        Layout rank(loaded->arena(r));
        uint64_t expert_bytes = 0;
        lay_out_target(model, expert_bytes, rank, nullptr, rank_shape(config.shape, tp, r));
        if (draft) lay_out_draft(model, rank, nullptr, rank_shape(draft->config.shape, tp), config.shape.max_positions);
        KD_CHECK(rank.bytes() == layout.bytes());
    }

    progress.bytes_total = plan.read_bytes + draft_plan.read_bytes;
    progress.phase = KD_LOAD_READ;
    std::vector<uint8_t> chunk(kChunkBytes), share(2 * kChunkBytes);
    Hash hash;
    const auto hash_part = [&](const std::string& config_json, uint64_t tensors) {
        hash.add(config_json);
        hash.add(&tensors, sizeof tensors);
    };
    hash_part(config_text, Filler(*loaded, progress, files, chunk, share).fill(plan));
    if (draft) hash_part(draft->config_text, Filler(*loaded, progress, draft->files, chunk, share).fill(draft_plan));
    info.content_hash = hash.value();

    progress.phase = KD_LOAD_PREPARE;
    const int positions = config.shape.max_positions;
    fill_rope(*loaded, progress, rope, config.rotary, config.shape.rope, positions, share);
    if (draft)
        fill_rope(*loaded, progress, draft_rope, draft->config.rotary, draft->config.shape.head_dim, positions, share);
    for (size_t r = 0; r < loaded->ranks.size(); ++r) {
        device::bind(device::context(group, static_cast<int>(r)));
        for (const Layer& layer : loaded->ranks[r].layers) {
            check();
            if (!layer.dense) ops::pack_experts(layer.routed);
        }
    }
    check();
    return loaded;
}

}  // namespace

std::unique_ptr<Loaded> load(const std::string& path, const DraftChoice& draft, device::Group& group, int tp,
                             Progress& progress) {
    progress.start_us = now_us();
    try {
        return load_folder(path, draft, group, tp, progress);
    } catch (const std::bad_alloc&) {
        fail(KD_E_NOMEM, "%s: not enough memory to load it; use a machine with more, or a smaller model",
             printable(path, 300).c_str());
    }
}

}  // namespace kd::model
