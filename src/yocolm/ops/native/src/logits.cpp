// Logits: the soft cap, and the greatest of each row.
#include <vector>

#include "elements.h"
#include "packed.h"

using namespace yo;

namespace {

constexpr int64_t CHUNK = 16384;  // of a row: the split is the same for any number of threads
constexpr int64_t BLOCK = 512;    // in which the greatest is searched for once it is known

template <class T>
void soft_cap(const T* x, float cap, float* out, int64_t count, int threads) {
    int64_t chunks = (count + CHUNK - 1) / CHUNK;
    parallel_ranges(threads_for(2 * count, threads), chunks, [&](int64_t first, int64_t stop) {
        int64_t from = first * CHUNK, end = stop * CHUNK < count ? stop * CHUNK : count;
        each_vector(end - from, [&](int64_t i, auto k) {
            set(out + from + i, vtanh(get(x + from + i, k) / cap) * cap, k);
        });
    });
}

struct Best {
    float value;
    int64_t at;
    bool nan;
};

template <class T>
Best best_of(const T* x, int64_t first, int64_t stop) {
    float best = -INFINITY;
    int64_t block = first;
    vf wrong = vf{};  // NaN in a lane that has seen NaN
    for (int64_t from = first; from < stop; from += BLOCK) {
        int64_t size = stop - from < BLOCK ? stop - from : BLOCK, i = 0;
        vf most = splat(-INFINITY);
        for (; i + VL <= size; i += VL) {
            vf v = load(x + from + i);
            wrong += v != v ? v : vf{};
            most = vmax(v, most);
        }
        if (i < size) {
            vf v = load_some(x + from + i, (int)(size - i), -INFINITY);
            wrong += v != v ? v : vf{};
            most = vmax(v, most);
        }
        float value = highest(most);
        if (value > best) best = value, block = from;
    }
    int64_t at = block;
    while (at < stop - 1 && !(to_float(x[at]) == best)) ++at;
    float lanes = sum(wrong);
    return {best, at, lanes != lanes};
}

template <class T>
void finite_argmax(const T* x, int64_t stride, int64_t* tokens, bool* finite, int64_t rows,
                   int64_t size, int threads) {
    int64_t chunks = (size + CHUNK - 1) / CHUNK, items = rows * chunks;
    std::vector<Best> parts(items);
    parallel_ranges(threads_for(rows * size, threads), items, [&](int64_t first, int64_t stop) {
        for (int64_t item = first; item < stop; ++item) {
            int64_t r = item / chunks, from = item % chunks * CHUNK;
            int64_t end = from + CHUNK < size ? from + CHUNK : size;
            parts[item] = best_of(x + r * stride, from, end);
        }
    });
    for (int64_t r = 0; r < rows; ++r) {
        Best best = parts[r * chunks];
        for (int64_t c = 1; c < chunks; ++c) {
            const Best& part = parts[r * chunks + c];
            bool nan = best.nan || part.nan;
            if (part.value > best.value) best = part;
            best.nan = nan;
        }
        tokens[r] = best.at;
        finite[r] = !best.nan && std::isfinite(best.value);
    }
}

}  // namespace

extern "C" {

// out [count] = cap * tanh(x / cap), in float32.
void yo_soft_cap(const void* x, float cap, float* out, int64_t count, int is_bf16, int threads) {
    if (is_bf16)
        soft_cap((const bf16*)x, cap, out, count, threads);
    else
        soft_cap((const float*)x, cap, out, count, threads);
}

// Of each row of x the first place of its greatest value, and whether that is finite and no value NaN.
void yo_finite_argmax(const void* x, int64_t stride, int64_t* tokens, bool* finite, int64_t rows,
                      int64_t size, int is_bf16, int threads) {
    if (is_bf16)
        finite_argmax((const bf16*)x, stride, tokens, finite, rows, size, threads);
    else
        finite_argmax((const float*)x, stride, tokens, finite, rows, size, threads);
}

}  // extern "C"

YO_PACKED(yo_soft_cap)
YO_PACKED(yo_finite_argmax)
