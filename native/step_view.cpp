#include "step_view.h"

#include <algorithm>

namespace kd {

StepView::StepView(const Limits& l) {
    for (auto* v : {&token_, &position_, &stream_, &slot_, &prefix_, &out_row_}) v->reserve(l.rows);
    mask_.reserve(size_t(l.rows) * kMaskWords);
    pages_.reserve(l.streams);
}

void StepView::clear() {
    for (auto* v : {&token_, &position_, &stream_, &slot_, &prefix_, &out_row_}) v->clear();
    mask_.clear();
    pages_.clear();
    max_pages_ = 0;
}

int StepView::add_stream(const std::vector<int32_t>& pages) {
    pages_.push_back(&pages);
    max_pages_ = std::max(max_pages_, int(pages.size()));
    return int(pages_.size()) - 1;
}

int StepView::add_row(int32_t token, int32_t position, int32_t stream, int32_t slot, int32_t prefix,
                      const uint64_t* mask) {
    token_.push_back(token);
    position_.push_back(position);
    stream_.push_back(stream);
    slot_.push_back(slot);
    prefix_.push_back(prefix);
    mask_.insert(mask_.end(), mask, mask + kMaskWords);
    return n_rows() - 1;
}

int StepView::add_causal_row(int32_t token, int32_t position, int32_t stream) {
    static constexpr uint64_t self[kMaskWords] = {1};
    return add_row(token, position, stream, position, position, self);
}

View StepView::upload(Rank& rank) const {
    const ViewArrays& a = rank.view;
    View v = a.view();
    v.n_rows = n_rows();
    v.n_streams = n_streams();
    v.n_out = n_out();
    v.max_pages = max_pages_;
    device::upload(a.token, token_.data(), token_.size());
    device::upload(a.position, position_.data(), position_.size());
    device::upload(a.stream, stream_.data(), stream_.size());
    device::upload(a.slot, slot_.data(), slot_.size());
    device::upload(a.prefix, prefix_.data(), prefix_.size());
    device::upload(a.mask, mask_.data(), mask_.size());
    device::upload(a.out_row, out_row_.data(), out_row_.size());
    for (int s = 0; s < v.n_streams; s++)
        device::upload(a.page_table + size_t(s) * max_pages_, pages_[s]->data(), pages_[s]->size());
    return v;
}

}  // namespace kd
