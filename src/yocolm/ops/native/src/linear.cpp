// Packed weights: y = act(x W^T + bias), for any number of rows.
//
// A weight [n, k] is kept as panels of 32 outputs, as gemm.h wants them. Of a gated pair (gates in
// rows 0 .. n / 2 - 1, ups in the others) a panel holds 16 gates and the 16 ups that belong to them.
#include <cstdlib>

#include "gemm.h"
#include "packed.h"
#include "parallel.h"

using namespace yo;

namespace {

enum Activation { NONE = 0, GELU = 1, SILU = 2 };

constexpr int HALF = PANEL / 2;
constexpr double READ_RATE = 30, BF16_RATE = 200, FP32_RATE = 100;  // a thread's, per nanosecond
constexpr double SERIAL_TIME = 8000;     // ns: less is done sooner than a second thread wakes up
constexpr double ITEM_TIME = 3000;       // ns of work that a thread takes at a time, at least
constexpr int64_t BLOCK_BYTES = 384 * 1024;  // of rows of x that stay in a core's second cache
constexpr int64_t SPLIT_ROWS = 48;       // rows that are worth reading the weights again for

int64_t panels_of(int64_t n, bool glu) {
    return glu ? (n / 2 + HALF - 1) / HALF : (n + PANEL - 1) / PANEL;
}

// The row of the weight that is column j of a panel; -1: none, a column of zeros.
int64_t row_of(int64_t panel, int j, int64_t n, bool glu) {
    if (!glu) return panel * PANEL + j < n ? panel * PANEL + j : -1;
    int64_t output = panel * HALF + j % HALF;
    return output < n / 2 ? output + (j < HALF ? 0 : n / 2) : -1;
}

// One panel of the weight w, rows `stride` apart. U: uint32 for pairs of bfloat16, or float.
template <class T, class U>
void pack_panel(const T* w, int64_t stride, int64_t n, int64_t k, bool glu, int64_t panel, T* out) {
    constexpr int WIDTH = sizeof(U) / sizeof(T);
    constexpr int STEPS = 64 / sizeof(U);
    int64_t steps = (k + WIDTH - 1) / WIDTH;
    for (int64_t s = 0; s < steps; s += STEPS)
        for (int j = 0; j < PANEL; ++j) {
            int64_t row = row_of(panel, j, n, glu), left = k - s * WIDTH;
            U line[STEPS] = {};
            int64_t values = left < STEPS * WIDTH ? left : STEPS * WIDTH;
            if (row >= 0) std::memcpy(line, w + row * stride + s * WIDTH, values * sizeof(T));
            U* to = (U*)out + s * PANEL + j;
            if (steps - s >= STEPS)
                for (int i = 0; i < STEPS; ++i) to[i * PANEL] = line[i];
            else
                for (int64_t i = 0; i < steps - s; ++i) to[i * PANEL] = line[i];
        }
}

// Memory of a thread, kept for its next call.
template <class T>
T* scratch(int64_t elements) {
    struct Memory {
        void* at = nullptr;
        size_t bytes = 0;
        ~Memory() { std::free(at); }
    };
    static thread_local Memory memory;
    size_t needed = (elements * sizeof(T) + 63) / 64 * 64;
    if (memory.bytes < needed) {
        std::free(memory.at);
        memory.at = std::aligned_alloc(64, needed);
        memory.bytes = memory.at ? needed : 0;
        if (!memory.at) std::abort();
    }
    return (T*)memory.at;
}

inline vf activate(int activation, vf v) {
    return activation == GELU ? gelu_tanh(v) : activation == SILU ? silu(v) : v;
}

template <class T>
struct Packed {
    using TA = lhs_t<T>;
    const T *x, *panels, *other;
    const float* bias;  // in the order of the panels' columns, or null
    T* y;
    int64_t x_stride, other_stride, y_stride, rows, k;
    int64_t first, stop;  // outputs that are wanted
    int activation;
    bool glu;

    int width() const { return glu ? HALF : PANEL; }  // outputs of a panel

    // Rows row .. row + m - 1 of a panel's products c [m, PANEL] into y.
    void finish(float* c, int m, int64_t row, int64_t panel) const {
        const int64_t start = panel * width();
        const int low = (int)(first > start ? first - start : 0);
        const int high = (int)(stop - start < width() ? stop - start : width());
        const bool whole = low == 0 && high == width();
        for (int r = 0; r < m; ++r, c += PANEL) {
            T* to = y + (row + r) * y_stride + (start - first);
            const T* beside = other ? other + (row + r) * other_stride + (start - first) : nullptr;
            for (int j = 0; j < width(); j += VL) {
                vf v = value(c, panel, j);
                if (whole)
                    store(to + j, beside ? combine(v, load(beside + j)) : v);
                else
                    store(c + j, v);
            }
            if (whole) continue;
            for (int j = low; j < high; ++j)
                put(to + j, !beside ? c[j]
                            : activation ? c[j] * to_float(beside[j])
                                         : c[j] + to_float(beside[j]));
        }
    }
    vf value(const float* c, int64_t panel, int j) const {
        const float* add = bias ? bias + panel * PANEL + j : nullptr;
        vf v = load(c + j);
        v = activate(activation, add ? v + load(add) : v);
        if (!glu) return v;
        vf up = load(c + HALF + j);
        return v * (add ? up + load(add + HALF) : up);
    }
    vf combine(vf v, vf beside) const { return activation ? v * beside : v + beside; }

    // `count` rows from `row` on times the panels from .. to - 1.
    void multiply(int64_t row, int64_t count, int64_t from, int64_t to, const TA* block) const {
        const int64_t tiles = (count + TILE_ROWS - 1) / TILE_ROWS, step = panel_size<T>(k);
        alignas(64) float c[TILE_ROWS * PANEL];
        for (int64_t panel = from; panel < to; ++panel)
            for (int64_t t = 0; t < tiles; ++t) {
                int64_t start = count * t / tiles, end = count * (t + 1) / tiles;
                int m = (int)(end - start);
                tile(m, k, block + start * block_row_size<TA>(k), panels + panel * step, c, PANEL,
                     false, t, tiles);
                finish(c, m, row + start, panel);
            }
    }

    // Rows of x as blocks of a tile each, in this thread's memory; or x itself where it is one.
    const TA* blocks(int64_t row, int64_t count) const {
        if constexpr (std::is_same<TA, T>::value)
            if (count == 1 && k % LINE<T> == 0) return x + row * x_stride;
        const int64_t tiles = (count + TILE_ROWS - 1) / TILE_ROWS, size = block_row_size<TA>(k);
        TA* made = scratch<TA>(count * size);
        for (int64_t t = 0; t < tiles; ++t) {
            int64_t start = count * t / tiles, end = count * (t + 1) / tiles;
            make_block(x + (row + start) * x_stride, x_stride, (int)(end - start), k,
                       made + start * size);
        }
        return made;
    }

    void run(int threads) const {
        if (rows == 0 || stop <= first) return;
        const int64_t from = first / width(), to = (stop - 1) / width() + 1, count = to - from;
        const double time = panel_time() * count;
        if (time < SERIAL_TIME) threads = 1;
        // Many rows: each thread has its own. Few: each has its own panels.
        const int64_t most = most_rows();
        int64_t block_rows = rows < most ? rows : most;
        if (threads > 1 && rows >= 2 * threads * SPLIT_ROWS) {
            int64_t share = (rows + 4 * threads - 1) / (4 * threads);
            share = round_up(share > SPLIT_ROWS ? share : SPLIT_ROWS, TILE_ROWS);
            if (share < block_rows) block_rows = share;
        }
        int64_t blocks_ = (rows + block_rows - 1) / block_rows;
        if (blocks_ >= threads) blocks_ = round_up(blocks_, threads);  // an equal share for each
        int64_t chunks = threads == 1 || blocks_ >= 4 * threads ? 1 : 4 * threads / blocks_;
        if (chunks > time / blocks_ / ITEM_TIME) chunks = (int64_t)(time / blocks_ / ITEM_TIME);
        if (chunks > count) chunks = count;
        if (chunks < 1) chunks = 1;
        parallel_items(threads, blocks_ * chunks, [&](int64_t item) {
            int64_t b = item / chunks, chunk = item % chunks;
            int64_t row = rows * b / blocks_, end = rows * (b + 1) / blocks_;
            multiply(row, end - row, from + count * chunk / chunks,
                     from + count * (chunk + 1) / chunks, blocks(row, end - row));
        });
    }
    // Nanoseconds that one thread needs for one panel: reading it, or its products.
    double panel_time() const {
        double read = panel_size<T>(k) * sizeof(T) / READ_RATE;
        double products = 2.0 * rows * k * PANEL / (sizeof(TA) == 2 ? BF16_RATE : FP32_RATE);
        return read > products ? read : products;
    }
    int64_t most_rows() const {
        int64_t fit = BLOCK_BYTES / (block_row_size<TA>(k) * (int64_t)sizeof(TA));
        fit = fit / TILE_ROWS * TILE_ROWS;
        return fit < TILE_ROWS ? TILE_ROWS : fit > 20 * TILE_ROWS ? 20 * TILE_ROWS : fit;
    }
};

}  // namespace

extern "C" {

// The weight w [n, k], rows `stride` elements apart, as panels.
void yo_pack(const void* w, int64_t stride, int64_t n, int64_t k, int glu, void* out, int is_bf16,
             int threads) {
    parallel_ranges(threads, panels_of(n, glu), [&](int64_t from, int64_t to) {
        for (int64_t p = from; p < to; ++p)
            if (is_bf16)
                pack_panel<bf16, uint32_t>((const bf16*)w, stride, n, k, glu, p,
                                           (bf16*)out + p * panel_size<bf16>(k));
            else
                pack_panel<float, float>((const float*)w, stride, n, k, glu, p,
                                         (float*)out + p * panel_size<float>(k));
    });
}

// y [rows, stop - first] = outputs first .. stop - 1 of x [rows, k] times a packed weight. `bias`
// (float32, in the order of the panels) and `other` [rows, stop - first] may be null; activation is
// 0: none, 1: GELU (tanh), 2: SiLU. With `glu` an output is act(gate) * up. With `other` it is
// multiplied by it after an activation, and added to it without one. x and y do not overlap; other
// may be y.
void yo_packed_linear(const void* x, int64_t x_stride, const void* panels, const void* bias,
                      const void* other, int64_t other_stride, void* y, int64_t y_stride,
                      int64_t rows, int64_t k, int64_t first, int64_t stop, int activation, int glu,
                      int is_bf16, int threads) {
    if (is_bf16)
        Packed<bf16>{(const bf16*)x, (const bf16*)panels, (const bf16*)other, (const float*)bias,
                     (bf16*)y, x_stride, other_stride, y_stride, rows, k, first, stop, activation,
                     glu != 0}.run(threads);
    else
        Packed<float>{(const float*)x, (const float*)panels, (const float*)other,
                      (const float*)bias, (float*)y, x_stride, other_stride, y_stride, rows, k,
                      first, stop, activation, glu != 0}.run(threads);
}

}  // extern "C"

YO_PACKED(yo_packed_linear)
