// Shared declarations: descriptors passed from Python, dtypes, threads. No maths here (simd.h, tile.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#define PDS_EXPORT extern "C" __attribute__((visibility("default")))

enum Dtype : int { kFloat32 = 0, kBfloat16 = 1 };
enum Status : int { kOk = 0, kOutOfPool = 1 };

struct bf16 {
    uint16_t bits;
};

enum PageKind : int64_t { kFloat32Pages = 0, kBfloat16Pages = 1, kInt8Pages = 2 };

// A page is [num_layers][2][part]; see kv_view.py for the order inside a part. page_stride and part() are in elements
// of the storage; those of 8-bit pages are bytes, and a part's scales are among them.
struct KVDesc {
    void* storage;
    int64_t page_stride, num_pages, num_layers, num_kv_heads, head_dim, page_size, kind;

    int64_t codes() const { return num_kv_heads * head_dim * page_size; }
    int64_t part() const {
        return codes() + (kind == kInt8Pages ? static_cast<int64_t>(sizeof(float)) * num_kv_heads * page_size : 0);
    }
};

// See attention_meta.py: query_starts [B + 1], context_lens [B], block_tables [B][max_pages].
struct AttentionDesc {
    const int32_t* query_starts;
    const int32_t* context_lens;
    const int32_t* block_tables;
    int64_t num_seqs, max_pages;
};

// Threads of every parallel region; set from Python (results never depend on it).
extern int g_num_threads;

// Threads worth waking for so many elementary operations: waking them costs microseconds.
inline int threads_for(int64_t operations, int64_t worth) { return operations < worth ? 1 : g_num_threads; }

// A cache-line aligned buffer that only grows; one per thread and use.
class Scratch {
  public:
    ~Scratch() { std::free(data_); }

    template <class T> T* get(size_t count) {
        const size_t bytes = (count * sizeof(T) + 4095) / 4096 * 4096;
        if (bytes > size_) {
            std::free(data_);
            data_ = std::aligned_alloc(4096, bytes);
            if (data_ == nullptr) std::abort();
            size_ = bytes;
        }
        return static_cast<T*>(data_);
    }

  private:
    void* data_ = nullptr;
    size_t size_ = 0;
};
