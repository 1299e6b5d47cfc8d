// What a kd_engine* points to.
#pragma once

#include "engine/engine.h"

struct kd_engine {
    kd::Engine engine;
    explicit kd_engine(const kd::Options& options) : engine(options) {}
};
