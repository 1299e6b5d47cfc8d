// The rows of one step, put together on the host and copied to each rank once.
#pragma once

#include <vector>

#include "rank.h"

namespace kd {

class StepView {
  public:
    // Room for the largest step; nothing is allocated afterwards.
    explicit StepView(const Limits& limits);

    void clear();
    // A sequence of the step; its pages in slot order. Returns its index.
    int add_stream(const std::vector<int32_t>& pages);
    // A row; `mask` holds kMaskWords words. Returns its index.
    int add_row(int32_t token, int32_t position, int32_t stream, int32_t slot, int32_t prefix, const uint64_t* mask);
    // A row that sees all of the sequence before it: a prompt token, or plain decoding.
    int add_causal_row(int32_t token, int32_t position, int32_t stream);
    void want_logits(int32_t row) { out_row_.push_back(row); }

    int n_rows() const { return int(token_.size()); }
    int n_streams() const { return int(pages_.size()); }
    int n_out() const { return int(out_row_.size()); }
    int32_t out_row(int i) const { return out_row_[i]; }

    View upload(Rank& rank) const;

  private:
    std::vector<int32_t> token_, position_, stream_, slot_, prefix_, out_row_;
    std::vector<uint64_t> mask_;
    std::vector<const std::vector<int32_t>*> pages_;
    int max_pages_ = 0;
};

}  // namespace kd
