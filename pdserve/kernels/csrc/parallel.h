// Sharing work among threads: independent items, taken one at a time by whoever is free.
#pragma once

#include "common.h"

// Calls call(body, i) for every i in [0, count), on this thread and on whichever helpers come in time.
void run_shared(int64_t count, void (*call)(const void* body, int64_t i), const void* body);

// body(i) for every i in [0, count); on this thread alone where threads is 1.
template <class Body> void parallel_for(int64_t count, int threads, const Body& body) {
    if (threads <= 1 || count <= 1) {
        for (int64_t i = 0; i < count; i++) body(i);
        return;
    }
    run_shared(count, [](const void* b, int64_t i) { (*static_cast<const Body*>(b))(i); }, &body);
}

// The same for items too small to be taken singly.
template <class Body> void parallel_for_runs(int64_t count, int threads, const Body& body) {
    const int64_t runs = threads <= 1 ? 1 : count < threads * 4 ? count : threads * 4;
    parallel_for(runs, threads, [&](int64_t run) {
        for (int64_t i = count * run / runs; i < count * (run + 1) / runs; i++) body(i);
    });
}
