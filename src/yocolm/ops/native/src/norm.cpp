// Root-mean-square norms.
#include "parallel.h"
#include "simd.h"

using namespace yo;

namespace {

constexpr int64_t SERIAL_ELEMENTS = 16384;  // less is done sooner than a second thread wakes up

// 1 / rms of x [size].
template <class T>
float inverse_rms(const T* x, int64_t size, float eps) {
    vf a = vf{}, b = vf{};
    int64_t i = 0;
    for (; i + 2 * VL <= size; i += 2 * VL) {
        vf u = load(x + i), v = load(x + i + VL);
        a += u * u;
        b += v * v;
    }
    for (; i + VL <= size; i += VL) {
        vf u = load(x + i);
        a += u * u;
    }
    float total = sum(a + b);
    for (; i < size; ++i) total += to_float(x[i]) * to_float(x[i]);
    return 1.0f / std::sqrt(total / (float)size + eps);
}

template <class T>
void scale_row(const T* x, const T* weight, float scale, T* out, int64_t size) {
    int64_t i = 0;
    for (; i + VL <= size; i += VL) {
        vf y = load(x + i) * scale;
        store(out + i, weight ? y * load(weight + i) : y);
    }
    for (; i < size; ++i)
        put(out + i, to_float(x[i]) * scale * (weight ? to_float(weight[i]) : 1.0f));
}

template <class T>
void rms_norm(const T* x, int64_t stride, const T* weight, float eps, T* out, int64_t rows,
              int64_t size, int threads) {
    parallel_ranges(rows * size < SERIAL_ELEMENTS ? 1 : threads, rows,
                    [&](int64_t first, int64_t stop) {
                        for (int64_t r = first; r < stop; ++r) {
                            const T* row = x + r * stride;
                            scale_row(row, weight, inverse_rms(row, size, eps), out + r * size, size);
                        }
                    });
}

}  // namespace

extern "C" {

// out [rows, size] = x / rms(x) * weight; rows of x are `stride` elements apart; weight may be null.
void yo_rms_norm(const void* x, int64_t stride, const void* weight, float eps, void* out,
                 int64_t rows, int64_t size, int is_bf16, int threads) {
    if (is_bf16)
        rms_norm((const bf16*)x, stride, (const bf16*)weight, eps, (bf16*)out, rows, size, threads);
    else
        rms_norm((const float*)x, stride, (const float*)weight, eps, (float*)out, rows, size, threads);
}

}  // extern "C"
