// What a client asked, from submit to its last event.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/text.h"
#include "round.h"

namespace kd {

struct Request {
    uint64_t id = 0;
    uint64_t user = 0;
    uint32_t flags = 0;
    Sequence sequence;
    TextStream text;
    std::vector<std::string> stop_strings;
    std::string builder;  // with KD_REQUEST_OWN_BUILDER
    int budget = 0;

    uint64_t credit = 0;
    uint64_t starved_since_us = 0;    // when credit ran out; 0 while there is some
    uint32_t events = 0;              // sent: the next one's sequence number
    int cached = 0;                   // prompt tokens taken from the prefix cache
    uint64_t weights_generation = 0;  // of the model it was checked against
    bool ended = false;               // its last event is out; retire() drops it

    bool stops_at(int32_t token) const {
        for (int32_t id : sequence.stop_ids)
            if (id == token) return true;
        return false;
    }
};

}  // namespace kd
