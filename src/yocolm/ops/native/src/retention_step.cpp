// Gated retention, a token a sequence, on states in the slots of a pool. Columns of a state are
// independent of each other and each is computed in one order, so results do not depend on how they
// are shared out.
#include "parallel.h"
#include "retention.h"
#include "simd.h"

using namespace yo;

namespace {

constexpr int64_t SERIAL_STATE = 65536;  // floats of state that one thread steps sooner than two
constexpr int64_t BLOCK = 512;           // columns that a step takes at a time, at most

// Advances N vectors of columns of a state [rows] and multiplies by q; `count` of the columns exist.
template <class T, int N, bool WHOLE>
void step_columns(const T* q, const T* k, const T* v, float decay, float scale, float* state,
                  int64_t rows, int64_t stride, T* out, int count) {
    float value[N * VL];
    vf sum[N];
    for (int j = 0; j < N; ++j) {
        store(value + j * VL, WHOLE ? load(v + j * VL) : load_some(v, count));
        sum[j] = vf{};
    }
    for (int64_t r = 0; r < rows; ++r) {
        float* row = state + r * stride;
        vf key = splat(to_float(k[r])), query = splat(to_float(q[r]));
        for (int j = 0; j < N; ++j) {
            vf s = WHOLE ? load(row + j * VL) : load_some(row, count);
            s = s * decay + key * load(value + j * VL);
            if (WHOLE)
                store(row + j * VL, s);
            else
                store_some(row, s, count);
            sum[j] += query * s;
        }
    }
    for (int j = 0; j < N; ++j) {
        if (WHOLE)
            store(out + j * VL, sum[j] * scale);
        else
            store_some(out, sum[j] * scale, count);
    }
}

// The same for `count` columns, a multiple of VL and at most BLOCK: more than registers hold. Rows
// come one after another, as memory is read fastest in its own order.
template <class T>
void step_block(const T* q, const T* k, const T* v, float decay, float scale, float* state,
                int64_t rows, int64_t stride, T* out, int64_t count) {
    float value[BLOCK], sum[BLOCK];
    for (int64_t c = 0; c < count; c += VL) store(value + c, load(v + c)), store(sum + c, vf{});
    for (int64_t r = 0; r < rows; ++r) {
        float* row = state + r * stride;
        vf key = splat(to_float(k[r])), query = splat(to_float(q[r]));
        for (int64_t c = 0; c < count; c += VL) {
            vf s = load(row + c) * decay + key * load(value + c);
            store(row + c, s);
            store(sum + c, load(sum + c) + query * s);
        }
    }
    for (int64_t c = 0; c < count; c += VL) store(out + c, load(sum + c) * scale);
}

template <class T>
void step(const Problem& p, float* pool, const int64_t* slots, T* out, int64_t sequences,
          int threads) {
    constexpr int WIDE = VL == 8 ? 8 : 16;
    const int64_t states = sequences * p.heads, size = p.k_size * p.v_size;
    if (states * size <= SERIAL_STATE) threads = 1;
    // Columns of a state are not shared out lightly: read out of memory's order, they take twice as
    // long.
    int64_t parts = states && threads >= 4 * states ? threads / states : 1;
    const int64_t most = ((p.v_size + parts - 1) / parts + PART - 1) / PART * PART;
    parts = (p.v_size + most - 1) / most;
    parallel_ranges(threads, states * parts, [&](int64_t first, int64_t stop) {
        for (int64_t item = first; item < stop; ++item) {
            int64_t s = item / parts / p.heads, h = item / parts % p.heads;
            const T *q = p.q.row<T>(s, h), *k = p.k.row<T>(s, h), *v = p.v.row<T>(s, h);
            float decay = std::exp(*p.log_decay.row<float>(s, h));
            float* state = pool + (slots[s] * p.heads + h) * size;
            T* to = out + (s * p.heads + h) * p.v_size;
            int64_t c = item % parts * most, end = c + most < p.v_size ? c + most : p.v_size;
            while (c < end) {
                int64_t left = end - c;
                auto run = [&](auto columns, int64_t width, int count) {
                    columns(q, k, v + c, decay, p.scale, state + c, p.k_size, p.v_size, to + c, count);
                    c += width;
                };
                if (left > WIDE * VL) {
                    const int64_t width = (left < BLOCK ? left : BLOCK) / VL * VL;
                    step_block(q, k, v + c, decay, p.scale, state + c, p.k_size, p.v_size, to + c, width);
                    c += width;
                } else if (left == WIDE * VL)
                    run(step_columns<T, WIDE, true>, WIDE * VL, 0);
                else if (left >= 8 * VL)
                    run(step_columns<T, 8, true>, 8 * VL, 0);
                else if (left >= 4 * VL)
                    run(step_columns<T, 4, true>, 4 * VL, 0);
                else if (left >= 2 * VL)
                    run(step_columns<T, 2, true>, 2 * VL, 0);
                else if (left >= VL)
                    run(step_columns<T, 1, true>, VL, 0);
                else
                    run(step_columns<T, 1, false>, left, (int)left);
            }
        }
    });
}

}  // namespace

extern "C" {

// Strides come as pairs (token, head), in elements. q, k: [S, H, K], v: [S, H, V], log_decay: [S, H]
// float32, pool: [slots, H, K, V] float32, slots: [S], out: [S, H, V].
void yo_retention_step(const void* q, int64_t q_token, int64_t q_head, const void* k, int64_t k_token,
                       int64_t k_head, const void* v, int64_t v_token, int64_t v_head,
                       const float* log_decay, int64_t d_token, int64_t d_head, float* pool,
                       const int64_t* slots, void* out, int64_t sequences, int64_t heads,
                       int64_t k_size, int64_t v_size, float scale, int is_bf16, int threads) {
    Problem p{{q, q_token, q_head},        {k, k_token, k_head}, {v, v_token, v_head},
              {log_decay, d_token, d_head}, heads,                k_size,
              v_size,                       scale};
    if (is_bf16)
        step(p, pool, slots, (bf16*)out, sequences, threads);
    else
        step(p, pool, slots, (float*)out, sequences, threads);
}

}  // extern "C"
