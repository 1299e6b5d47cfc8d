// What stages.h saw, as JSON.
#pragma once

#include <string>

#include "probe_json.h"
#include "stages.h"

namespace kd::probe {

// [{part, recorded, ns: [plays], calls: [{op, of, what it must do, ns: [plays]}]}], with `room` stamps; on the rank's thread.
std::string stages_of(const Stages& stages, int room, const Model& model);

}  // namespace kd::probe
