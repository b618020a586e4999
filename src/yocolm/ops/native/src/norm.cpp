// Root-mean-square norms, and what stands beside them: residual sums, gates, per-layer inputs.
#include "elements.h"
#include "packed.h"

using namespace yo;

namespace {

template <class T>
void rms_norm(const T* x, int64_t stride, const T* weight, float eps, T* out, int64_t rows,
              int64_t size, int threads) {
    parallel_ranges(threads_for(rows * size, threads), rows, [&](int64_t first, int64_t stop) {
        for (int64_t r = first; r < stop; ++r) {
            const T* row = x + r * stride;
            scale_row(row, weight, inverse_rms(row, size, eps), out + r * size, size);
        }
    });
}

struct Norm {
    const void* weight;
    float eps;
};

// x = (residual + y [/ rms(y) * weight]) * scale, rounded; returns the sum of its squares.
template <class T>
float add_row(const T* residual, const T* y, bool norm_y, Norm norm, float scale, T* x,
              int64_t size) {
    const T* weight = (const T*)norm.weight;
    float inverse = norm_y ? inverse_rms(y, size, norm.eps) : 1.0f;
    vf squares = vf{};
    auto leave = [&](int64_t i, vf v, auto k) {
        v = rounded(v, x);
        squares += v * v;
        set(x + i, v, k);
    };
    if (norm_y)
        each_vector(size, [&](int64_t i, auto k) {
            vf normed = get(y + i, k) * inverse * get(weight + i, k);
            leave(i, (get(residual + i, k) + normed) * scale, k);
        });
    else
        each_vector(size, [&](int64_t i, auto k) {
            leave(i, (get(residual + i, k) + get(y + i, k)) * scale, k);
        });
    return sum(squares);
}

template <class T>
void add_norm(const T* residual, const T* y, bool norm_y, Norm norm, const T* scale, Norm next,
              T* x, T* normed, int64_t rows, int64_t size, int threads) {
    float factor = scale ? to_float(*scale) : 1.0f;
    parallel_ranges(threads_for(rows * size, threads), rows, [&](int64_t first, int64_t stop) {
        for (int64_t at = first * size; at < stop * size; at += size) {
            float squares = add_row(residual + at, y + at, norm_y, norm, factor, x + at, size);
            if (normed)
                scale_row(x + at, (const T*)next.weight, inverse_root(squares, size, next.eps),
                          normed + at, size);
        }
    });
}

// silu(gate) * o / rms(o); o and gate are [rows, heads, size].
template <class T>
void gated_norm(const T* o, int64_t o_row, int64_t o_head, const T* gate, int64_t gate_row,
                int64_t gate_head, float eps, T* out, int64_t rows, int64_t heads, int64_t size,
                int threads) {
    int64_t items = rows * heads;
    threads = threads_for(2 * items * size, threads);
    parallel_ranges(threads, items, [&](int64_t first, int64_t stop) {
        for (int64_t item = first; item < stop; ++item) {
            int64_t r = item / heads, h = item % heads;
            const T* from = o + r * o_row + h * o_head;
            const T* by = gate + r * gate_row + h * gate_head;
            T* to = out + item * size;
            float inverse = inverse_rms(from, size, eps);
            each_vector(size, [&](int64_t i, auto k) {
                set(to + i, silu(get(by + i, k)) * (get(from + i, k) * inverse), k);
            });
        }
    });
}

// (projected * scale, normed per part, + looked_up * table_scale) / sqrt(2).
template <class T>
void mix_inputs(const T* projected, int64_t p_row, float scale, const T* weight, float eps,
                const T* looked_up, int64_t l_row, float table_scale, T* out, int64_t rows,
                int64_t parts, int64_t size, int threads) {
    const float half = 0.70710678f;
    int64_t items = rows * parts;
    parallel_ranges(threads_for(items * size, threads), items, [&](int64_t first, int64_t stop) {
        for (int64_t item = first; item < stop; ++item) {
            int64_t r = item / parts, part = item % parts;
            const T* p = projected + r * p_row + part * size;
            const T* l = looked_up + r * l_row + part * size;
            T* to = out + item * size;
            float squares = sum_of_squares(p, size) * scale * scale;
            float inverse = inverse_root(squares, size, eps) * scale;
            each_vector(size, [&](int64_t i, auto k) {
                vf normed = get(p + i, k) * inverse * get(weight + i, k);
                set(to + i, (normed + get(l + i, k) * table_scale) * half, k);
            });
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

// x = (residual + y) * scale, with y normed if norm_y; normed = x / rms(x) * next_weight. scale, and
// next_weight with normed, may be null.
void yo_add_norm(const void* residual, const void* y, int norm_y, const void* weight, float eps,
                 const void* scale, const void* next_weight, float next_eps, void* x, void* normed,
                 int64_t rows, int64_t size, int is_bf16, int threads) {
    Norm norm{weight, eps}, next{next_weight, next_eps};
    if (is_bf16)
        add_norm((const bf16*)residual, (const bf16*)y, norm_y, norm, (const bf16*)scale, next,
                 (bf16*)x, (bf16*)normed, rows, size, threads);
    else
        add_norm((const float*)residual, (const float*)y, norm_y, norm, (const float*)scale, next,
                 (float*)x, (float*)normed, rows, size, threads);
}

// out [rows, heads, size] = silu(gate) * o / rms(o).
void yo_gated_norm(const void* o, int64_t o_row, int64_t o_head, const void* gate, int64_t gate_row,
                   int64_t gate_head, float eps, void* out, int64_t rows, int64_t heads,
                   int64_t size, int is_bf16, int threads) {
    if (is_bf16)
        gated_norm((const bf16*)o, o_row, o_head, (const bf16*)gate, gate_row, gate_head, eps,
                   (bf16*)out, rows, heads, size, threads);
    else
        gated_norm((const float*)o, o_row, o_head, (const float*)gate, gate_row, gate_head, eps,
                   (float*)out, rows, heads, size, threads);
}

// out [rows, parts, size] = (projected * scale, normed, + looked_up * table_scale) / sqrt(2).
void yo_mix_inputs(const void* projected, int64_t p_row, float scale, const void* weight, float eps,
                   const void* looked_up, int64_t l_row, float table_scale, void* out, int64_t rows,
                   int64_t parts, int64_t size, int is_bf16, int threads) {
    if (is_bf16)
        mix_inputs((const bf16*)projected, p_row, scale, (const bf16*)weight, eps,
                   (const bf16*)looked_up, l_row, table_scale, (bf16*)out, rows, parts, size,
                   threads);
    else
        mix_inputs((const float*)projected, p_row, scale, (const float*)weight, eps,
                   (const float*)looked_up, l_row, table_scale, (float*)out, rows, parts, size,
                   threads);
}

}  // extern "C"

YO_PACKED(yo_rms_norm)
YO_PACKED(yo_add_norm)
YO_PACKED(yo_gated_norm)
YO_PACKED(yo_mix_inputs)
