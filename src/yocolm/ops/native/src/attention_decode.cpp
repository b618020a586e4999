// Attention of a few rows: keys and values stream through once for all query heads of a key head.
#include "attention.h"

using namespace yo;

namespace {

constexpr int64_t BLOCK_BYTES = 32768;  // of keys, and of values, between two looks at the softmax
constexpr int MOST_KEYS = 64;

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

inline void prefetch_row(const char* row, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
}

// Scores of M queries q [M, padded] against n keys, several keys at once; s [M, MOST_KEYS].
// `ahead` rows are fetched on the way.
template <class T, int M>
void score(const T* q, int64_t q_row, const char* const* keys, int n, int64_t dim, float* s,
           const char* const* ahead, int64_t ahead_bytes) {
    constexpr int N = VL / M, E = (int)(sizeof(vf) / sizeof(T));
    const int64_t whole = dim / E * E;
    const int rest = (int)((dim - whole) * sizeof(T));
    for (int j = 0; j < n; j += N) {
        vf acc[M * N] = {};
        if (ahead)
            for (int i = 0; i < N; ++i) prefetch_row(ahead[j + i], ahead_bytes);
        for (int64_t d = 0; d < whole; d += E) {
#pragma GCC unroll 16
            for (int i = 0; i < N; ++i) {
                vf key = load_bytes((const T*)keys[j + i] + d);
#pragma GCC unroll 4
                for (int m = 0; m < M; ++m)
                    acc[m * N + i] =
                        multiply(acc[m * N + i], load_bytes(q + m * q_row + d), key, T());
            }
        }
        if (rest)
            for (int i = 0; i < N; ++i) {
                vf key = load_bytes((const T*)keys[j + i] + whole, rest);
                for (int m = 0; m < M; ++m)
                    acc[m * N + i] =
                        multiply(acc[m * N + i], load_bytes(q + m * q_row + whole), key, T());
            }
        float lanes[VL];
        store(lanes, sums(acc));
        for (int m = 0; m < M; ++m) std::memcpy(s + m * MOST_KEYS + j, lanes + m * N, N * sizeof(float));
    }
}

// values [M, row] += weights p [M, MOST_KEYS] times n values, WIDTH vectors of a row from d on.
template <class T, int M, int WIDTH>
void add_strip(const float* p, const char* const* rows, int n, int64_t d, int rest, float* values,
               int64_t row, const char* const* ahead, int64_t ahead_offset) {
    vf acc[M][WIDTH];
    for (int m = 0; m < M; ++m)
        for (int w = 0; w < WIDTH; ++w) acc[m][w] = load(values + m * row + d + w * VL);
    for (int j = 0; j < n; ++j) {
        const T* v = (const T*)rows[j] + d;
        if (ahead) prefetch_row(ahead[j] + ahead_offset, WIDTH * VL * sizeof(T));
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
                int64_t row, const char* const* ahead, int64_t ahead_bytes) {
    constexpr int W = 4;
    int64_t d = 0, offset = 0;
    auto next = [&](int vectors) {
        const char* const* at = ahead && offset < ahead_bytes ? ahead : nullptr;
        offset += vectors * VL * sizeof(T);
        return at;
    };
    for (; d + W * VL <= dim; d += W * VL) {
        int64_t o = offset;
        add_strip<T, M, W>(p, rows, n, d, 0, values, row, next(W), o);
    }
    for (; d < dim; d += VL) {
        int64_t o = offset;
        add_strip<T, M, 1>(p, rows, n, d, d + VL <= dim ? 0 : (int)(dim - d), values, row, next(1), o);
    }
    for (int j = 0; ahead && j < n && offset < ahead_bytes; ++j)
        prefetch_row(ahead[j] + offset, ahead_bytes - offset);
}

#if defined(__AVX512BF16__)
// The same with pairs of keys: their value rows are interleaved, so that values [M, row] lie in the
// order in which interleaving leaves them; `in_order` undoes it.
template <class T, int M, int CHUNKS>
void add_strip(const bf16* p, const char* const* rows, int n, int64_t d, int rest, float* values,
               int64_t row, const char* const* ahead, int64_t ahead_offset) {
    __m512 acc[M][2 * CHUNKS];
    for (int m = 0; m < M; ++m)
        for (int c = 0; c < 2 * CHUNKS; ++c) acc[m][c] = _mm512_loadu_ps(values + m * row + d + c * VL);
    for (int j = 0; j < n; j += 2) {
        const bf16 *a = (const bf16*)rows[j] + d, *b = (const bf16*)rows[j + 1] + d;
        if (ahead) {
            prefetch_row(ahead[j] + ahead_offset, CHUNKS * 64);
            prefetch_row(ahead[j + 1] + ahead_offset, CHUNKS * 64);
        }
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
                int64_t row, const char* const* ahead, int64_t ahead_bytes) {
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64)
        add_strip<T, M, 2>(p, rows, n, d, 0, values, row, 2 * d < ahead_bytes ? ahead : nullptr, 2 * d);
    for (; d < dim; d += 32)
        add_strip<T, M, 1>(p, rows, n, d, d + 32 <= dim ? 0 : (int)(2 * (dim - d)), values, row,
                           2 * d < ahead_bytes ? ahead : nullptr, 2 * d);
    for (int j = 0; ahead && j < n && 2 * d < ahead_bytes; ++j)
        prefetch_row(ahead[j] + 2 * d, ahead_bytes - 2 * d);
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

struct Block {  // places of some keys; what lies behind the last is the last again
    const char* k[MOST_KEYS + VL];
    const char* v[MOST_KEYS + VL];
    int count = 0;

    void find(const Keys& keys, int64_t first, int64_t n) {
        count = (int)n;
        keys.find(first, n, k, v);
        for (int i = count; i < count + VL; ++i) k[i] = k[count - 1], v[i] = v[count - 1];
    }
};

// Calls body(m, size) for m, size that cover 0 .. count - 1 in pieces of 4, and one of 2 or 1 at
// the end; three rows count as four.
template <class Body>
inline void by_fours(int count, Body body) {
    int m = 0;
    for (; m + 2 < count; m += 4) body(m, std::integral_constant<int, 4>());
    if (count - m == 2) body(m, std::integral_constant<int, 2>());
    if (count - m == 1) body(m, std::integral_constant<int, 1>());
}

template <class T>
void attend(const Work& work) {
    typedef typename Weight<T>::type P;
    const int64_t k_dim = work.k_dim, v_dim = work.v_dim, q_row = padded(k_dim), row = padded(v_dim);
    const int count = (int)(work.rows * work.heads), room = (count + 3) / 4 * 4;
    const int64_t most_dim = k_dim > v_dim ? k_dim : v_dim;
    int keys = MOST_KEYS;
    while (keys > 16 && keys * most_dim * (int64_t)sizeof(T) > BLOCK_BYTES) keys /= 2;

    char* memory = scratch<0>(room * (q_row * sizeof(T) + MOST_KEYS * (sizeof(float) + sizeof(P)) +
                                   row * sizeof(float) + 8) + 2 * sizeof(Block) + 1024);
    T* q = carve<T>(memory, room * q_row);
    float* scores = carve<float>(memory, room * MOST_KEYS);
    P* weights = carve<P>(memory, room * MOST_KEYS);
    float* values = carve<float>(memory, room * row);
    Block* blocks = carve<Block>(memory, 2);
    std::memset(q, 0, room * q_row * sizeof(T));
    std::memset(values, 0, room * row * sizeof(float));
    std::memset(weights, 0, room * MOST_KEYS * sizeof(P));
    for (int m = 0; m < count; ++m) {
        std::memcpy(q + m * q_row, work.query(m), k_dim * sizeof(T));
        work.peak[m] = LOWEST, work.total[m] = 0.0f;
    }
    int64_t first = work.first;
    auto take = [&](Block& block) {
        int64_t n = work.stop - first < keys ? work.stop - first : keys;
        if (n > 0) block.find(work.keys, first, n);
        block.count = (int)n;
        first += n;
    };
    take(blocks[0]);
    int64_t base = work.first;
    for (int turn = 0; blocks[turn].count > 0; turn ^= 1) {
        Block &block = blocks[turn], &next = blocks[turn ^ 1];
        const int n = block.count, wide = (int)round_up(n, VL);
        take(next);
        by_fours(count, [&](int m, auto size) {
            score<T, size.value>(q + m * q_row, q_row, block.k, n, k_dim, scores + m * MOST_KEYS,
                                 m ? nullptr : block.v, v_dim * sizeof(T));
        });
        for (int m = 0; m < count; ++m) {
            int64_t r = m / work.heads;
            float factor = weigh(scores + m * MOST_KEYS, work.low(r) - base, work.high(r) - base, wide,
                                 work.scale, work.softcap, work.peak[m], work.total[m],
                                 weights + m * MOST_KEYS);
            if (factor != 1.0f) rescale(values + m * row, row, factor);
        }
        const char* const* ahead = next.count == n ? next.k : nullptr;
        by_fours(count, [&](int m, auto size) {
            add_values<T, size.value>(weights + m * MOST_KEYS, block.v, n, v_dim, values + m * row, row,
                                      m ? nullptr : ahead, k_dim * sizeof(T));
        });
        base += n;
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
