// Work shared by the threads of torch's own OpenMP pool: the library is linked to no other.
#pragma once
#include <cstdint>
#include <omp.h>

namespace yo {

// Calls body(first, stop) once a thread, with equal shares of 0 .. items - 1.
template <class Body>
inline void parallel_ranges(int threads, int64_t items, Body body) {
    if (items < threads) threads = (int)items;
    if (threads <= 1) {
        if (items > 0) body((int64_t)0, items);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        int64_t id = omp_get_thread_num(), count = omp_get_num_threads();
        int64_t first = items * id / count, stop = items * (id + 1) / count;
        if (first < stop) body(first, stop);
    }
}

// Calls body(item) for 0 .. items - 1 in any order, each thread taking the next that is left.
template <class Body>
inline void parallel_items(int threads, int64_t items, Body body) {
    if (items < threads) threads = (int)items;
    if (threads <= 1) {
        for (int64_t i = 0; i < items; ++i) body(i);
        return;
    }
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t i = 0; i < items; ++i) body(i);
}

}  // namespace yo
