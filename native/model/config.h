// What a config.json means: pure, from text to numbers.
//
// Accepted: the text models of the Kimi K2 family (DeepseekV3ForCausalLM, or KimiK25ForConditionalGeneration with the
// text model in `text_config`), with experts in compressed-tensors' INT4 groups of 32; and DFlash drafters of the
// qwen3 kind. Whatever a config says that this engine would compute differently is refused by name. Keys nobody here
// knows are ignored, unless their name says that they change the arithmetic (a bias, a window, a scaling, ...) and
// their value is not "off". All failures are Error(KD_E_MODEL).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "types.h"

namespace kd::model {

// Largest values accepted. They keep every count of rows and columns within int, and every row within a read chunk.
constexpr int kMaxHidden = 65'536;  // hidden, intermediate and low-rank sizes
constexpr int kMaxLayers = 1'024;
constexpr int kMaxHeads = 1'024;
constexpr int kMaxHeadDim = 1'024;  // nope, rope, v and drafter heads
constexpr int kMaxExperts = 4'096;
constexpr int kMaxExpertsPerToken = 64;
constexpr int kMaxSharedExperts = 16;
constexpr int kMaxVocab = 1 << 20;
constexpr int kMaxPositions = 1 << 21;
constexpr int kMaxTaps = 16;
constexpr int kMaxNextnLayers = 16;  // multi-token-prediction layers: skipped
constexpr size_t kMaxConfigBytes = 1 << 20;

// A rope as a config spells it.
struct Rotary {
    enum Kind { kPlain, kYarn, kDeepseekYarn } kind = kPlain;
    double theta = 0;
    double factor = 1;
    double beta_fast = 32, beta_slow = 1;
    double original_positions = 0;
    double mscale = 0, mscale_all_dim = 0;  // 0: not given
    double attention_factor = 0;            // 0: not given
    bool truncate = true;
};

// Radians a position for each of dim / 2 pairs, as transformers' yarn (all lengths alike).
std::vector<double> rope_frequencies(const Rotary& rotary, int dim);
// What cosine and sine are multiplied by. kYarn: transformers' rule, attention_factor, else the ratio of both
// mscales, else 0.1 ln(factor) + 1. kDeepseekYarn: DeepSeek's own, where a missing mscale is 1 and a missing
// mscale_all_dim 0.
double rope_amplitude(const Rotary& rotary);

// What the target multiplies attention scores by, beside (nope + rope)^-0.5: get_mscale(factor, mscale_all_dim)
// squared.
double softmax_mscale(const Rotary& rotary);

struct Config {
    Shape shape;  // tp = 1: the _rank members are the whole
    Rotary rotary;
    int nextn_layers = 0;           // their tensors are skipped
    std::vector<int32_t> stop_ids;  // ascending
};

// `where` names the file in sentences.
Config parse_config(std::string_view text, const std::string& where);

// Adds eos_token_id of generation_config.json to config.stop_ids.
void add_stop_ids(Config& config, std::string_view text, const std::string& where);

struct DraftConfig {
    DraftShape shape;  // tp = 1
    Rotary rotary;
};
DraftConfig parse_draft_config(std::string_view text, const std::string& where, const Config& target);

// The share of one rank; refuses a tp that does not divide what must be divided.
Shape rank_shape(const Shape& whole, int tp, int rank);
DraftShape rank_shape(const DraftShape& whole, int tp);

}  // namespace kd::model
