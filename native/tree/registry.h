// The builders an engine knows, and what it does with their trees before it trusts them.
#pragma once

#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "tree/builder.h"

namespace kd::tree {

// A registered builder: the functions as given, the strings our own. Never moves, lives as long as its registry.
struct Builder {
    std::string name;
    std::string description;
    kd_tree_builder functions{};  // name and description point into this struct

    Builder(const kd_tree_builder& from);
    Builder(const Builder&) = delete;
    Builder& operator=(const Builder&) = delete;

    // Whether its trees hang on the drafter's table. All but `none` do.
    bool needs_drafter() const;
    // Whether ops::tree_build makes its trees (none: no trees).
    bool on_device() const;
    // Candidates of a depth that its trees of at most `budget` nodes can use.
    int width(int budget) const;
};

// One builder at work: what create() returned, given back to destroy(). Moveable. [one thread at a time]
class Instance {
  public:
    Instance() = default;
    Instance(const Builder& builder, int max_nodes);  // throws Error(KD_E_BUILDER) if create() returns NULL
    Instance(Instance&& from) noexcept;
    Instance& operator=(Instance&& from) noexcept;
    ~Instance();

    explicit operator bool() const { return builder_ != nullptr; }
    const Builder& builder() const { return *builder_; }
    // KD_OK or whatever the builder returned. The tree is not checked: check_tree().
    int build(const kd_tree_in& in, kd_tree_out& out) const { return builder_->functions.build(self_, &in, &out); }

  private:
    const Builder* builder_ = nullptr;
    void* self_ = nullptr;
};

// Built-in builders and those added later. Locks for itself: [any] thread. What find() and list() return stays valid
// until the registry is destroyed.
class Registry {
  public:
    Registry();

    // Copies the struct. Throws Error: KD_E_INVALID (name, NULL function, ABI), KD_E_SIZE or KD_E_TOO_NEW (size),
    // KD_E_EXISTS (name taken), KD_E_NOMEM (KD_MAX_BUILDERS reached).
    const Builder& add(const kd_tree_builder* builder);

    const Builder* find(std::string_view name) const;  // nullptr if there is none
    const Builder& get(const char* name) const;        // throws Error(KD_E_INVALID) for NULL, Error(KD_E_NOT_FOUND)
    std::vector<const Builder*> list() const;          // built-in ones first, then in order of registration

  private:
    const Builder& insert(const kd_tree_builder& builder);

    mutable std::mutex mutex_;
    std::deque<Builder> builders_;
};

// 1..31 of [a-z0-9_-].
bool valid_name(std::string_view name);

// What is wrong with a tree, or nullptr if nothing is: n in 0..budget, parents before children, no node deeper than the
// table or max_depth, tokens in [0, vocab), siblings distinct. `out` may hold anything; entries past budget are not read.
// No allocation.
const char* check_tree(const kd_tree_in& in, const kd_tree_out& out, int vocab, int max_depth = KD_MAX_DEPTH);

// gain[i - 1] of node i = the probability of its path by the table `in`; 0 if the path has a token the table does not. It is
// the number of tokens a round is expected to win by verifying the node. The tree must have passed check_tree(). No
// allocation.
void node_gains(double* gain, const kd_tree_in& in, const kd_tree_out& out);

// One stream's tree of a round and the table it was built from.
struct Planted {
    const kd_tree_in* in = nullptr;
    kd_tree_out* out = nullptr;
};

// While the rows of all trees (nodes and root) are more than max_rows, remove a last node: that of the tree whose last
// node has the least gain, of equals that of the highest stream. Roots stay. n_streams <= KD_MAX_STREAMS. The order is the
// same on every run, and what is cut changes no token, only how many are won in this round. Returns the number of rows
// left. No allocation.
int cut_trees(const Planted* trees, int n_streams, int max_rows);

// Behind kd_builder_build: checks every argument, runs a built-in builder, checks its tree. Throws Error.
void build_offline(const char* name, const kd_tree_in* in, kd_tree_out* out);

}  // namespace kd::tree
