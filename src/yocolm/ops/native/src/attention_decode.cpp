// Attention of a few rows: keys and values stream through once for all query heads of a key head.
#include "attention.h"

#include <algorithm>

using namespace yo;

namespace {

constexpr int64_t BLOCK_BYTES = 131072;  // of keys, and of values, between two looks at the softmax
constexpr int MOST_KEYS = 256;
// What is read later is fetched into the second cache so far ahead, in the order of addresses and a
// little at a time: a core's own misses alone keep half as much in flight as memory can give, and the
// hardware's prefetcher follows such a stream. Rows are walked few at a time for the same reason.
constexpr int64_t K_AHEAD = 8192, V_AHEAD = 12288;
constexpr int MOST_AHEAD = 256;  // keys
constexpr int TOGETHER = 8;      // keys whose values are added side by side
constexpr int PAD = VL > TOGETHER ? VL : TOGETHER;  // keys behind the last that are read, never seen

// The element type of weights: pairs of bfloat16 where the machine multiplies them.
template <class T>
struct Weight {
    typedef float type;
};
#if defined(__AVX512BF16__)
template <>
struct Weight<bf16> {
    typedef bf16 type;
};
#endif

// Fetches the next `bytes` from `ahead` on, unless it is null.
inline void fetch(const char*& ahead, int64_t bytes) {
    if (!ahead) return;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(ahead + i, 0, 2);
    ahead += bytes;
}

// sums [M, VL] of two keys: products of M queries q [M, q_row] with them, not yet added up over lanes.
template <class T, int M>
inline void multiply_keys(const T* q, int64_t q_row, const T* a, const T* b, int64_t dim, vf* sums,
                          const char*& ahead) {
    constexpr int E = (int)(sizeof(vf) / sizeof(T));
    vf x[M] = {}, y[M] = {};
    int64_t d = 0;
    for (; d + E <= dim; d += E) {
        fetch(ahead, 2 * sizeof(vf));
        vf first = load_bytes(a + d), second = load_bytes(b + d);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
            vf query = load_bytes(q + m * q_row + d);
            x[m] = multiply(x[m], query, first, T());
            y[m] = multiply(y[m], query, second, T());
        }
    }
    if (d < dim) {
        const int rest = (int)((dim - d) * sizeof(T));
        vf first = load_bytes(a + d, rest), second = load_bytes(b + d, rest);
        for (int m = 0; m < M; ++m) {
            vf query = load_bytes(q + m * q_row + d);
            x[m] = multiply(x[m], query, first, T());
            y[m] = multiply(y[m], query, second, T());
        }
    }
    for (int m = 0; m < M; ++m) sums[m * VL] = x[m], sums[m * VL + 1] = y[m];
}

// Scores s [count, MOST_KEYS] of the queries against VL keys, by way of `products` [count, VL].
// Meanwhile as much is fetched from `ahead` on.
template <class T>
inline void score(const T* q, int64_t q_row, int count, const char* const* keys, int64_t dim,
                  float* s, vf* products, const char* ahead) {
    const char* none = nullptr;
    for (int i = 0; i < VL; i += 2) {
        const T *a = (const T*)keys[i], *b = (const T*)keys[i + 1];
        for (int m = 0; m < count;) {
            const T* query = q + m * q_row;
            vf* sums = products + m * VL + i;
            const char*& next = m ? none : ahead;
            if (count - m >= 4)
                multiply_keys<T, 4>(query, q_row, a, b, dim, sums, next), m += 4;
            else if (count - m >= 2)
                multiply_keys<T, 2>(query, q_row, a, b, dim, sums, next), m += 2;
            else
                multiply_keys<T, 1>(query, q_row, a, b, dim, sums, next), m += 1;
        }
    }
    for (int m = 0; m < count; ++m) store(s + m * MOST_KEYS, sums(products + m * VL));
}

// values [count, row] += weights p [count, MOST_KEYS] times N rows of values, from element d on, of
// which `bytes` may be there. Rows are read a vector at a time side by side, sums wait in the first
// cache: so memory is read nearly in order.
template <class T, int N, bool TAIL>
inline void add_column(const float* p, const char* const* rows, int64_t d, int rest, float* values,
                       int64_t row, int count) {
    vf x[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
        const T* v = (const T*)rows[i] + d;
        x[i] = TAIL ? load_some(v, rest) : load(v);
    }
    for (int m = 0; m < count; ++m) {
        float* at = values + m * row + d;
        const float* w = p + m * MOST_KEYS;
        vf even = load(at), odd = splat(w[1]) * x[1];
        even += splat(w[0]) * x[0];
#pragma GCC unroll 8
        for (int i = 2; i < N; i += 2) {
            even += splat(w[i]) * x[i];
            odd += splat(w[i + 1]) * x[i + 1];
        }
        store(at, even + odd);
    }
}

template <class T, int N>
void add_values(const float* p, const char* const* rows, int64_t dim, float* values, int64_t row,
                int count, const char* ahead) {
    int64_t d = 0;
    for (; d + VL <= dim; d += VL) {
        fetch(ahead, N * VL * sizeof(T));
        add_column<T, N, false>(p, rows, d, 0, values, row, count);
    }
    if (d < dim) add_column<T, N, true>(p, rows, d, (int)(dim - d), values, row, count);
}

#if defined(__AVX512BF16__)
// The same by pairs of keys: their rows are interleaved, so that values [count, row] lie in the order
// in which interleaving leaves them; `in_order` undoes it.
template <class T, int N, bool TAIL>
inline void add_column(const bf16* p, const char* const* rows, int64_t d, int rest, float* values,
                       int64_t row, int count) {
    __m512bh low[N / 2], high[N / 2];
#pragma GCC unroll 8
    for (int i = 0; i < N / 2; ++i) {
        const bf16 *a = (const bf16*)rows[2 * i] + d, *b = (const bf16*)rows[2 * i + 1] + d;
        __m512i x = (__m512i)(TAIL ? load_bytes(a, rest) : load_bytes(a));
        __m512i y = (__m512i)(TAIL ? load_bytes(b, rest) : load_bytes(b));
        low[i] = (__m512bh)_mm512_unpacklo_epi16(x, y);
        high[i] = (__m512bh)_mm512_unpackhi_epi16(x, y);
    }
    for (int m = 0; m < count; ++m) {
        float* at = values + m * row + d;
        __m512 a = _mm512_loadu_ps(at), b = _mm512_loadu_ps(at + 16);
#pragma GCC unroll 8
        for (int i = 0; i < N / 2; ++i) {
            int32_t pair = load_as<int32_t>(p + m * MOST_KEYS + 2 * i);
            __m512bh weights = (__m512bh)_mm512_set1_epi32(pair);
            a = _mm512_dpbf16_ps(a, weights, low[i]);
            b = _mm512_dpbf16_ps(b, weights, high[i]);
        }
        _mm512_storeu_ps(at, a);
        _mm512_storeu_ps(at + 16, b);
    }
}

template <class T, int N>
void add_values(const bf16* p, const char* const* rows, int64_t dim, float* values, int64_t row,
                int count, const char* ahead) {
    int64_t d = 0;
    for (; d + 32 <= dim; d += 32) {
        fetch(ahead, N * 64);
        add_column<T, N, false>(p, rows, d, 0, values, row, count);
    }
    if (d < dim) add_column<T, N, true>(p, rows, d, (int)(2 * (dim - d)), values, row, count);
}

void in_order(float* values, int64_t dim) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int64_t d = 0; d < dim; d += 32) {
        __m512 a = _mm512_loadu_ps(values + d), b = _mm512_loadu_ps(values + d + 16);
        _mm512_storeu_ps(values + d, _mm512_permutex2var_ps(a, low, b));
        _mm512_storeu_ps(values + d + 16, _mm512_permutex2var_ps(a, high, b));
    }
}
#endif

inline void order(const float*, float*, int64_t) {}
inline void order(const bf16*, float* values, int64_t dim) {
#if defined(__AVX512BF16__)
    in_order(values, dim);
#else
    (void)values, (void)dim;
#endif
}

template <class T>
void attend(const Work& work) {
    typedef typename Weight<T>::type P;
    const int64_t k_dim = work.k_dim, v_dim = work.v_dim, q_row = padded(k_dim), row = padded(v_dim);
    const int64_t k_bytes = k_dim * sizeof(T), v_bytes = v_dim * sizeof(T);
    const int count = (int)(work.rows * work.heads);
    int most = MOST_KEYS;
    while (most > 32 && most * std::max(k_bytes, v_bytes) > BLOCK_BYTES) most /= 2;
    const int64_t k_ahead = std::min<int64_t>(MOST_AHEAD, (K_AHEAD + k_bytes - 1) / k_bytes);
    const int64_t v_ahead = std::min<int64_t>(MOST_AHEAD, (V_AHEAD + v_bytes - 1) / v_bytes);

    char* memory = scratch<0>(count * (q_row * sizeof(T) + MOST_KEYS * (sizeof(float) + sizeof(P)) +
                                       row * sizeof(float) + VL * sizeof(vf)) +
                              2 * (MOST_KEYS + MOST_AHEAD + PAD) * sizeof(char*) + 1024);
    T* q = carve<T>(memory, count * q_row);
    float* scores = carve<float>(memory, count * MOST_KEYS);
    P* weights = carve<P>(memory, count * MOST_KEYS);
    float* values = carve<float>(memory, count * row);
    vf* products = carve<vf>(memory, count * VL);
    const char** ks = carve<const char*>(memory, MOST_KEYS + MOST_AHEAD + PAD);
    const char** vs = carve<const char*>(memory, MOST_KEYS + MOST_AHEAD + PAD);
    std::memset(q, 0, count * q_row * sizeof(T));
    std::memset(values, 0, count * row * sizeof(float));
    std::memset(weights, 0, count * MOST_KEYS * sizeof(P));
    for (int m = 0; m < count; ++m) {
        std::memcpy(q + m * q_row, work.query(m), k_bytes);
        work.peak[m] = LOWEST, work.total[m] = 0.0f;
    }
    for (int64_t base = work.first; base < work.stop; base += most) {
        const int n = (int)std::min<int64_t>(most, work.stop - base);
        const int64_t known = std::min<int64_t>(n + MOST_AHEAD, work.stop - base);
        work.keys.find(base, known, ks, vs);
        for (int64_t i = known; i < known + PAD; ++i) ks[i] = ks[known - 1], vs[i] = vs[known - 1];
        for (int j = 0; j < n; j += VL) {
            const char* ahead = j + k_ahead < known ? ks[j + k_ahead] : nullptr;
            score(q, q_row, count, ks + j, k_dim, scores + j, products, ahead);
        }
        for (int m = 0; m < count; ++m) {
            const int64_t r = m / work.heads;
            float factor = weigh(scores + m * MOST_KEYS, work.low(r) - base, work.high(r) - base,
                                 round_up(n, PAD), work.scale, work.softcap, work.peak[m],
                                 work.total[m], weights + m * MOST_KEYS);
            if (factor != 1.0f) rescale(values + m * row, row, factor);
        }
        for (int j = 0; j < n; j += TOGETHER) {
            const char* ahead = j + v_ahead < known ? vs[j + v_ahead] : nullptr;
            add_values<T, TOGETHER>(weights + j, vs + j, v_dim, values, row, count, ahead);
        }
    }
    for (int m = 0; m < count; ++m) {
        order((const P*)nullptr, values + m * row, row);
        std::memcpy(work.values + m * row, values + m * row, row * sizeof(float));
    }
}

}  // namespace

namespace yo {

void attend_few(const Work& work, bool is_bf16) {
    if (is_bf16)
        attend<bf16>(work);
    else
        attend<float>(work);
}

}  // namespace yo
