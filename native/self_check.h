// Before a model is served: does this device compute what the operations say?
#pragma once

namespace kd {

// Runs the products, the router, the experts and the attentions on small random data on the bound rank and compares with sums
// in double on the host. Throws Error(KD_E_DEVICE) naming the operation, the device and the numbers. About 50 ms on the CPU.
// What is expected of the operation `spoil` is made wrong: a test shows with it that each is looked at.
void self_check(const char* device_name, const char* spoil = "");

}  // namespace kd
