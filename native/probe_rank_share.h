// A rank's share of a model, built in device memory with random weights of realistic scale.
#pragma once

#include <map>
#include <random>
#include <string>
#include <vector>

#include "device.h"
#include "probe_rank.h"
#include "rank.h"

namespace kd::probe {

constexpr int kDrift = 64 * (KD_MAX_DEPTH + 1);  // tokens that measuring may add to a stream

// What a share takes, in bytes.
struct Account {
    uint64_t shard = 0;  // of which:
    uint64_t experts = 0, draft = 0;
    uint64_t kv = 0, kv_token = 0;
    uint64_t left = 0;  // on the device
};

// Random values in device memory, one pattern a kind and spread, from which everything is filled: weights are stretches of it.
class Patterns {
  public:
    Patterns();
    ~Patterns();
    Patterns(const Patterns&) = delete;
    Patterns& operator=(const Patterns&) = delete;

    void bf16(void* to, size_t n, double spread, double middle = 0);
    void fp32(void* to, size_t n, double spread);  // values of bf16, as a checkpoint's are
    void ones(void* to, size_t n);                 // fp32
    void nibbles(void* to, size_t words);
    void scales(void* to, size_t n, double size);
    void act(Rows rows, size_t n, double spread);

  private:
    template <class T, class F>
    void fill(void* to, size_t n, const std::string& kind, F&& make);

    struct Pattern {
        void* p;
        size_t bytes;
    };
    std::vector<float> normal_;
    std::map<std::string, Pattern> made_;
    size_t turn_ = 0;
};

// Of the bound rank. What a share holds of each thing is taken for all there is: its own vocabulary, heads and experts.
class Share {
  public:
    explicit Share(const kd_share_options& options);
    ~Share();
    Share(const Share&) = delete;
    Share& operator=(const Share&) = delete;

    static Account account(const kd_share_options& options);

    Model model;
    Limits limits;
    const Account taken;
    int whole_vocab = 0;

    void fill(Rank& rank, Patterns& patterns);  // caches and rings

  private:
    void fill_weights(Patterns& patterns);
    void* memory_ = nullptr;
};

}  // namespace kd::probe
