// Everything of a load up to the first weight: what the folder is, and where its parts go.
#pragma once

#include "model/packed.h"

namespace kd::model {

struct DraftSource {
    std::unique_ptr<Folder> folder;
    std::string config_text;
    DraftConfig config;
};

struct Opening {
    Config config;
    std::string config_text;
    std::unique_ptr<DraftSource> draft;
    RopeSlabs rope, draft_rope;
    Checkpoint files, draft_files;  // of a published folder
    Plan plan, draft_plan;
    std::unique_ptr<PackedAbout> about;  // of a packed one
    std::unique_ptr<Packed> packed;      // of a packed one that is to be loaded
    Info info;
    Packing packing;
};

constexpr int kLookOnly = 0;  // as `tp`: a packed folder may be one of another backend, and its parts are not looked at

// Opens and checks the folder for `tp` ranks; `pause` is called now and then and may throw.
std::unique_ptr<Opening> open_model(const Folder& folder, const DraftChoice& choice, int tp,
                                    const std::function<void()>& pause);

}  // namespace kd::model
