// What a model folder holds, as JSON, without loading it. docs/operations.md lists the members.
#pragma once

#include "model/load.h"

namespace kd::model {

// The same checks as a load's, up to the first weight. Throws as load() does.
std::string inspect(const std::string& path, const DraftChoice& draft, Links links);

}  // namespace kd::model
