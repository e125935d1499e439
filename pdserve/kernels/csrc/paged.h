// What attention over pages has in common, whatever is in them: a call, its items, where a span's keys lie. No maths.
// A work item is (sequence, tile of its rows, KV head); rows are the tile's tokens times the query heads of the KV head.
#pragma once

#include <atomic>
#include <vector>

#include "parallel.h"
#include "tile.h"

constexpr int kBlock = 16;                // positions that share one base pointer; divides every page size
constexpr int kSpan = 256;                // positions between two looks at the running maximum
constexpr int kBlocks = kSpan / kBlock;
constexpr int kTileRows = 64;             // rows of an item, unless the group alone is larger
constexpr float kLowest = -1e30f;         // "no maximum yet": finite, so that differences stay numbers
constexpr int kFewRows = 5;               // up to so many rows, tiles are wider to have enough chains
constexpr int kBlockVectors = kBlock / VW;  // vectors of scores in a block
constexpr int kMaxGroup = 4;                // blocks side by side in a tile, at most

struct Call {
    const void* q;
    void* out;
    const KVDesc& kv;
    const AttentionDesc& meta;
    int64_t layer, num_heads;
    float scale;  // includes log2(e): weights are powers of two
    int64_t window;

    int64_t group() const { return num_heads / kv.num_kv_heads; }
};

struct Item {
    int32_t seq, first_token, num_tokens;

    int64_t first_row(const Call& call) const { return call.meta.query_starts[seq] + first_token; }
    int64_t first_position(const Call& call) const {
        const int64_t query_len = call.meta.query_starts[seq + 1] - call.meta.query_starts[seq];
        return call.meta.context_lens[seq] - query_len + first_token;
    }
};

// One span of keys of one head: bases of its blocks, and which of its positions count.
struct Span {
    int64_t origin;            // absolute position of block 0
    int from, to;              // blocks [from, to) hold positions that the row block sees
    int first, last;           // ... that any row of the item sees
    int end;                   // positions at or beyond are outside the item's context
    const u32* k[kBlocks + kMaxGroup];  // the last block's base repeats
    const u32* v[kBlocks];
};

// Few rows wait for memory: calls up the group's V, and K of the group after it.
PDS_INLINE void call_up(const Span& span, int block, int group, long k_step, long steps, long v_words) {
    for (int b = block; b < block + group && b < span.last; b++) {
        const u32* next = span.k[std::min(b + group, span.last)];
        for (long s = 0; s < steps; s++) _mm_prefetch(reinterpret_cast<const char*>(next + s * k_step), _MM_HINT_T0);
        for (long at = 0; at < v_words; at += 16)
            _mm_prefetch(reinterpret_cast<const char*>(span.v[b] + at), _MM_HINT_T0);
    }
}

// Calls found(block, K and V of the position's layer in its page, position's row in the page) for the blocks of
// [low, high); false for a page outside the pool. elem_bytes: of the storage.
template <class Found>
bool find_span(Span& span, const Call& call, int32_t seq, int64_t low, int64_t high, int64_t elem_bytes, const Found& found) {
    const KVDesc& kv = call.kv;
    const int32_t* table = call.meta.block_tables + seq * call.meta.max_pages;
    span.first = static_cast<int>(std::max<int64_t>(low - span.origin, 0) / kBlock);
    span.end = static_cast<int>(std::min<int64_t>(high - span.origin, kSpan));
    span.last = (span.end + kBlock - 1) / kBlock;
    for (int block = span.first; block < span.last; block++) {
        const int64_t position = span.origin + block * kBlock;
        const int64_t index = position / kv.page_size;
        if (index >= call.meta.max_pages || table[index] < 0 || table[index] >= kv.num_pages) return false;
        const int64_t at = table[index] * kv.page_stride + call.layer * 2 * kv.part();
        const char* k = static_cast<const char*>(kv.storage) + at * elem_bytes;
        found(block, k, k + kv.part() * elem_bytes, position % kv.page_size);
    }
    for (int i = 0; i < kMaxGroup; i++) span.k[span.last + i] = span.k[span.last - 1];
    return true;
}

// Sets the blocks that rows at positions [from, to] see; false if there are none.
inline bool narrow(Span& span, int64_t from, int64_t to, int64_t window) {
    const int64_t low = window > 0 ? std::max<int64_t>(from - window + 1 - span.origin, 0) : 0;
    const int64_t high = std::min<int64_t>(to + 1 - span.origin, kSpan);
    span.from = std::max(span.first, static_cast<int>(std::min<int64_t>(low, kSpan) / kBlock));
    span.to = static_cast<int>((high + kBlock - 1) / kBlock);
    return span.from < span.to;
}

// Items with the longest contexts first, so that no thread is left with one at the end.
inline int64_t list_items(std::vector<Item>& items, const AttentionDesc& meta, int64_t tokens_at_once) {
    int64_t work = 0;
    items.clear();
    for (int64_t seq = meta.num_seqs - 1; seq >= 0; seq--) {
        const int32_t query_len = meta.query_starts[seq + 1] - meta.query_starts[seq];
        work += static_cast<int64_t>(query_len) * meta.context_lens[seq];
        for (int32_t end = query_len; end > 0;) {
            const int32_t start = static_cast<int32_t>((end - 1) / tokens_at_once * tokens_at_once);
            items.push_back({static_cast<int32_t>(seq), start, end - start});
            end = start;
        }
    }
    return work;
}

// attend(item, KV head) for all of a call, on all threads where the work is worth it; false from one: kOutOfPool.
template <class Attend> int for_items(const Call& call, int64_t worth, const Attend& attend) {
    static thread_local std::vector<Item> items;
    const int64_t kv_heads = call.kv.num_kv_heads;
    const int64_t work = list_items(items, call.meta, std::max<int64_t>(kTileRows / call.group(), 1));
    const std::vector<Item>& listed = items;  // the caller's, in all threads
    const int threads = threads_for(work * call.num_heads * call.kv.head_dim, worth);
    std::atomic<bool> good{true};
    parallel_for(static_cast<int64_t>(listed.size()) * kv_heads, threads, [&](int64_t i) {
        if (!attend(listed[i / kv_heads], i % kv_heads)) good.store(false, std::memory_order_relaxed);
    });
    return good.load() ? kOk : kOutOfPool;
}

// Attention over 8-bit pages (attention8.cpp); dtype is that of q and out.
int attention8(const Call& call, int dtype);
