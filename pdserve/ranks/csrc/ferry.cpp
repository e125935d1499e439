// One expert's weights over the ferry, beside the steps: slice by slice with rests between, and a sum over all.
//
// The whole way is one call, so its thread needs the interpreter's lock at the beginning and at the end only: a
// slice that had to ask for it made steps beside it wait for a thread that had no core.
//
// The sum is a polynomial in eight interleaved lanes of 64-bit words (h = h * odd + word), the lanes then summed
// alike: any one changed word changes it for certain, as an odd factor has an inverse modulo 2^64.
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#define PDF_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr uint64_t kFactor = 0x9E3779B97F4A7C15;  // 2^64 over the golden ratio: odd, with bits all over
constexpr long kLanes = 8, kBlock = kLanes * 8;

class Sum {
  public:
    void add(const char* data, long bytes) {
        uint64_t words[kLanes];
        for (long at = 0; at < bytes; at += kBlock) {
            const long here = std::min(kBlock, bytes - at);
            if (here < kBlock) std::memset(words, 0, sizeof words);
            std::memcpy(words, data + at, here);
            for (long i = 0; i < kLanes; i++) lanes_[i] = lanes_[i] * kFactor + words[i];
        }
    }
    uint64_t value() const {
        uint64_t all = 0;
        for (const uint64_t lane : lanes_) all = all * kFactor + lane;
        return all;
    }

  private:
    uint64_t lanes_[kLanes] = {};
};

void rest(long ns) {
    timespec left{ns / 1000000000L, ns % 1000000000L};
    while (ns > 0 && nanosleep(&left, &left) != 0) {
    }
}

}  // namespace

struct Piece {  // of a block
    char* start;
    int64_t bytes;
};

// Copies a block's pieces to the lane (out) or from it. slice: a multiple of 64. A flag that is not 0 gives up.
// False: given up, and nothing is summed.
PDF_EXPORT int pdf_carry(const Piece* pieces, long count, char* lane, int out, long slice, long rest_ns,
                         const std::atomic<int32_t>* given_up, const std::atomic<int32_t>* closed,
                         uint64_t* value) {
    Sum sum;
    for (long p = 0; p < count; p++) {
        char* block = pieces[p].start;
        for (long at = 0; at < pieces[p].bytes; at += slice) {
            const long here = std::min(slice, static_cast<long>(pieces[p].bytes - at));
            std::memcpy(out ? lane + at : block + at, out ? block + at : lane + at, here);
            sum.add(block + at, here);
            rest(rest_ns);
            if (given_up->load() || closed->load()) return 0;
        }
        lane += pieces[p].bytes;
    }
    *value = sum.value();
    return 1;
}
