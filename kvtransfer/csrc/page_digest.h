// The digest of a page whose bytes come in pieces (kvtransfer/digest.py): a header of one block, then the page. Whoever
// has the bytes feeds whole blocks to xxh3::block up to `whole_blocks`; what follows them is for `end`.
#pragma once

#include <algorithm>

#include "xxh3.h"

namespace page_digest {

constexpr size_t HEADER_BYTES = xxh3::BLOCK;  // kvtransfer/digest.py pads the header to one block
constexpr size_t INDEX_AT = 16, ROWS_AT = 24;

inline size_t whole_blocks(size_t page_bytes) { return (page_bytes - 1) / xxh3::BLOCK * xxh3::BLOCK; }

inline xxh3::Lanes begin(const uint8_t* header, uint64_t index, uint64_t valid_rows) {
    uint8_t block[HEADER_BYTES];
    std::memcpy(block, header, sizeof block);
    const uint64_t swapped = __builtin_bswap64(index);
    const uint32_t rows = __builtin_bswap32(static_cast<uint32_t>(valid_rows));
    std::memcpy(block + INDEX_AT, &swapped, sizeof swapped);
    std::memcpy(block + ROWS_AT, &rows, sizeof rows);
    xxh3::Lanes lanes = xxh3::start();
    xxh3::block(lanes, block);
    return lanes;
}

// page: all of it. lanes: of the header and the page's whole blocks. out: 16 bytes.
inline void end(const xxh3::Lanes& lanes, const uint8_t* header, const uint8_t* page, size_t page_bytes, uint8_t* out) {
    uint8_t last[xxh3::STRIPE];
    const size_t own = std::min(page_bytes, xxh3::STRIPE), at = whole_blocks(page_bytes);
    std::memcpy(last, header + HEADER_BYTES - (xxh3::STRIPE - own), xxh3::STRIPE - own);
    std::memcpy(last + xxh3::STRIPE - own, page + page_bytes - own, own);
    xxh3::finish(lanes, page + at, page_bytes - at, last, HEADER_BYTES + page_bytes, out);
}

}  // namespace page_digest
