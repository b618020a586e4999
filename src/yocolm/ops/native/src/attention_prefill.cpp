// Attention of many rows: blocks of folded queries against blocks of keys, by matrix products.
#include "attention.h"

using namespace yo;

namespace {

constexpr int64_t KEYS = 128;             // a block of keys: its panels stay in the second cache
constexpr int64_t QUERY_BYTES = 294912;   // of queries and their values: they stay there too
constexpr int64_t MOST_ROWS = 384 / TILE_ROWS * TILE_ROWS;

// A vector's worth of steps of k, as `panel` and `block` have them: pairs of bfloat16, or floats.
template <class C, class T>
inline vf load_steps(const T* p, int64_t count) {
    if constexpr (std::is_same<C, T>::value) {
        int64_t bytes = count * (int64_t)sizeof(T);
        return bytes >= (int64_t)sizeof(vf) ? load_bytes(p) : load_bytes(p, (int)bytes);
    } else {
        return count >= VL ? load(p) : load_some(p, (int)count);
    }
}

// Folded row `folded` of the queries as row r of a block.
template <class C, class T>
void put_query(const Work& work, int64_t folded, int r, C* block) {
    const T* x = (const T*)work.query(folded);
    constexpr int E = (int)(sizeof(vf) / sizeof(C)), L = LINE<C>;
    for (int64_t i = 0; i < work.k_dim; i += L)
        for (int j = 0; j < L; j += E) {
            int64_t left = work.k_dim - i - j;
            vf v = left > 0 ? load_steps<C>(x + i + j, left) : vf{};
            std::memcpy(block + i * TILE_ROWS + r * L + j, &v, sizeof(v));
        }
}

// Keys as panels of 32 tokens: [d][token], steps of k apart.
template <class C, class T>
void pack_keys(const char* const* rows, int64_t count, int64_t dim, C* panels, int64_t size) {
    constexpr int64_t W = sizeof(float) / sizeof(C), E = VL * W;
    for (int64_t t = 0; t < count; t += VL) {
        C* panel = panels + t / PANEL * size + t % PANEL * W;
        for (int64_t d = 0; d < dim; d += E) {
            vf x[VL];
            for (int i = 0; i < VL; ++i) {
                int64_t token = t + i < count ? t + i : count - 1;
                x[i] = load_steps<C>((const T*)rows[token] + d, dim - d);
            }
            transpose(x);
            for (int i = 0; i < VL; ++i)
                std::memcpy(panel + (d / W + i) * PANEL * W, &x[i], sizeof(vf));
        }
    }
}

// Values as panels of 32 columns: [token][column], in pairs of tokens where C is bfloat16.
template <class C, class T>
void pack_values(const char* const* rows, int64_t count, int64_t dim, C* panels, int64_t size) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same<C, bf16>::value) {
        alignas(64) uint16_t order[64];
        for (int i = 0; i < 64; ++i) order[i] = (uint16_t)(i / 2 + i % 2 * 32);
        const __m512i low = _mm512_load_si512(order), high = _mm512_load_si512(order + 32);
        for (int64_t d = 0; d < dim; d += PANEL) {
            C* panel = panels + d / PANEL * size;
            for (int64_t t = 0; t < count; t += 2, panel += 2 * PANEL) {
                __m512i a = (__m512i)load_steps<C>((const T*)rows[t] + d, dim - d), b = {};
                if (t + 1 < count) b = (__m512i)load_steps<C>((const T*)rows[t + 1] + d, dim - d);
                _mm512_storeu_si512(panel, _mm512_permutex2var_epi16(a, low, b));
                _mm512_storeu_si512(panel + PANEL, _mm512_permutex2var_epi16(a, high, b));
            }
        }
        return;
    }
#endif
    if constexpr (std::is_same<C, float>::value)
        for (int64_t d = 0; d < dim; d += PANEL)
            for (int64_t t = 0; t < count; ++t)
                for (int64_t i = d; i < d + PANEL; i += VL)
                    store(panels + d / PANEL * size + t * PANEL + i - d,
                          i < dim ? load_steps<C>((const T*)rows[t] + i, dim - i) : vf{});
}

struct Range {
    int64_t low, high;
};

template <class C, class T>
void attend(const Work& work) {
    const int64_t count = work.rows * work.heads, tiles = (count + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t k_wide = padded(work.k_dim), row = padded(work.v_dim);
    const int64_t k_panel = k_wide * PANEL, v_panel = KEYS * PANEL;
    const int64_t query_size = TILE_ROWS * k_wide, weight_size = TILE_ROWS * KEYS;

    char* memory = scratch<0>(
        tiles * (query_size * sizeof(C) + weight_size * (sizeof(float) + sizeof(C)) + 128) +
        (KEYS / PANEL * k_panel + row / PANEL * v_panel) * sizeof(C) +
        (tiles * TILE_ROWS * (row + 2)) * sizeof(float) + 2 * KEYS * sizeof(char*) + 4096);
    C* queries = carve<C>(memory, tiles * query_size);
    float* scores = carve<float>(memory, tiles * weight_size);
    C* weights = carve<C>(memory, tiles * weight_size);
    C* key_panels = carve<C>(memory, KEYS / PANEL * k_panel);
    C* value_panels = carve<C>(memory, row / PANEL * v_panel);
    float* values = carve<float>(memory, tiles * TILE_ROWS * row);
    const char** ks = carve<const char*>(memory, KEYS);
    const char** vs = carve<const char*>(memory, KEYS);
    Range* seen = carve<Range>(memory, tiles);

    std::memset(queries, 0, tiles * query_size * sizeof(C));
    std::memset(values, 0, tiles * TILE_ROWS * row * sizeof(float));
    std::memset(weights, 0, tiles * weight_size * sizeof(C));
    for (int64_t f = 0; f < count; ++f) {
        work.peak[f] = LOWEST, work.total[f] = 0.0f;
        put_query<C, T>(work, f, (int)(f % TILE_ROWS), queries + f / TILE_ROWS * query_size);
        Range& range = seen[f / TILE_ROWS];
        int64_t low = work.low(f / work.heads), high = work.high(f / work.heads);
        if (f % TILE_ROWS == 0 || low < range.low) range.low = low;
        if (f % TILE_ROWS == 0 || high > range.high) range.high = high;
    }
    for (int64_t base = work.first; base < work.stop; base += KEYS) {
        const int64_t n = work.stop - base < KEYS ? work.stop - base : KEYS;
        work.keys.find(base, n, ks, vs);
        pack_keys<C, T>(ks, n, work.k_dim, key_panels, k_panel);
        pack_values<C, T>(vs, n, work.v_dim, value_panels, v_panel);
        for (int64_t p = 0; p < n; p += PANEL)
            for (int64_t t = 0; t < tiles; ++t)
                if (seen[t].low < base + p + PANEL && seen[t].high > base + p)
                    tile(TILE_ROWS, work.k_dim, queries + t * query_size, key_panels + p / PANEL * k_panel,
                            scores + t * weight_size + p, KEYS, false);
        for (int64_t f = 0; f < count; ++f) {
            const int64_t t = f / TILE_ROWS, r = f % TILE_ROWS, place = f / work.heads;
            if (seen[t].low >= base + n || seen[t].high <= base) continue;
            float factor = weigh(scores + t * weight_size + r * KEYS, work.low(place) - base,
                                 work.high(place) - base, round_up(n, PANEL), work.scale, work.softcap,
                                 work.peak[f], work.total[f],
                                 weights + t * weight_size + r * LINE<C>, TILE_ROWS * LINE<C>);
            if (factor != 1.0f) rescale(values + f * row, row, factor);
        }
        for (int64_t d = 0; d < row; d += PANEL)
            for (int64_t t = 0; t < tiles; ++t) {
                int64_t low = seen[t].low - base, high = seen[t].high - base;
                low = low > 0 ? low / LINE<C> * LINE<C> : 0;
                if (high > n) high = n;
                if (low < high)
                    tile(TILE_ROWS, high - low, weights + t * weight_size + low * TILE_ROWS,
                            value_panels + d / PANEL * v_panel + low * PANEL,
                            values + t * TILE_ROWS * row + d, row, true);
            }
    }
    std::memcpy(work.values, values, count * row * sizeof(float));
}

}  // namespace

namespace yo {

int64_t many_rows_block(int64_t k_dim, int64_t v_dim) {
    int64_t rows = QUERY_BYTES / (2 * k_dim + 4 * v_dim) / TILE_ROWS * TILE_ROWS;
    return rows < 4 * TILE_ROWS ? 4 * TILE_ROWS : rows > MOST_ROWS ? MOST_ROWS : rows;
}

void attend_many(const Work& work, bool is_bf16) {
    if (!is_bf16)
        attend<float, float>(work);
    else
        attend<lhs_t<bf16>, bf16>(work);
}

}  // namespace yo
