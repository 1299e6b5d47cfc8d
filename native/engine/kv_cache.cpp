#include "engine/kv_cache.h"

#include <algorithm>

#include "error.h"

namespace kd {

KvCache::KvCache(int pages) : readers_(pages), published_(pages) {
    free_.reserve(pages);
    for (int p = pages; p-- > 0;) free_.push_back(p);
}

void KvCache::touch(Node* node) { lru_.splice(lru_.end(), lru_, node->used); }

void KvCache::pin(int32_t page) {
    if (readers_[page]++ == 0 && published_[page]) cached_--;
}

KvCache::Node* KvCache::child_with(Node* node, const int32_t* tokens, int n) {
    for (auto& child : node->children)
        if (int(child->tokens.size()) == n && std::equal(tokens, tokens + n, child->tokens.begin())) return child.get();
    return nullptr;
}

KvCache::Prefix KvCache::match(const int32_t* tokens, int n) {
    Prefix prefix;
    Node* node = &root_;
    int at = 0;
    while (n - at >= KD_PAGE_TOKENS) {
        Node* child = child_with(node, tokens + at, KD_PAGE_TOKENS);
        if (!child) break;
        pin(child->page);
        touch(child);
        prefix.pages.push_back(child->page);
        node = child;
        at += KD_PAGE_TOKENS;
    }
    Node* best = nullptr;
    for (auto& child : node->children) {
        const int most = std::min(n - at, int(child->tokens.size()));
        const auto end = std::mismatch(tokens + at, tokens + at + most, child->tokens.begin()).first;
        const int rows = int(end - (tokens + at));
        if (rows > prefix.copy_rows) {
            best = child.get();
            prefix.copy_rows = rows;
        }
    }
    if (best) {
        pin(best->page);
        touch(best);
        prefix.copy_from = best->page;
    }
    return prefix;
}

bool KvCache::evict_one() {
    for (Node* node : lru_) {
        if (readers_[node->page] || !node->children.empty()) continue;
        const int32_t page = node->page;
        published_[page] = nullptr;
        cached_--;
        lru_.erase(node->used);
        auto& siblings = node->parent->children;
        siblings.erase(std::find_if(siblings.begin(), siblings.end(), [&](auto& c) { return c.get() == node; }));
        free_.push_back(page);
        return true;
    }
    return false;
}

bool KvCache::allocate(std::vector<int32_t>& pages, int count) {
    // A published page that nobody reads has only such descendants (a reader of a page reads all above it), so every
    // one of the `cached_` pages can be evicted, leaves first.
    if (int(free_.size()) + cached_ < count) return false;
    while (int(free_.size()) < count) KD_CHECK(evict_one());
    for (int i = 0; i < count; i++) {
        const int32_t page = free_.back();
        free_.pop_back();
        readers_[page] = 1;
        pages.push_back(page);
    }
    return true;
}

void KvCache::publish(const int32_t* tokens, int n, const std::vector<int32_t>& pages) {
    Node* node = &root_;
    for (int at = 0; at < n; at += KD_PAGE_TOKENS) {
        const int rows = std::min(n - at, KD_PAGE_TOKENS);
        const int32_t page = pages[at / KD_PAGE_TOKENS];
        Node* child = child_with(node, tokens + at, rows);
        // Another sequence published equal rows first. Hanging ours below its page, which we do not read, would let that page
        // be wanted for eviction while a descendant is in use.
        if (child && child->page != page) return;
        if (!child) {
            KD_CHECK(!published_[page]);
            auto fresh = std::make_unique<Node>();
            fresh->parent = node;
            fresh->page = page;
            fresh->tokens.assign(tokens + at, tokens + at + rows);
            fresh->used = lru_.insert(lru_.end(), fresh.get());
            published_[page] = fresh.get();
            child = fresh.get();
            node->children.push_back(std::move(fresh));
        }
        touch(child);
        node = child;
    }
}

void KvCache::release(int32_t page) {
    KD_CHECK(readers_[page] > 0);
    if (--readers_[page]) return;
    if (published_[page])
        cached_++;
    else
        free_.push_back(page);
}

void KvCache::release(const std::vector<int32_t>& pages) {
    for (int32_t page : pages) release(page);
}

}  // namespace kd
