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
// has up to `most_blocks` blocks and `most_panels` panels: together they fit the second cache. Tasks are as equal as
// they can be, and a multiple of the threads where panels suffice.
template <class Body>
void for_tiles(long blocks, long panels, long most_blocks, long most_panels, int threads, const Body& body) {
    const long chunks = (blocks + most_blocks - 1) / most_blocks;
    const long wanted = std::max((4 * threads + chunks - 1) / std::max(chunks, 1L), (panels + most_panels - 1) / most_panels);
    const long groups = std::min((wanted + threads - 1) / threads * threads, panels);
    parallel_for(chunks * groups, threads, [&](long task) {
        const long chunk = task / groups, group = task % groups;
        body(chunk * blocks / chunks, (chunk + 1) * blocks / chunks, group * panels / groups, (group + 1) * panels / groups);
    });
}
