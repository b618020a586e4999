// Heads of queries finished in one pass, and the tables that turn them.
#include "heads.h"
#include "packed.h"

using namespace yo;

namespace {

template <class T>
void finish_heads(const T* x, int64_t row_stride, int64_t head_stride, const T* weight,
                  const Finish& finish, T* out, int64_t rows, int64_t heads, int64_t size,
                  int threads) {
    int64_t items = rows * heads;
    parallel_ranges(threads_for(items * size, threads), items, [&](int64_t first, int64_t stop) {
        for (int64_t item = first; item < stop; ++item) {
            int64_t r = item / heads, h = item % heads;
            finish.head(x + r * row_stride + h * head_stride, weight, r, out + item * size, size);
        }
    });
}

// Cosine and sine of position * frequency, computed in double: the angle less the nearest multiple
// of pi / 2, which is subtracted in two parts, and Taylor's series for what is left.
void turn_tables(double position, const double* frequencies, float* cosines, float* sines,
                 int64_t pairs) {
    const double high = 1.5707963267948966, low = 6.123233995736766e-17;
    const double whole = 6755399441055744.0;  // adding it rounds to an integer
#pragma omp simd
    for (int64_t i = 0; i < pairs; ++i) {
        double angle = position * frequencies[i];
        double n = (angle * 0.6366197723675814 + whole) - whole;
        double r = __builtin_fma(-n, low, __builtin_fma(-n, high, angle));
        double quarter = n - 4.0 * __builtin_floor(n * 0.25);
        double q = r * r;
        double s = r + r * q *
                           (-1.0 / 6 +
                            q * (1.0 / 120 +
                                 q * (-1.0 / 5040 +
                                      q * (1.0 / 362880 +
                                           q * (-1.0 / 39916800 + q * (1.0 / 6227020800.0))))));
        double c = 1.0 + q * (-0.5 +
                              q * (1.0 / 24 +
                                   q * (-1.0 / 720 +
                                        q * (1.0 / 40320 +
                                             q * (-1.0 / 3628800 +
                                                  q * (1.0 / 479001600 +
                                                       q * (-1.0 / 87178291200.0)))))));
        bool odd = quarter == 1.0 || quarter == 3.0;
        double sine = odd ? c : s, cosine = odd ? s : c;
        sines[i] = (float)(quarter >= 2.0 ? -sine : sine);
        cosines[i] = (float)(quarter == 1.0 || quarter == 2.0 ? -cosine : cosine);
    }
}

}  // namespace

extern "C" {

// out [rows, heads, size]: each head of x normed, then turned; weight, and cos with sin, may be null.
void yo_finish_heads(const void* x, int64_t row_stride, int64_t head_stride, const void* weight,
                     int norm, float eps, const void* cos, const void* sin, int64_t pairs,
                     int interleaved, void* out, int64_t rows, int64_t heads, int64_t size,
                     int is_bf16, int threads) {
    Finish finish{norm != 0, eps, (const float*)cos, (const float*)sin, pairs, interleaved != 0};
    if (is_bf16)
        finish_heads((const bf16*)x, row_stride, head_stride, (const bf16*)weight, finish,
                     (bf16*)out, rows, heads, size, threads);
    else
        finish_heads((const float*)x, row_stride, head_stride, (const float*)weight, finish,
                     (float*)out, rows, heads, size, threads);
}

// Tables [rows, pairs] of cosines and sines of positions [rows] times frequencies [pairs].
void yo_rotation(const int64_t* positions, const double* frequencies, float* cos, float* sin,
                 int64_t rows, int64_t pairs, int threads) {
    threads = threads_for(8 * rows * pairs, threads);
    parallel_ranges(threads, rows, [&](int64_t first, int64_t stop) {
        for (int64_t r = first; r < stop; ++r)
            turn_tables((double)positions[r], frequencies, cos + r * pairs, sin + r * pairs, pairs);
    });
}

}  // extern "C"

YO_PACKED(yo_finish_heads)
YO_PACKED(yo_rotation)
