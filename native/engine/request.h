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
    std::vector<int32_t> stop_ids;  // its own; the model's come on top in sequence.stop_ids
    std::string builder;            // with KD_REQUEST_OWN_BUILDER
    int budget = 0;

    uint64_t credit = 0;
    uint64_t starved_since_us = 0;    // when credit ran out; 0 while there is some
    uint32_t events = 0;              // sent: the next one's sequence number
    int cached = 0;                   // prompt tokens taken from the prefix cache
    uint64_t weights_generation = 0;  // of the model it was checked against
    uint64_t text_id = 0;             // of the model its tokens were made for; 0: any
    bool ended = false;               // its last event is out; retire() drops it

    // From now on it is a request to this model.
    void be_for(const kd_model_info& model) {
        weights_generation = model.weights_generation;
        sequence.stop_ids = stop_ids;
        if (!(flags & KD_REQUEST_IGNORE_EOS))
            sequence.stop_ids.insert(sequence.stop_ids.end(), model.stop_ids, model.stop_ids + model.n_stop_ids);
    }
    bool stops_at(int32_t token) const {
        for (int32_t id : sequence.stop_ids)
            if (id == token) return true;
        return false;
    }
};

}  // namespace kd
