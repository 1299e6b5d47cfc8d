// Best-first expansion: the `budget` most probable prefixes under the product of the depths' distributions. Probabilities
// only fall along a path and along a row, so the best prefix not yet taken is always the next sibling or the first child
// of one that is. Trees are compared with the paper's reference implementation entry by entry; that fixes the type
// (double), the form of the sums (subtract, then add) and the order among equals (ranks along the path, compared from the
// root). native/cuda/tree.cu does the same.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace kd {

class BestFirst {
  public:
    // Reserves all that trees of up to max_nodes need. May throw std::bad_alloc; grow() does not allocate.
    explicit BestFirst(int max_nodes) : max_nodes_(max_nodes) {
        nodes_.reserve(static_cast<size_t>(max_nodes) + 1);
        frontier_.reserve(static_cast<size_t>(max_nodes) + 2);
    }

    // token, parent [min(budget, max_nodes)] from the first `width` columns of a table [depths][stride]. Returns the number of
    // nodes.
    int grow(int32_t* token, int32_t* parent, const int32_t* table_token, const float* table_logprob, int depths,
             int width, int stride, int budget) {
        budget = std::min(budget, max_nodes_);
        nodes_.assign(1, Node{});
        frontier_.clear();
        const auto logprob = [=](int depth, int rank) {
            return static_cast<double>(table_logprob[static_cast<size_t>(depth - 1) * static_cast<size_t>(stride) +
                                                     static_cast<size_t>(rank)]);
        };
        int n = 0;
        if (depths > 0 && width > 0 && budget > 0) push(logprob(1, 0), 0, 0, 1);
        while (n < budget && !frontier_.empty()) {
            const Node node = pop();
            token[n] = table_token[static_cast<size_t>(node.depth - 1) * static_cast<size_t>(stride) +
                                   static_cast<size_t>(node.rank)];
            parent[n] = node.parent;
            n++;
            nodes_.push_back(node);
            if (node.rank + 1 < width) {
                const double without = node.value - logprob(node.depth, node.rank);
                push(without + logprob(node.depth, node.rank + 1), node.parent, node.rank + 1, node.depth);
            }
            if (node.depth < depths) push(node.value + logprob(node.depth + 1, 0), n, 0, node.depth + 1);
        }
        return n;
    }

  private:
    struct Node {
        double value = 0;  // log-probability of the path
        int parent = 0;    // index in nodes_; 0 is the root
        int rank = 0;      // place in its depth's row of the table
        int depth = 0;
    };

    // Lexicographic order of the ranks along the two paths; a prefix comes before what it is a prefix of.
    bool path_before(const Node& a, const Node& b) const {
        const Node *p = &a, *q = &b;
        while (p->depth > q->depth) p = &nodes_[static_cast<size_t>(p->parent)];
        while (q->depth > p->depth) q = &nodes_[static_cast<size_t>(q->parent)];
        while (p->parent != q->parent) {
            p = &nodes_[static_cast<size_t>(p->parent)];
            q = &nodes_[static_cast<size_t>(q->parent)];
        }
        return p->rank != q->rank ? p->rank < q->rank : a.depth < b.depth;
    }

    bool worse(const Node& a, const Node& b) const {
        return a.value != b.value ? a.value < b.value : path_before(b, a);
    }

    void push(double value, int parent, int rank, int depth) {
        // NaN has no order: last, like what cannot happen.
        if (value != value) value = -std::numeric_limits<double>::infinity();
        frontier_.push_back({value, parent, rank, depth});
        std::push_heap(frontier_.begin(), frontier_.end(),
                       [this](const Node& a, const Node& b) { return worse(a, b); });
    }

    Node pop() {
        std::pop_heap(frontier_.begin(), frontier_.end(), [this](const Node& a, const Node& b) { return worse(a, b); });
        const Node best = frontier_.back();
        frontier_.pop_back();
        return best;
    }

    std::vector<Node> nodes_;     // taken: the root, then nodes 1..n
    std::vector<Node> frontier_;  // a binary heap, best in front; every node taken adds at most one to it
    int max_nodes_;
};

}  // namespace kd
