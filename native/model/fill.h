// The tensors of one folder into the memory of all ranks, chunk by chunk, on several threads.
#pragma once

#include "model/load.h"
#include "model/plan.h"

namespace kd::model {

// Sum over tensors of the hash of name, type, shape and bytes: the order and the sharding do not matter. Checks what the files
// hold on the way: no NaN or infinity, no weight_shape that contradicts the packed tensor. progress.bytes_done grows.
uint64_t fill(Loaded& loaded, Progress& progress, const Checkpoint& files, const Plan& plan);

// Throws KD_E_CANCELLED once the load is to be given up.
void pause(const Progress& progress);

}  // namespace kd::model
