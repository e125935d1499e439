// Copies pages out of a peer's mapped pool and digests them in the same pass, between two looks at the page's
// generation. One thread, no allocation, no lock; the caller holds the memory.
//
// Whole blocks go to the target past the cache: a page is not read again before the next decode step, and a plain
// store would first fetch each line that it overwrites. The digest is taken of the registers that are stored.

#include <algorithm>

#include "page_digest.h"

namespace {

constexpr size_t PREFETCH = 8192;  // into the second level; the hardware's own stops at a 4 KiB border

enum State : uint64_t { MOVING = 0, ARRIVED = 1, STALE = 2 };

// Mirrors kvtransfer/mover.py, 8-byte fields only. moved, lanes: where a page stands that is moved in parts.
struct Piece {
    const uint8_t* source;
    uint8_t* target;
    const uint64_t* generation;
    uint64_t wanted;
    uint64_t index;
    uint64_t valid_rows;
    uint64_t state;
    uint8_t digest[16];
    uint64_t moved;
    uint64_t lanes[8];
};

template <bool DIGEST, bool ALIGNED>
void move_blocks(xxh3::Lanes& lanes, uint8_t* to, const uint8_t* from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += xxh3::BLOCK) {
        for (size_t n = 0; n < xxh3::BLOCK; n += xxh3::STRIPE)
            _mm_prefetch(reinterpret_cast<const char*>(from + at + PREFETCH + n), _MM_HINT_T1);
        for (size_t n = 0; n < xxh3::BLOCK / xxh3::STRIPE; n++) {
            const size_t here = at + n * xxh3::STRIPE;
            const xxh3::Lanes data = xxh3::Lanes::load(from + here);
            if (ALIGNED)
                data.stream(to + here);
            else
                data.store(to + here);
            if (DIGEST) lanes.accumulate(data, xxh3::SECRET + 8 * n);
        }
        if (DIGEST) lanes.scramble(xxh3::SECRET + xxh3::SECRET_BYTES - xxh3::STRIPE);
    }
}

// Moves at most `budget` bytes of a page, whole blocks but for its end.
template <bool DIGEST>
size_t move_part(const uint8_t* header, Piece& piece, size_t page_bytes, size_t budget) {
    const size_t whole = page_digest::whole_blocks(page_bytes);
    xxh3::Lanes lanes = xxh3::Lanes::load(piece.lanes);
    if (DIGEST && piece.moved == 0) lanes = page_digest::begin(header, piece.index, piece.valid_rows);
    const size_t bytes = std::min(whole - piece.moved, std::max(budget / xxh3::BLOCK, size_t{1}) * xxh3::BLOCK);
    uint8_t* to = piece.target + piece.moved;
    if (reinterpret_cast<uintptr_t>(to) % xxh3::STRIPE == 0)
        move_blocks<DIGEST, true>(lanes, to, piece.source + piece.moved, bytes);
    else
        move_blocks<DIGEST, false>(lanes, to, piece.source + piece.moved, bytes);
    piece.moved += bytes;
    if (piece.moved == whole) {
        std::memcpy(piece.target + whole, piece.source + whole, page_bytes - whole);
        piece.moved = page_bytes;
        if (DIGEST) page_digest::end(lanes, header, piece.target, page_bytes, piece.digest);
    }
    lanes.store(piece.lanes);
    _mm_sfence();  // stores past the cache are in no order otherwise
    return bytes;
}

bool is_current(const Piece& piece) {
    // The loads of the copy before the load of the generation: the second look must not be early.
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(piece.generation, __ATOMIC_ACQUIRE) == piece.wanted;
}

template <bool DIGEST>
int64_t move_all(const uint8_t* header, Piece* pieces, int64_t count, size_t page_bytes, size_t budget) {
    int64_t ended = 0;
    while (ended < count && budget > 0) {
        Piece& piece = pieces[ended];
        bool current = is_current(piece);
        if (current) {
            budget -= std::min(budget, move_part<DIGEST>(header, piece, page_bytes, budget) + 1);
            current = is_current(piece);
        }
        if (!current)
            piece.state = STALE;
        else if (piece.moved == page_bytes)
            piece.state = ARRIVED;
        ended += piece.state != MOVING;
    }
    return ended;
}

}  // namespace

extern "C" {

// Moves pages one after the other until `budget` bytes are moved or all have ended; call again from the first that
// has not. header: HEADER_BYTES, of which index and valid rows are filled in here; null takes no digest. Returns how
// many ended.
__attribute__((visibility("default"))) int64_t kvt_move(const uint8_t* header, void* pieces, int64_t count,
                                                        int64_t page_bytes, int64_t budget) {
    auto* first = static_cast<Piece*>(pieces);
    const auto bytes = static_cast<size_t>(page_bytes), most = static_cast<size_t>(budget);
    if (header != nullptr) return move_all<true>(header, first, count, bytes, most);
    return move_all<false>(header, first, count, bytes, most);
}
}
