// Gated retention over packed sequences, chunk by chunk, on states in the slots of a pool. States,
// decays and products are float32. Columns of a state are independent of each other and each is
// computed in one order, so results do not depend on how they are shared out.
#include <type_traits>
#include <utility>
#include <vector>

#include "parallel.h"
#include "retention.h"
#include "simd.h"

using namespace yo;

namespace {

constexpr int64_t SERIAL_WORK = 1 << 19;  // multiplications that one thread does sooner than two
constexpr int NV = VL == 8 ? 2 : 4;       // vectors a panel: what the registers hold beside MR rows
constexpr int MR = 6;
constexpr int PANEL = NV * VL;
constexpr float LOWEST_DECAY = -128;  // exp of it is 0; sums of lower ones would lose the others

// acc [M][N] += A [M, n] B [n, N vectors of a panel]; A's rows and columns are rs and cs apart.
template <int M, int N>
inline __attribute__((always_inline)) void multiply(vf (&acc)[M][N], const float* a, int64_t rs,
                                                    int64_t cs, const float* b, int64_t n) {
    for (int64_t i = 0; i < n; ++i, a += cs, b += PANEL) {
        vf columns[N];
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) columns[j] = load(b + j * VL);
#pragma GCC unroll 8
        for (int r = 0; r < M; ++r) {
            vf x = splat(a[r * rs]);
#pragma GCC unroll 8
            for (int j = 0; j < N; ++j) acc[r][j] += x * columns[j];
        }
    }
}

// Calls f with a compile-time number of vectors, at least as many as are wanted.
template <class F>
inline void with_vectors(int64_t columns, F f) {
    if (columns <= VL)
        f(std::integral_constant<int, 1>{});
    else if (columns <= 2 * VL)
        f(std::integral_constant<int, 2>{});
    else
        f(std::integral_constant<int, NV>{});
}
// Calls f(first row, compile-time number of rows) until all rows are done.
template <class F>
inline void with_rows(int64_t rows, F f) {
    int64_t r = 0;
    for (; r + MR <= rows; r += MR) f(r, std::integral_constant<int, MR>{});
    for (; r + 3 <= rows; r += 3) f(r, std::integral_constant<int, 3>{});
    for (; r < rows; ++r) f(r, std::integral_constant<int, 1>{});
}

// One step of the transposition of VL x VL: swaps what lies H columns right with what lies H rows
// below.
template <int H, size_t... J>
inline void swap_halves(vf& a, vf& b, std::index_sequence<J...>) {
    vf x = a, y = b;
#if defined(__clang__)
    a = __builtin_shufflevector(x, y, (int)(J & H ? J - H + VL : J)...);
    b = __builtin_shufflevector(x, y, (int)(J & H ? J + VL : J + H)...);
#else
    a = __builtin_shuffle(x, y, vi{(int)(J & H ? J - H + VL : J)...});
    b = __builtin_shuffle(x, y, vi{(int)(J & H ? J + VL : J + H)...});
#endif
}
template <int H>
inline __attribute__((always_inline)) void transpose(vf (&rows)[VL]) {
    if constexpr (H > 0) {
#pragma GCC unroll 16
        for (int i = 0; i < VL; ++i)
            if (!(i & H)) swap_halves<H>(rows[i], rows[i + H], std::make_index_sequence<VL>{});
        transpose<H / 2>(rows);
    }
}

inline vf counting() {
    float lanes[VL];
    for (int i = 0; i < VL; ++i) lanes[i] = (float)i;
    return load(lanes);
}

// What one head needs of one chunk, and the state; kept by each thread from call to call.
struct Work {
    std::vector<float> memory;
    int64_t chunk, panels, k_size, columns;  // panels: of columns
    float *q, *keys, *k_end, *scores, *values, *state;
    float *high, *low, *from_start, *to_end;

    void prepare(int64_t chunk_, int64_t k, int64_t columns_) {
        chunk = (chunk_ + PANEL - 1) / PANEL * PANEL, k_size = k, columns = columns_;
        panels = (columns + PANEL - 1) / PANEL;
        const int64_t sizes[] = {chunk * k,  chunk * k, chunk * k, chunk * chunk, chunk * panels * PANEL,
                                 k * panels * PANEL, chunk, chunk, chunk, chunk};
        float** parts[] = {&q, &keys, &k_end, &scores, &values, &state, &high, &low, &from_start, &to_end};
        size_t total = 16;
        for (int64_t size : sizes) total += (size_t)((size + 15) / 16 * 16);
        if (memory.size() < total) memory.resize(total);
        float* at = (float*)(((uintptr_t)memory.data() + 63) / 64 * 64);
        for (int i = 0; i < 10; ++i) *parts[i] = at, at += (sizes[i] + 15) / 16 * 16;
    }
    int64_t width(int64_t panel) const {
        return columns - panel * PANEL < PANEL ? columns - panel * PANEL : PANEL;
    }
    float* state_panel(int64_t i) const { return state + i * k_size * PANEL; }
    float* value_panel(int64_t i) const { return values + i * chunk * PANEL; }
};

// A row of x as floats, `count` of them; the rest of its vectors become 0.
template <class T>
inline void widen(const T* x, int64_t count, float* out) {
    int64_t i = 0;
    for (; i + VL <= count; i += VL) store(out + i, load(x + i));
    if (i < count) store(out + i, load_some(x + i, (int)(count - i)));
}

template <class T>
void load_panels(const T* x, int64_t stride, int64_t rows, const Work& w, float* panels,
                 int64_t panel_rows) {
    for (int64_t i = 0; i < w.panels; ++i) {
        float* panel = panels + i * panel_rows * PANEL;
        if (w.width(i) < PANEL) std::memset(panel, 0, rows * PANEL * 4);
        for (int64_t r = 0; r < rows; ++r)
            widen(x + r * stride + i * PANEL, w.width(i), panel + r * PANEL);
    }
}
void store_state(const Work& w, float* out, int64_t stride) {
    for (int64_t i = 0; i < w.panels; ++i)
        for (int64_t r = 0; r < w.k_size; ++r)
            std::memcpy(out + r * stride + i * PANEL, w.state_panel(i) + r * PANEL, w.width(i) * 4);
}

// Sums of the log-decays within the chunk (as two floats each: differences of large ones matter),
// and the decays from its start and to its end. Returns the decay over all of it.
float load_decays(const Problem& p, const Work& w, int64_t token, int64_t count, int64_t head) {
    double total = 0;
    for (int64_t i = 0; i < w.chunk; ++i) {
        if (i < count) {
            float x = *p.log_decay.row<float>(token + i, head);
            total += x < LOWEST_DECAY ? LOWEST_DECAY : x;
        }
        w.high[i] = (float)total;
        w.low[i] = (float)(total - w.high[i]);
    }
    const float high = w.high[count - 1], low = w.low[count - 1];
    for (int64_t i = 0; i < count; i += VL) {
        vf a = load(w.high + i), b = load(w.low + i);
        store(w.from_start + i, vexp(a + b) * p.scale);
        store(w.to_end + i, vexp((high - a) + (low - b)));
    }
    return std::exp(high + low);
}

// Keys times their decay to the end [chunk, K], and transposed, in panels [K, PANEL] of tokens.
template <class T>
void load_keys(const T* x, int64_t stride, int64_t count, const Work& w) {
    const int64_t size = w.k_size;
    for (int64_t t = 0; t < count; t += VL) {
        float* panel = w.keys + t / PANEL * size * PANEL + t % PANEL;
        for (int64_t f = 0; f < size; f += VL) {
            const int rest = size - f < VL ? (int)(size - f) : VL;
            vf rows[VL];
            for (int i = 0; i < VL; ++i) {
                rows[i] = vf{};
                if (t + i >= count) continue;
                const T* from = x + (t + i) * stride + f;
                rows[i] = rest == VL ? load(from) : load_some(from, rest);
                float* to = w.k_end + (t + i) * size + f;
                if (rest == VL)
                    store(to, rows[i] * w.to_end[t + i]);
                else
                    store_some(to, rows[i] * w.to_end[t + i], rest);
            }
            transpose<VL / 2>(rows);
            for (int i = 0; i < rest; ++i) store(panel + (f + i) * PANEL, rows[i]);
        }
    }
}

// scores [count, count] = scale * decay * q k^T, 0 behind the diagonal.
void make_scores(const Work& w, int64_t count, float scale) {
    const vf lanes = counting();
    with_rows(count, [&](int64_t r0, auto rows) {
        constexpr int M = decltype(rows)::value;
        for (int64_t c0 = 0; c0 < r0 + M; c0 += PANEL)
            with_vectors(r0 + M - c0, [&](auto vectors) {
                constexpr int N = decltype(vectors)::value;
                vf acc[M][N] = {};
                multiply(acc, w.q + r0 * w.k_size, w.k_size, 1, w.keys + c0 * w.k_size, w.k_size);
                for (int j = 0; j < N; ++j) {
                    const int64_t c = c0 + j * VL;
                    const vf high = load(w.high + c), low = load(w.low + c);
                    for (int r = 0; r < M; ++r) {
                        const int64_t i = r0 + r;
                        vf gap = (w.high[i] - high) + (w.low[i] - low);
                        auto later = lanes > splat((float)(i - c));
                        gap = later ? splat(-INFINITY) : gap;
                        vf score = acc[r][j] * (vexp(gap) * scale);
                        store(w.scores + i * w.chunk + c, later ? vf{} : score);
                    }
                }
            });
    });
}

template <class T>
void make_output(const Work& w, int64_t count, T* out, int64_t stride) {
    for (int64_t panel = 0; panel < w.panels; ++panel)
        with_vectors(w.width(panel), [&](auto vectors) {
            constexpr int N = decltype(vectors)::value;
            const int64_t width = w.width(panel);
            with_rows(count, [&](int64_t r0, auto rows) {
                constexpr int M = decltype(rows)::value;
                vf acc[M][N] = {};
                multiply(acc, w.q + r0 * w.k_size, w.k_size, 1, w.state_panel(panel), w.k_size);
                for (int r = 0; r < M; ++r)
                    for (int j = 0; j < N; ++j) acc[r][j] *= w.from_start[r0 + r];
                multiply(acc, w.scores + r0 * w.chunk, w.chunk, 1, w.value_panel(panel), r0 + M);
                for (int r = 0; r < M; ++r) {
                    T* to = out + (r0 + r) * stride + panel * PANEL;
                    for (int j = 0; j < N; ++j) {
                        if ((j + 1) * VL <= width)
                            store(to + j * VL, acc[r][j]);
                        else if (j * VL < width)
                            store_some(to + j * VL, acc[r][j], (int)(width - j * VL));
                    }
                }
            });
        });
}

void update_state(const Work& w, int64_t count, float decay) {
    for (int64_t panel = 0; panel < w.panels; ++panel)
        with_vectors(w.width(panel), [&](auto vectors) {
            constexpr int N = decltype(vectors)::value;
            with_rows(w.k_size, [&](int64_t r0, auto rows) {
                constexpr int M = decltype(rows)::value;
                float* state = w.state_panel(panel) + r0 * PANEL;
                vf acc[M][N];
                for (int r = 0; r < M; ++r)
                    for (int j = 0; j < N; ++j) acc[r][j] = load(state + r * PANEL + j * VL) * decay;
                multiply(acc, w.k_end + r0, 1, w.k_size, w.value_panel(panel), count);
                for (int r = 0; r < M; ++r)
                    for (int j = 0; j < N; ++j) store(state + r * PANEL + j * VL, acc[r][j]);
            });
        });
}

// One head of one sequence, some columns of its state.
template <class T>
void run_chunks(const Problem& p, Work& w, int64_t start, int64_t stop, int64_t head, int64_t column,
                const float* initial, float* final, T* out, int64_t chunk) {
    load_panels(initial + column, p.v_size, p.k_size, w, w.state, p.k_size);
    for (int64_t t = start; t < stop; t += chunk) {
        const int64_t count = stop - t < chunk ? stop - t : chunk;
        const float decay = load_decays(p, w, t, count, head);
        load_keys(p.k.row<T>(t, head), p.k.token, count, w);
        load_panels(p.v.row<T>(t, head) + column, p.v.token, count, w, w.values, w.chunk);
        if (out) {
            for (int64_t i = 0; i < count; ++i)
                if (w.k_size % VL == 0)
                    widen(p.q.row<T>(t + i, head), w.k_size, w.q + i * w.k_size);
                else
                    for (int64_t f = 0; f < w.k_size; ++f)
                        w.q[i * w.k_size + f] = to_float(p.q.row<T>(t + i, head)[f]);
            make_scores(w, count, p.scale);
            make_output(w, count, out + (t * p.heads + head) * p.v_size + column,
                        p.heads * p.v_size);
        }
        update_state(w, count, decay);
    }
    store_state(w, final + column, p.v_size);
}

template <class T>
void chunks(const Problem& p, const float* initial, const int64_t* initial_slots, float* final,
            const int64_t* final_slots, T* out, const int64_t* starts, const int64_t* stops,
            int64_t sequences, int64_t chunk, int threads) {
    int64_t tokens = 0;
    for (int64_t s = 0; s < sequences; ++s) tokens += stops[s] - starts[s];
    const int64_t states = sequences * p.heads, size = p.k_size * p.v_size;
    if (tokens * p.heads * size < SERIAL_WORK) threads = 1;
    // Every part makes the scores anew: no more of them than it takes to keep all threads busy.
    int64_t parts = 1, most = (p.v_size + PART - 1) / PART;
    while (parts < most && states * parts < 4 * threads && states * parts % threads) ++parts;
    const int64_t width = (most + parts - 1) / parts * PART;
    parts = (p.v_size + width - 1) / width;
    parallel_items(threads, states * parts, [&](int64_t item) {
        static thread_local Work w;
        const int64_t column = item % parts * width, head = item / parts % p.heads;
        const int64_t s = item / parts / p.heads;
        const int64_t from = initial_slots ? initial_slots[s] : s, to = final_slots ? final_slots[s] : s;
        w.prepare(chunk, p.k_size, p.v_size - column < width ? p.v_size - column : width);
        run_chunks(p, w, starts[s], stops[s], head, column, initial + (from * p.heads + head) * size,
                   final + (to * p.heads + head) * size, out, chunk);
    });
}

}  // namespace

extern "C" {

// Arguments as of yo_retention_step, for the tokens starts[s] .. stops[s] - 1 of each sequence, from
// the states initial[initial_slots[s]] to final[final_slots[s]], which may be the same; no slots: one
// after another. out may be null, then q is not read.
void yo_retention_chunks(const void* q, int64_t q_token, int64_t q_head, const void* k,
                         int64_t k_token, int64_t k_head, const void* v, int64_t v_token,
                         int64_t v_head, const float* log_decay, int64_t d_token, int64_t d_head,
                         const float* initial, const int64_t* initial_slots, float* final,
                         const int64_t* final_slots, void* out, const int64_t* starts,
                         const int64_t* stops, int64_t sequences, int64_t heads, int64_t k_size,
                         int64_t v_size, float scale, int64_t chunk, int is_bf16, int threads) {
    Problem p{{q, q_token, q_head},        {k, k_token, k_head}, {v, v_token, v_head},
              {log_decay, d_token, d_head}, heads,                k_size,
              v_size,                       scale};
    if (is_bf16)
        chunks(p, initial, initial_slots, final, final_slots, (bf16*)out, starts, stops, sequences,
               chunk, threads);
    else
        chunks(p, initial, initial_slots, final, final_slots, (float*)out, starts, stops, sequences,
               chunk, threads);
}

}  // extern "C"
