// Gated units: an activation of one half times the other, and the sparse one of Gemma 3n.
#include "elements.h"
#include "packed.h"

using namespace yo;

namespace {

// a / b; where the result becomes bfloat16, 14 bits of 1 / b are enough.
inline vf quotient(vf a, vf b, const float*) { return a / b; }
inline vf quotient(vf a, vf b, const bf16*) {
#if defined(__AVX512F__)
    return a * (vf)_mm512_rcp14_ps((__m512)b);
#else
    return a / b;
#endif
}

struct Gelu {
    template <class T>
    static vf of(vf x, const T* kind) {
        return quotient(activation_top(x), gelu_divisor(x), kind);
    }
};
struct Silu {
    template <class T>
    static vf of(vf x, const T* kind) {
        return quotient(activation_top(x), silu_divisor(x), kind);
    }
};

// Elements that cost as much as two of a plain pass.
constexpr int64_t COST = 2;

template <class Activation, class T>
void gated(const T* gate, int64_t gate_row, const T* other, int64_t other_row, T* out, int64_t rows,
           int64_t size, int threads) {
    threads = threads_for(COST * rows * size, threads);
    parallel_ranges(threads, rows, [&](int64_t first, int64_t stop) {
        for (int64_t r = first; r < stop; ++r) {
            const T *g = gate + r * gate_row, *o = other + r * other_row;
            T* to = out + r * size;
            each_vector(size, [&](int64_t i, auto k) {
                set(to + i, Activation::of(get(g + i, k), out) * get(o + i, k), k);
            });
        }
    });
}

// Mean plus `quantile` standard deviations of x [size].
template <class T>
float cut_of(const T* x, int64_t size, float quantile) {
    vf a = vf{}, b = vf{};
    int64_t i = 0;
    for (; i + 2 * VL <= size; i += 2 * VL) {
        a += load(x + i);
        b += load(x + i + VL);
    }
    each_vector(size - i, [&](int64_t j, auto k) { a += get(x + i + j, k); });
    float mean = sum(a + b) / (float)size;
    a = b = vf{};
    for (i = 0; i + 2 * VL <= size; i += 2 * VL) {
        vf u = load(x + i) - mean, v = load(x + i + VL) - mean;
        a += u * u;
        b += v * v;
    }
    float squares = sum(a + b);
    for (; i < size; ++i) squares += (to_float(x[i]) - mean) * (to_float(x[i]) - mean);
    return mean + quantile * std::sqrt(squares / (float)size);
}

inline bool any_above_zero(vf v) {  // NaN counts
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)v, _mm512_setzero_ps(), _CMP_NLE_UQ) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)v, _mm256_setzero_ps(), _CMP_NLE_UQ)) != 0;
#else
    return !(highest(v) <= 0.0f) || sum(v) != sum(v);
#endif
}

template <class T>
void sparse_gelu(const T* gate, int64_t gate_row, const T* other, int64_t other_row, float quantile,
                 T* out, int64_t rows, int64_t size, int threads) {
    threads = threads_for(COST * rows * size, threads);
    parallel_ranges(threads, rows, [&](int64_t first, int64_t stop) {
        for (int64_t r = first; r < stop; ++r) {
            const T *g = gate + r * gate_row, *o = other + r * other_row;
            T* to = out + r * size;
            float cut = cut_of(g, size, quantile);
            each_vector(size, [&](int64_t i, auto k) {
                vf left = get(g + i, k) - cut;
                left = left < 0.0f ? vf{} : left;
                vf activated = any_above_zero(left) ? Gelu::of(left, out) : vf{};
                set(to + i, activated * get(o + i, k), k);
            });
        }
    });
}

}  // namespace

extern "C" {

// out [rows, size] = activation(gate) * other: GELU in its tanh form, or SiLU.
void yo_gated(const void* gate, int64_t gate_row, const void* other, int64_t other_row, void* out,
              int64_t rows, int64_t size, int is_silu, int is_bf16, int threads) {
    auto run = [&](auto kind) {
        using T = decltype(kind);
        auto form = is_silu ? gated<Silu, T> : gated<Gelu, T>;
        form((const T*)gate, gate_row, (const T*)other, other_row, (T*)out, rows, size, threads);
    };
    is_bf16 ? run(bf16{}) : run(0.0f);
}

// The same with GELU of what of each gate exceeds the row's mean + quantile * deviation.
void yo_sparse_gelu(const void* gate, int64_t gate_row, const void* other, int64_t other_row,
                    float quantile, void* out, int64_t rows, int64_t size, int is_bf16,
                    int threads) {
    auto run = [&](auto kind) {
        using T = decltype(kind);
        sparse_gelu((const T*)gate, gate_row, (const T*)other, other_row, quantile, (T*)out, rows,
                    size, threads);
    };
    is_bf16 ? run(bf16{}) : run(0.0f);
}

}  // extern "C"

YO_PACKED(yo_gated)
YO_PACKED(yo_sparse_gelu)
