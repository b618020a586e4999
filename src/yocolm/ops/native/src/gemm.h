// The inner kernel of matrix products: a tile of C [m x 32] from m rows of A and one panel of B.
//
// A panel holds 32 columns of B, side by side for each k. Of float32: [K][32]. Of bfloat16:
// [ceil(K / 2)][32][2], pairs of neighbouring k as dpbf16 wants them, an odd K filled up with zeros.
// A block holds up to TILE_ROWS rows of A in lines of 64 bytes: [ceil(K / LINE)][m][LINE], filled up
// with zeros, so that a tile reads it from one pointer and its rows never fall on the same cache set.
// Its elements are float32, and bfloat16 (`lhs_t`) where there is dpbf16 for panels of bfloat16.
#pragma once
#include <type_traits>

#include "simd.h"

namespace yo {

constexpr int PANEL = 32;                       // columns of a panel
constexpr int TILE_ROWS = VL == 16 ? 12 : 6;    // most rows of a tile: what the registers hold

// Bytes from where a panel is used to where it is fetched, and whether into the first cache: measured
// from memory, by the rows of a tile.
constexpr int64_t fetch_distance(int m) { return m <= 2 ? 4096 : 8192; }
constexpr bool fetch_near(int m) { return m > 2 && m < 6; }

template <class T>
constexpr int LINE = 64 / (int)sizeof(T);
template <class TB>
using lhs_t = std::conditional_t<HAS_BF16_DOT && std::is_same<TB, bf16>::value, bf16, float>;

inline int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }
// Elements of a panel, and of a row of a block.
template <class TB>
inline int64_t panel_size(int64_t k) {
    return PANEL * (std::is_same<TB, bf16>::value ? round_up(k, 2) : k);
}
template <class TA>
inline int64_t block_row_size(int64_t k) {
    return round_up(k, LINE<TA>);
}

// Rows x [m, k], `stride` elements apart, as a block.
template <class TA, class T>
inline void make_block(const T* x, int64_t stride, int m, int64_t k, TA* block) {
    constexpr int L = LINE<TA>;
    for (int r = 0; r < m; ++r) {
        const T* row = x + r * stride;
        TA* out = block + r * L;
        int64_t i = 0;
        for (; i + L <= k; i += L, out += (int64_t)m * L) {
            if constexpr (std::is_same<TA, T>::value)
                std::memcpy(out, row + i, 64);
            else
                for (int j = 0; j < L; j += VL) store(out + j, load(row + i + j));
        }
        if (i < k)
            for (int j = 0; j < L; ++j) put(out + j, i + j < k ? to_float(row[i + j]) : 0.0f);
    }
}

namespace gemm {

// How many vectors of columns are kept at a time. Few rows take all of the panel in one pass.
template <int M>
constexpr int VECTORS = M <= 2 ? PANEL / VL : VL == 16 ? 2 : VL == 8 ? 2 : 4;

inline vf low_half(vu x) { return as_vf(x << 16); }
inline vf high_half(vu x) { return as_vf(x & 0xffff0000u); }

// acc [M][N] += the step of one pair of k (bfloat16 panels), or of one k (float32 panels).
template <int M, int N>
inline __attribute__((always_inline)) void step(vf (&acc)[M][N], const bf16* a, const bf16* b) {
    vf columns[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) columns[j] = load_as<vf>(b + j * 2 * VL);
#pragma GCC unroll 16
    for (int r = 0; r < M; ++r) {
        int32_t pair;
        std::memcpy(&pair, a + r * LINE<bf16>, 4);
        vi both = pair - vi{};
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) acc[r][j] = dot_bf16(acc[r][j], &both, &columns[j]);
    }
}
template <int M, int N>
inline __attribute__((always_inline)) void step(vf (&acc)[M][N], const float* a, const bf16* b) {
    vf columns[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) columns[j] = low_half(load_as<vu>(b + j * 2 * VL));
#pragma GCC unroll 16
    for (int r = 0; r < M; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) acc[r][j] += a[r * LINE<float>] * columns[j];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) columns[j] = high_half(load_as<vu>(b + j * 2 * VL));
#pragma GCC unroll 16
    for (int r = 0; r < M; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) acc[r][j] += a[r * LINE<float> + 1] * columns[j];
}
template <int M, int N>
inline __attribute__((always_inline)) void step(vf (&acc)[M][N], const float* a, const float* b) {
    vf columns[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) columns[j] = load(b + j * VL);
#pragma GCC unroll 16
    for (int r = 0; r < M; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) acc[r][j] += a[r * LINE<float>] * columns[j];
}

// What is fetched while a tile is made: a line every `step` bytes from `at` on, for every 64 bytes of
// the panel one.
struct Ahead {
    const char* at;
    int64_t step;
};

// c [M, N * VL] (+)= the block times N vectors of the panel's columns.
template <int M, int N, class TA, class TB>
void columns(int64_t k, const TA* a, const TB* b, float* c, int64_t ldc, bool add, Ahead ahead) {
    constexpr int WIDTH = std::is_same<TB, bf16>::value ? 2 : 1;  // values of k in a step
    constexpr int STEPS = LINE<TA> / WIDTH;                       // steps in a line
    constexpr int64_t ROW = PANEL * WIDTH;
    vf acc[M][N];
#pragma GCC unroll 16
    for (int r = 0; r < M; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) acc[r][j] = add ? load(c + r * ldc + j * VL) : vf{};
    int64_t steps = (k + WIDTH - 1) / WIDTH;
    for (; steps >= STEPS; steps -= STEPS, a += M * LINE<TA>) {
#pragma GCC unroll 2
        for (int s = 0; s < STEPS; s += 2, b += 2 * ROW) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i, ahead.at += ahead.step)
                __builtin_prefetch(ahead.at, 0, fetch_near(M) ? 3 : 2);
            step<M, N>(acc, a + s * WIDTH, b);
            step<M, N>(acc, a + (s + 1) * WIDTH, b + ROW);
        }
    }
    for (int64_t s = 0; s < steps; ++s, b += ROW) step<M, N>(acc, a + s * WIDTH, b);
#pragma GCC unroll 16
    for (int r = 0; r < M; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j)
            store(c + r * ldc + j * VL, acc[r][j]);
}

template <int M, class TA, class TB>
void rows(int m, int64_t k, const TA* a, const TB* b, float* c, int64_t ldc, bool add,
          Ahead ahead) {
    if constexpr (M > 1) {
        if (m < M) return rows<M - 1>(m, k, a, b, c, ldc, add, ahead);
    }
    constexpr int N = VECTORS<M>, WIDTH = std::is_same<TB, bf16>::value ? 2 : 1;
    for (int j = 0; j < PANEL; j += N * VL)
        columns<M, N>(k, a, b + j * WIDTH, c + j, ldc, add, ahead);
}

}  // namespace gemm

// c [m, 32], rows `ldc` apart, = a block of m rows (1 .. TILE_ROWS) times a panel; `add`: += instead.
// Sums in float32, in the order of k for every m: an element of c is the same to the last bit
// whatever rows are beside its own.
//
// Meanwhile the panel is fetched from fetch_distance bytes ahead on, which is right where each panel
// is used once. Where `tiles` of them use the same panel, the one called `index` fetches its share of
// the panel after it.
template <class TA, class TB>
inline void tile(int m, int64_t k, const TA* block, const TB* panel, float* c, int64_t ldc,
                 bool add = false, int64_t index = 0, int64_t tiles = 1) {
    const int64_t size = panel_size<TB>(k) * (int64_t)sizeof(TB);
    const int64_t from = tiles == 1 ? fetch_distance(m) : size + size * index / tiles;
    gemm::rows<TILE_ROWS>(m, k, block, panel, c, ldc, add,
                          {(const char*)panel + from, (64 + tiles - 1) / tiles});
}

}  // namespace yo
