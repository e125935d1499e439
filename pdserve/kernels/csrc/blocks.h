// How the rows of a product are cut into blocks, and blocks and panels into tasks. No maths.
#pragma once

#include <algorithm>

#include "parallel.h"

// Rows in nearly equal blocks: block i starts at start(i).
struct RowBlocks {
    long count, base, extra;

    RowBlocks(long rows, long most) : count((rows + most - 1) / most), base(count ? rows / count : 0), extra(count ? rows % count : 0) {}
    long start(long i) const { return i * base + std::min(i, extra); }
    long size(long i) const { return base + (i < extra); }
};

// Calls body(first block, end block, first panel, end panel) until every pair was there once, on all threads. A task
// has up to `most_blocks` blocks and `most_panels` panels: together they fit the second cache.
template <class Body>
void for_tiles(long blocks, long panels, long most_blocks, long most_panels, int threads, const Body& body) {
    const long chunks = (blocks + most_blocks - 1) / most_blocks;
    const long at_once = std::clamp<long>(chunks * panels / (4 * threads), 1, most_panels);
    const long groups = (panels + at_once - 1) / at_once;
    parallel_for(chunks * groups, threads, [&](long task) {
        const long block = task / groups * most_blocks, panel = task % groups * at_once;
        body(block, std::min(block + most_blocks, blocks), panel, std::min(panel + at_once, panels));
    });
}
