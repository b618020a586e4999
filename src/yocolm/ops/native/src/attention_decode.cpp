// Attention of a few rows: keys and values stream through once for all query heads of a key head.
#include "attention.h"

#include <algorithm>

using namespace yo;

namespace {

constexpr int64_t BLOCK_BYTES = 65536;  // of keys, and of values, between two looks at the softmax
constexpr int MOST_KEYS = 256;
// Keys, and values, are fetched into the second cache so far ahead of their use, each in the order of
// addresses and a little at a time. Half as far, or twice, was slower.
constexpr int64_t AHEAD_BYTES = 8192;
constexpr int64_t BATCH_BYTES = 4096;  // of values, between two looks ahead
constexpr int MOST_AHEAD = 256;

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

// Scores s [M, MOST_KEYS] of M queries q [M, q_row] against VL / M keys at once. Meanwhile as much is
// fetched from `ahead` on.
template <class T, int M>
inline void score(const T* q, int64_t q_row, const char* const* keys, int64_t dim, float* s,
                  const char* ahead) {
    constexpr int N = VL / M, E = (int)(sizeof(vf) / sizeof(T));
    const int64_t whole = dim / E * E;
    const int rest = (int)((dim - whole) * sizeof(T));
    vf acc[M * N] = {};
    for (int64_t d = 0; d < whole; d += E) {
        fetch(ahead, N * sizeof(vf));
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) {
            vf key = load_bytes((const T*)keys[i] + d);
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m)
                acc[m * N + i] = multiply(acc[m * N + i], load_bytes(q + m * q_row + d), key, T());
        }
    }
    if (rest) {
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) {
            vf key = load_bytes((const T*)keys[i] + whole, rest);
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m)
                acc[m * N + i] = multiply(acc[m * N + i], load_bytes(q + m * q_row + whole), key, T());
        }
    }
    float lanes[VL];
    store(lanes, sums(acc));
    for (int m = 0; m < M; ++m) std::memcpy(s + m * MOST_KEYS, lanes + m * N, N * sizeof(float));
}

// values [M, row] += weights p [M, MOST_KEYS] times n values, WIDTH vectors of a row from d on.
template <class T, int M, int WIDTH>
void add_strip(const float* p, const char* const* rows, int n, int64_t d, int rest, float* values,
               int64_t row, const char*& ahead) {
    vf acc[M][WIDTH];
    for (int m = 0; m < M; ++m)
        for (int w = 0; w < WIDTH; ++w) acc[m][w] = load(values + m * row + d + w * VL);
    for (int j = 0; j < n; ++j) {
        const T* v = (const T*)rows[j] + d;
        fetch(ahead, WIDTH * VL * sizeof(T));
        vf x[WIDTH];
        for (int w = 0; w < WIDTH; ++w)
            x[w] = rest ? load_some(v, rest) : load(v + w * VL);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
            vf weight = splat(p[m * MOST_KEYS + j]);
            for (int w = 0; w < WIDTH; ++w) acc[m][w] += weight * x[w];
        }
    }
    for (int m = 0; m < M; ++m)
        for (int w = 0; w < WIDTH; ++w) store(values + m * row + d + w * VL, acc[m][w]);
}

template <class T, int M>
void add_values(const float* p, const char* const* rows, int n, int64_t dim, float* values,
                int64_t row, const char* ahead) {
    constexpr int W = 4;
    int64_t d = 0;
    for (; d + W * VL <= dim; d += W * VL) add_strip<T, M, W>(p, rows, n, d, 0, values, row, ahead);
    for (; d + VL <= dim; d += VL) add_strip<T, M, 1>(p, rows, n, d, 0, values, row, ahead);
    if (d < dim) add_strip<T, M, 1>(p, rows, n, d, (int)(dim - d), values, row, ahead);
}

#if defined(__AVX512BF16__)
// The same with pairs of keys: their value rows are interleaved, so that values [M, row] lie in the
// order in which interleaving leaves them; `in_order` undoes it.
template <class T, int M, int CHUNKS>
void add_strip(const bf16* p, const char* const* rows, int n, int64_t d, int rest, float* values,
               int64_t row, const char*& ahead) {
    __m512 acc[M][2 * CHUNKS];
    for (int m = 0; m < M; ++m)
        for (int c = 0; c < 2 * CHUNKS; ++c) acc[m][c] = _mm512_loadu_ps(values + m * row + d + c * VL);
    for (int j = 0; j < n; j += 2) {
        const bf16 *a = (const bf16*)rows[j] + d, *b = (const bf16*)rows[j + 1] + d;
        fetch(ahead, CHUNKS * 128);
        __m512bh pair[2 * CHUNKS];
        for (int c = 0; c < CHUNKS; ++c) {
            __m512i x = (__m512i)(rest ? load_bytes(a + c * 32, rest) : load_bytes(a + c * 32));
            __m512i y = (__m512i)(rest ? load_bytes(b + c * 32, rest) : load_bytes(b + c * 32));
            pair[2 * c] = (__m512bh)_mm512_unpacklo_epi16(x, y);
            pair[2 * c + 1] = (__m512bh)_mm512_unpackhi_epi16(x, y);
        }
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) {
            __m512bh weights = (__m512bh)_mm512_set1_epi32(load_as<int32_t>(p + m * MOST_KEYS + j));
#pragma GCC unroll 4
            for (int c = 0; c < 2 * CHUNKS; ++c)
                acc[m][c] = _mm512_dpbf16_ps(acc[m][c], weights, pair[c]);
        }
    }
    for (int m = 0; m < M; ++m)
        for (int c = 0; c < 2 * CHUNKS; ++c) _mm512_storeu_ps(values + m * row + d + c * VL, acc[m][c]);
}

template <class T, int M>
void add_values(const bf16* p, const char* const* rows, int n, int64_t dim, float* values,
                int64_t row, const char* ahead) {
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) add_strip<T, M, 2>(p, rows, n, d, 0, values, row, ahead);
    for (; d + 32 <= dim; d += 32) add_strip<T, M, 1>(p, rows, n, d, 0, values, row, ahead);
    if (d < dim) add_strip<T, M, 1>(p, rows, n, d, (int)(2 * (dim - d)), values, row,
                                     ahead);
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

// M queries at once: 1, 2, or 4, of which the last may be zeros.
template <class T, int M>
void attend(const Work& work) {
    typedef typename Weight<T>::type P;
    constexpr int N = VL / M;
    const int64_t k_dim = work.k_dim, v_dim = work.v_dim, q_row = padded(k_dim), row = padded(v_dim);
    const int64_t k_bytes = k_dim * sizeof(T), v_bytes = v_dim * sizeof(T);
    const int count = (int)(work.rows * work.heads), room = (int)round_up(count, M);
    int most = MOST_KEYS, batch = MOST_KEYS;
    while (most > 32 && most * std::max(k_bytes, v_bytes) > BLOCK_BYTES) most /= 2;
    while (batch > 4 && batch * v_bytes > BATCH_BYTES) batch /= 2;
    const int64_t k_ahead = std::min<int64_t>(MOST_AHEAD, (AHEAD_BYTES + k_bytes - 1) / k_bytes);
    const int64_t v_ahead = std::min<int64_t>(MOST_AHEAD, (AHEAD_BYTES + v_bytes - 1) / v_bytes);

    char* memory = scratch<0>(room * (q_row * sizeof(T) + MOST_KEYS * (sizeof(float) + sizeof(P)) +
                                      row * sizeof(float)) +
                              2 * (MOST_KEYS + MOST_AHEAD + VL) * sizeof(char*) + 1024);
    T* q = carve<T>(memory, room * q_row);
    float* scores = carve<float>(memory, room * MOST_KEYS);
    P* weights = carve<P>(memory, room * MOST_KEYS);
    float* values = carve<float>(memory, room * row);
    const char** ks = carve<const char*>(memory, MOST_KEYS + MOST_AHEAD + VL);
    const char** vs = carve<const char*>(memory, MOST_KEYS + MOST_AHEAD + VL);
    std::memset(q, 0, room * q_row * sizeof(T));
    std::memset(values, 0, room * row * sizeof(float));
    std::memset(weights, 0, room * MOST_KEYS * sizeof(P));
    for (int m = 0; m < count; ++m) {
        std::memcpy(q + m * q_row, work.query(m), k_bytes);
        work.peak[m] = LOWEST, work.total[m] = 0.0f;
    }
    for (int64_t base = work.first; base < work.stop; base += most) {
        const int n = (int)std::min<int64_t>(most, work.stop - base);
        const int64_t known = std::min<int64_t>(n + MOST_AHEAD, work.stop - base);
        work.keys.find(base, known, ks, vs);
        for (int64_t i = known; i < known + VL; ++i)
            ks[i] = ks[known - 1], vs[i] = vs[known - 1];  // read, never seen
        for (int j = 0; j < n; j += N) {
            const char* ahead = j + k_ahead < known ? ks[j + k_ahead] : nullptr;
            for (int m = 0; m < room; m += M)
                score<T, M>(q + m * q_row, q_row, ks + j, k_dim, scores + m * MOST_KEYS + j,
                            m ? nullptr : ahead);
        }
        for (int m = 0; m < count; ++m) {
            const int64_t r = m / work.heads;
            float factor = weigh(scores + m * MOST_KEYS, work.low(r) - base, work.high(r) - base,
                                 round_up(n, VL), work.scale, work.softcap, work.peak[m],
                                 work.total[m], weights + m * MOST_KEYS);
            if (factor != 1.0f) rescale(values + m * row, row, factor);
        }
        for (int j = 0; j < n; j += batch) {
            const int some = std::min(batch, n - j);
            const char* ahead = j + v_ahead < known ? vs[j + v_ahead] : nullptr;
            for (int m = 0; m < room; m += M)
                add_values<T, M>(weights + m * MOST_KEYS + j, vs + j, some, v_dim, values + m * row,
                                 row, m ? nullptr : ahead);
        }
    }
    for (int m = 0; m < count; ++m) {
        order((const P*)nullptr, values + m * row, row);
        std::memcpy(work.values + m * row, values + m * row, row * sizeof(float));
    }
}

template <class T>
void attend(const Work& work) {
    const int64_t count = work.rows * work.heads;
    (count == 1 ? attend<T, 1> : count == 2 ? attend<T, 2> : attend<T, 4>)(work);
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
