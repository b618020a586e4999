// y = x W^T + bias for few rows of x and row-major W, bound by reading W once.
#include "parallel.h"
#include "simd.h"

using namespace yo;

namespace {

constexpr int GROUP = 4;                        // rows of W at a time
constexpr int MOST_ROWS = VL == 16 ? 4 : 2;     // rows of x at a time: what the registers hold
constexpr int64_t SERIAL_BYTES = 96 * 1024;     // of W: less is done sooner than a thread wakes up
constexpr int64_t PREFETCH = 8192;              // bytes of W ahead of its use, at least
constexpr int64_t CHUNK_BYTES = 64 * 1024;      // of W that a thread takes at a time

inline vf multiply(vf acc, const bf16* a, const bf16* b) { return dot_bf16(acc, a, b); }
inline vf multiply(vf acc, const float* a, const float* b) { return acc + load(a) * load(b); }

// The sums of the lanes of four vectors.
inline void sums(const vf (&v)[GROUP], float* out) {
#if defined(__AVX512F__)
    __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
    __m512 t = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
    __m512 u = _mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d);
    t = _mm512_shuffle_ps(t, u, 0x44) + _mm512_shuffle_ps(t, u, 0xee);
    __m256 h = _mm512_castps512_ps256(t) + _mm512_extractf32x8_ps(t, 1);
    _mm_storeu_ps(out, _mm256_castps256_ps128(h) + _mm256_extractf128_ps(h, 1));
#else
    for (int g = 0; g < GROUP; ++g) out[g] = sum(v[g]);
#endif
}

// Products of GROUP rows of w, one after another at `w_stride`, and X rows of x, k long, into
// out [X][GROUP]. The rows of w that follow are fetched into the second cache meanwhile.
template <int X, class T>
void products(const T* w, int64_t w_stride, const T* x, int64_t x_stride, int64_t k,
              float (*out)[GROUP]) {
    constexpr int STEP = 4 * VL / (int)sizeof(T);  // elements of one vector of memory
    vf acc[X][GROUP] = {};
    const int64_t distance = GROUP * w_stride * (int64_t)sizeof(T);
    const char* ahead = (const char*)w + (distance > PREFETCH ? distance : PREFETCH);
    int64_t i = 0;
    for (; i + STEP <= k; i += STEP) {
#pragma GCC unroll 4
        for (int g = 0; g < GROUP; ++g) {
            __builtin_prefetch(ahead + i * GROUP * sizeof(T) + g * 4 * VL, 0, 2);
#pragma GCC unroll 4
            for (int r = 0; r < X; ++r)
                acc[r][g] = multiply(acc[r][g], w + g * w_stride + i, x + r * x_stride + i);
        }
    }
    if (i < k) {
        alignas(64) T left[GROUP][STEP] = {}, right[X][STEP] = {};
        for (int g = 0; g < GROUP; ++g)
            std::memcpy(left[g], w + g * w_stride + i, (k - i) * sizeof(T));
        for (int r = 0; r < X; ++r) std::memcpy(right[r], x + r * x_stride + i, (k - i) * sizeof(T));
#pragma GCC unroll 4
        for (int g = 0; g < GROUP; ++g)
#pragma GCC unroll 4
            for (int r = 0; r < X; ++r) acc[r][g] = multiply(acc[r][g], left[g], right[r]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < X; ++r) sums(acc[r], out[r]);
}

// As above for the first of `rows` rows of x; how many these were.
template <class T>
int some_products(int64_t rows, const T* w, int64_t w_stride, const T* x, int64_t x_stride,
                  int64_t k, float (*out)[GROUP]) {
    if constexpr (MOST_ROWS == 4) {
        if (rows >= 4) return products<4>(w, w_stride, x, x_stride, k, out), 4;
        if (rows == 3) return products<3>(w, w_stride, x, x_stride, k, out), 3;
    }
    if (rows >= 2) return products<2>(w, w_stride, x, x_stride, k, out), 2;
    return products<1>(w, w_stride, x, x_stride, k, out), 1;
}

template <class T>
struct Linear {
    const T *x, *w, *bias;
    T* y;
    int64_t x_stride, w_stride, rows, n, k;

    // Outputs first .. stop - 1, at most GROUP.
    void group(int64_t first, int64_t stop) const {
        const bool whole = stop - first == GROUP;
        if (!whole && stop - first > 1) {
            for (int64_t o = first; o < stop; ++o) group(o, o + 1);  // one row of w, GROUP times
            return;
        }
        const T* from = w + first * w_stride;
        const int64_t stride = whole ? w_stride : 0;
        for (int64_t r = 0; r < rows;) {
            float out[MOST_ROWS][GROUP];
            const T* some = x + r * x_stride;
            int done = some_products(rows - r, from, stride, some, x_stride, k, out);
            for (int i = 0; i < done; ++i)
                for (int64_t o = first; o < stop; ++o)
                    put(y + (r + i) * n + o, out[i][o - first] + (bias ? to_float(bias[o]) : 0.0f));
            r += done;
        }
    }

    void run(int threads) const {
        int64_t bytes = n * k * (int64_t)sizeof(T);
        int64_t chunk = CHUNK_BYTES / (k * (int64_t)sizeof(T)) / GROUP * GROUP;
        if (chunk < GROUP) chunk = GROUP;
        parallel_items(bytes < SERIAL_BYTES ? 1 : threads, (n + chunk - 1) / chunk, [&](int64_t item) {
            int64_t stop = (item + 1) * chunk < n ? (item + 1) * chunk : n;
            for (int64_t o = item * chunk; o < stop; o += GROUP)
                group(o, o + GROUP < stop ? o + GROUP : stop);
        });
    }
};

}  // namespace

extern "C" {

// y [rows, n] = x [rows, k] w [n, k]^T + bias [n] (or null), all of one dtype; k is at least 1.
void yo_linear_rows(const void* x, int64_t x_stride, const void* w, int64_t w_stride,
                    const void* bias, void* y, int64_t rows, int64_t n, int64_t k, int is_bf16,
                    int threads) {
    if (is_bf16)
        Linear<bf16>{(const bf16*)x, (const bf16*)w, (const bf16*)bias, (bf16*)y,
                     x_stride, w_stride, rows, n, k}.run(threads);
    else
        Linear<float>{(const float*)x, (const float*)w, (const float*)bias, (float*)y,
                      x_stride, w_stride, rows, n, k}.run(threads);
}

}  // extern "C"
