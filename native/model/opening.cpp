#include "model/opening.h"

#include <algorithm>

#include "model/hash.h"
#include "model/refuse.h"

namespace kd::model {

namespace {

constexpr char kConfigName[] = "config.json";
constexpr char kGenerationName[] = "generation_config.json";
constexpr char kDraftName[] = "draft";

std::unique_ptr<DraftSource> open_draft(const Folder& folder, const DraftChoice& choice, const Config& target,
                                        const PackedAbout* packed) {
    if (packed && choice.mode == DraftChoice::kPath)
        refuse(folder.path(),
               "is packed, and a packed model's drafter is packed with it; give the drafter to `kdctl "
               "convert`, or load the checkpoint itself");
    if (choice.mode == DraftChoice::kNone) return nullptr;
    if (choice.mode == DraftChoice::kAuto && !(packed ? packed->draft : folder.has(kDraftName))) return nullptr;
    auto draft = std::make_unique<DraftSource>();
    draft->folder = choice.mode == DraftChoice::kPath
                        ? std::make_unique<Folder>(choice.path, folder.links(), "drafter's folder")
                        : std::make_unique<Folder>(folder, kDraftName);
    if (!draft->folder->has(kConfigName) && !has_weights(*draft->folder))
        refuse(draft->folder->path(),
               "holds no drafter: there is neither a config.json nor weights; give the folder of a DFlash drafter, or "
               "draft 'none'");
    draft->config_text = draft->folder->read_text(kConfigName, kMaxConfigBytes);
    draft->config = parse_draft_config(draft->config_text, draft->folder->path_of(kConfigName), target);
    return draft;
}

uint64_t hash_of(const std::string& text) {
    Hash hash;
    hash.add(text);
    return std::max<uint64_t>(hash.value(), 1);  // 0 says that there is none
}

void open_parts(Opening& o, const Folder& folder, const DraftChoice& choice, int tp,
                const std::function<void()>& pause) {
    const bool look_only = tp == kLookOnly, packed = is_packed(folder);
    if (packed) o.about = std::make_unique<PackedAbout>(about_packed(folder));
    if (look_only) tp = packed ? o.about->tp : 1;
    Layout layout;
    Model sketch;
    const Shape shape = rank_shape(o.config.shape, tp, 0);
    const auto target_done = [&] {
        o.packing.target_bytes = layout.bytes();
        o.packing.target_fingerprint = layout.fingerprint();
    };
    if (packed) {
        o.draft = open_draft(folder, choice, o.config, o.about.get());
        o.rope = lay_out_target(sketch, o.info.expert_bytes, layout, nullptr, shape);
        target_done();
        if (o.draft)
            o.draft_rope = lay_out_draft(sketch, layout, nullptr, rank_shape(o.draft->config.shape, tp),
                                         o.config.shape.max_positions);
    } else {
        o.files = open_checkpoint(folder, pause);
        const std::string prefix = target_prefix(o.files);
        Collector collector(o.files, folder.path(), prefix);
        o.rope = lay_out_target(sketch, o.info.expert_bytes, layout, &collector, shape);
        target_done();
        o.plan = collector.finish([&](std::string_view name) { return is_skipped(name, prefix, o.config); });
        o.info.parameters = o.plan.parameters;
        o.info.skipped = o.plan.skipped.size();
        o.draft = open_draft(folder, choice, o.config, nullptr);
        if (o.draft) {
            o.draft_files = open_checkpoint(*o.draft->folder, pause);
            Collector of_draft(o.draft_files, o.draft->folder->path(), draft_prefix(o.draft_files));
            o.draft_rope = lay_out_draft(sketch, layout, &of_draft, rank_shape(o.draft->config.shape, tp),
                                         o.config.shape.max_positions);
            o.draft_plan =
                of_draft.finish([](std::string_view name) { return name.ends_with(".rotary_emb.inv_freq"); });
            o.info.draft_parameters = o.draft_plan.parameters;
        }
    }
    o.info.expert_bytes *= static_cast<uint64_t>(tp);
    o.info.weight_bytes = layout.bytes() * static_cast<uint64_t>(tp);
    o.packing.parts = layout.parts();
    o.packing.bytes = layout.bytes();
    o.packing.fingerprint = layout.fingerprint();
    o.packing.config_hash = hash_of(o.config_text);
    o.packing.draft_config_hash = o.draft ? hash_of(o.draft->config_text) : 0;
    if (!packed) return;
    if (look_only)
        look_at_packed(folder, o.packing, *o.about);
    else
        o.packed = std::make_unique<Packed>(folder, o.packing, tp);
    const Info& found = look_only ? o.about->info : o.packed->info();
    o.info.parameters = found.parameters;
    o.info.draft_parameters = found.draft_parameters;
    o.info.content_hash = found.content_hash;
    o.info.target_hash = found.target_hash;
}

}  // namespace

std::unique_ptr<Opening> open_model(const Folder& folder, const DraftChoice& choice, int tp,
                                    const std::function<void()>& pause) {
    auto o = std::make_unique<Opening>();  // in place: plans point into what it holds
    if (!folder.has(kConfigName) && !is_packed(folder) && !has_weights(folder))
        refuse(
            folder.path(),
            "holds no model: there is neither a config.json nor weights; give the folder that Hugging Face's files are "
            "in, or one that `kdctl convert` has made");
    o->config_text = folder.read_text(kConfigName, kMaxConfigBytes);
    o->config = parse_config(o->config_text, folder.path_of(kConfigName));
    if (folder.has(kGenerationName))
        add_stop_ids(o->config, folder.read_text(kGenerationName, kMaxConfigBytes), folder.path_of(kGenerationName));
    o->info.stop_ids = o->config.stop_ids;
    open_parts(*o, folder, choice, tp, pause);
    return o;
}

}  // namespace kd::model
