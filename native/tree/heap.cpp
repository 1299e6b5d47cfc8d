// Best-first expansion: the `budget` most probable prefixes under the product of the depths' distributions. Probabilities
// only fall along a path and along a row, so the best prefix not yet taken is always the next sibling or the first child
// of one that is. Trees are compared with the paper's reference implementation entry by entry; that fixes the type
// (double), the form of the sums (subtract, then add) and the order among equals (ranks along the path, compared from the
// root).

#include <algorithm>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "tree/builder.h"

namespace kd::tree {
namespace {

struct Node {
    double value = 0;  // log-probability of the path
    int parent = 0;    // index in `nodes`; 0 is the root
    int rank = 0;      // place in its depth's row of the table
    int depth = 0;
};

struct Heap {
    std::vector<Node> nodes;     // taken: the root, then nodes 1..n
    std::vector<Node> frontier;  // a binary heap, best in front; every node taken adds at most one to it
    int max_nodes;

    explicit Heap(int max_nodes) : max_nodes(max_nodes) {
        nodes.reserve(static_cast<size_t>(max_nodes) + 1);
        frontier.reserve(static_cast<size_t>(max_nodes) + 2);
    }

    // Lexicographic order of the ranks along the two paths; a prefix comes before what it is a prefix of.
    bool path_before(const Node& a, const Node& b) const {
        const Node *p = &a, *q = &b;
        while (p->depth > q->depth) p = &nodes[p->parent];
        while (q->depth > p->depth) q = &nodes[q->parent];
        while (p->parent != q->parent) {
            p = &nodes[p->parent];
            q = &nodes[q->parent];
        }
        return p->rank != q->rank ? p->rank < q->rank : a.depth < b.depth;
    }

    void push(double value, int parent, int rank, int depth) {
        // NaN has no order: last, like what cannot happen.
        if (value != value) value = -std::numeric_limits<double>::infinity();
        frontier.push_back({value, parent, rank, depth});
        std::push_heap(frontier.begin(), frontier.end(), [this](const Node& a, const Node& b) { return worse(a, b); });
    }

    Node pop() {
        std::pop_heap(frontier.begin(), frontier.end(), [this](const Node& a, const Node& b) { return worse(a, b); });
        const Node best = frontier.back();
        frontier.pop_back();
        return best;
    }

    bool worse(const Node& a, const Node& b) const {
        return a.value != b.value ? a.value < b.value : path_before(b, a);
    }
};

void* create(int32_t max_nodes) {
    try {
        return new Heap(std::clamp(max_nodes, 0, KD_MAX_NODES));
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

int32_t build(void* self, const kd_tree_in* in, kd_tree_out* out) {
    Heap& heap = *static_cast<Heap*>(self);
    const int budget = std::min(in->budget, heap.max_nodes);
    heap.nodes.assign(1, Node{});
    heap.frontier.clear();
    const auto logprob = [in](int depth, int rank) {
        return static_cast<double>(in->logprob[static_cast<size_t>(depth - 1) * in->width + rank]);
    };

    int n = 0;
    if (in->depths > 0 && in->width > 0) heap.push(logprob(1, 0), 0, 0, 1);
    while (n < budget && !heap.frontier.empty()) {
        const Node node = heap.pop();
        out->token[n] = in->token[static_cast<size_t>(node.depth - 1) * in->width + node.rank];
        out->parent[n] = node.parent;
        n++;
        heap.nodes.push_back(node);
        if (node.rank + 1 < in->width) {
            const double without = node.value - logprob(node.depth, node.rank);
            heap.push(without + logprob(node.depth, node.rank + 1), node.parent, node.rank + 1, node.depth);
        }
        if (node.depth < in->depths) heap.push(node.value + logprob(node.depth + 1, 0), n, 0, node.depth + 1);
    }
    out->n = n;
    return KD_OK;
}

void destroy(void* self) { delete static_cast<Heap*>(self); }

}  // namespace

const kd_tree_builder heap = {
    sizeof(kd_tree_builder), KD_BUILDER_ABI, "heap", "the most probable paths, best first", create, build, destroy};

}  // namespace kd::tree
