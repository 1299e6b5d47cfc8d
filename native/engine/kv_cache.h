// Which page of the KV cache belongs to whom. Host-side bookkeeping only: the rows themselves are in Rank's pools, where one
// page number holds KD_PAGE_TOKENS tokens of every layer, target and drafter alike.
//
// A page is free, private to one sequence, or published: a node of the prefix trie, whose path spells the tokens its rows
// were computed from. Published rows are never written again, so any number of sequences may read them. A sequence whose
// prompt ends inside a published page gets a private copy of the matching rows (copy-on-write). Only prompt rows are
// published. The trie belongs to one loaded model, so weights can never serve another model's rows.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "kd.h"

namespace kd {

class KvCache {
  public:
    explicit KvCache(int pages);

    // What the trie holds of a prompt: whole pages to share, and perhaps some rows of one more to copy.
    struct Prefix {
        std::vector<int32_t> pages;  // shared, in order
        int32_t copy_from = -1;      // page whose first copy_rows rows match too
        int copy_rows = 0;
        int tokens() const { return int(pages.size()) * KD_PAGE_TOKENS + copy_rows; }
    };

    // The longest prefix of tokens[0..n) that is published. Pins its pages until release().
    Prefix match(const int32_t* tokens, int n);

    // Append `count` private pages, evicting published pages that nobody reads, least recently used first. False, and
    // nothing changed, if there are not enough.
    bool allocate(std::vector<int32_t>& pages, int count);

    // Publish the rows of tokens[0..n) held by `pages`. Rows of a page past n stay the owner's to write.
    void publish(const int32_t* tokens, int n, const std::vector<int32_t>& pages);

    // One reader less for each page.
    void release(const std::vector<int32_t>& pages);
    void release(int32_t page);

    int total() const { return int(readers_.size()); }
    int free() const { return int(free_.size()); }
    int cached() const { return cached_; }  // published and read by nobody: given up when needed

  private:
    struct Node {
        Node* parent = nullptr;
        int32_t page = -1;
        std::vector<int32_t> tokens;  // whose rows it holds, <= KD_PAGE_TOKENS
        std::vector<std::unique_ptr<Node>> children;
        std::list<Node*>::iterator used;  // in lru_
    };

    Node* child_with(Node* node, const int32_t* tokens, int n);
    void touch(Node* node);
    void pin(int32_t page);
    bool evict_one();

    Node root_;
    std::vector<int> readers_;      // sequences using the page
    std::vector<Node*> published_;  // page -> its node
    std::vector<int32_t> free_;
    std::list<Node*> lru_;  // front: least recently used
    int cached_ = 0;
};

}  // namespace kd
