// Attention of rows over keys in pages, or in a ring and a step's own tokens: what its parts share.
#pragma once
#include <utility>
#include <vector>

#include "gemm.h"
#include "simd.h"

namespace yo {

constexpr float LOWEST = -1e30f;  // finite, so that rows that have seen nothing merge without NaN
constexpr float LOG2E = 1.4426950408889634f;

// Keys and values of one sequence and key head, wherever they lie. Distances are in bytes.
struct Keys {
    const char *k, *v;
    int64_t k_block, v_block, k_row, v_row;
    int64_t size;          // of a page; places of a ring
    const int64_t* table;  // pages; null for a ring, where position p is at place p % size
    int64_t start, stop;   // positions of the step's own tokens
    const char *own_k, *own_v;
    int64_t own_k_row, own_v_row;

    // Where the keys at positions first .. first + count - 1 are.
    void find(int64_t first, int64_t count, const char** ks, const char** vs) const {
        int64_t done = 0;
        while (done < count) {
            int64_t p = first + done, run, ks_row = k_row, vs_row = v_row;
            const char *kp, *vp;
            if (p >= start) {
                kp = own_k + (p - start) * own_k_row, vp = own_v + (p - start) * own_v_row;
                ks_row = own_k_row, vs_row = own_v_row;
                run = count - done;
            } else {
                int64_t place = p % size, block = table ? table[p / size] : 0;
                kp = k + block * k_block + place * k_row;
                vp = v + block * v_block + place * v_row;
                run = size - place;
                if (run > start - p) run = start - p;
            }
            if (run > count - done) run = count - done;
            for (int64_t i = 0; i < run; ++i) {
                ks[done + i] = kp + i * ks_row;
                vs[done + i] = vp + i * vs_row;
            }
            done += run;
        }
    }
};

// Some rows of a sequence, all query heads of one key head, over a range of keys. Folded rows are
// (row, head) pairs; peaks are in powers of two.
struct Work {
    Keys keys;
    const char* q;          // of the first row and head
    int64_t q_row, q_head;  // bytes
    const int64_t* positions;
    int64_t rows, heads;       // heads: query heads of the key head
    int64_t first, stop;       // keys
    int64_t window;            // 0: everything
    int64_t k_dim, v_dim;      // elements
    float scale, softcap;
    float *values, *peak, *total;  // results: [rows * heads, padded(v_dim)], and a number a row

    int64_t low(int64_t row) const {  // the first key that a row sees, and the one after its last
        int64_t p = window ? positions[row] - window + 1 : 0;
        return p > first ? p : first;
    }
    int64_t high(int64_t row) const {
        int64_t p = positions[row] + 1;
        return p < stop ? p : stop;
    }
    const char* query(int64_t folded) const {
        return q + folded / heads * q_row + folded % heads * q_head;
    }
};

inline int64_t padded(int64_t dim) { return round_up(dim, PANEL); }

// Memory of the calling thread, one piece a PURPOSE, kept from call to call and aligned to cache
// lines.
template <int PURPOSE>
inline char* scratch(int64_t bytes) {
    static thread_local std::vector<char> memory;
    if ((int64_t)memory.size() < bytes + 64) memory.resize(bytes + 64);
    return memory.data() + (64 - (uintptr_t)memory.data() % 64) % 64;
}
template <class T>
inline T* carve(char*& memory, int64_t count) {
    T* p = (T*)memory;
    memory += round_up(count * (int64_t)sizeof(T), 64);
    return p;
}

#if defined(__clang__) || __GNUC__ >= 12
template <int... I>
inline vf zip_from(vf a, vf b, int, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (I / 2 + I % 2 * VL)...);
}
template <int... I>
inline vf zip_from(vf a, vf b, char, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (I / 2 + I % 2 * VL + VL / 2)...);
}
#else
template <int... I>
inline vf zip_from(vf a, vf b, int, std::integer_sequence<int, I...>) {
    return __builtin_shuffle(a, b, (vi){(I / 2 + I % 2 * VL)...});
}
template <int... I>
inline vf zip_from(vf a, vf b, char, std::integer_sequence<int, I...>) {
    return __builtin_shuffle(a, b, (vi){(I / 2 + I % 2 * VL + VL / 2)...});
}
#endif
// a0 b0 a1 b1 ... of the lower, and of the upper halves of two vectors.
inline vf zip_low(vf a, vf b) { return zip_from(a, b, 0, std::make_integer_sequence<int, VL>()); }
inline vf zip_high(vf a, vf b) { return zip_from(a, b, 'h', std::make_integer_sequence<int, VL>()); }

// Lane i of the result is the sum of x[i].
inline vf sums(vf* x) {
    for (int half = VL / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i)
            x[i] = zip_low(x[i], x[i + half]) + zip_high(x[i], x[i + half]);
    return x[0];
}

inline void transpose(vf* x) {
    for (int round = 1; round < VL; round *= 2) {
        vf y[VL];
        for (int i = 0; i < VL / 2; ++i) {
            y[2 * i] = zip_low(x[i], x[i + VL / 2]);
            y[2 * i + 1] = zip_high(x[i], x[i + VL / 2]);
        }
        for (int i = 0; i < VL; ++i) x[i] = y[i];
    }
}

// A vector's worth of bytes from p on, of which only some may be there.
inline vf load_bytes(const void* p) { return load_as<vf>(p); }
inline vf load_bytes(const void* p, int bytes) {
#if defined(__AVX512BW__)
    return (vf)_mm512_maskz_loadu_epi8(((__mmask64)1 << bytes) - 1, p);
#else
    char lanes[sizeof(vf)] = {};
    std::memcpy(lanes, p, bytes);
    return load_as<vf>(lanes);
#endif
}

// acc + products of a vector's worth of elements.
inline vf multiply(vf acc, vf a, vf b, float) { return acc + a * b; }
inline vf multiply(vf acc, vf a, vf b, bf16) { return dot_bf16(acc, &a, &b); }

inline vf lanes_from(int first) {
    vi x;
    for (int i = 0; i < VL; ++i) x[i] = i + first;
    return __builtin_convertvector(x, vf);
}

// 2 ** x for x <= 0, to DEGREE terms: 6 for float32's accuracy, 4 for bfloat16's; NaN for NaN.
template <int DEGREE>
inline vf exp2_of(vf x) {
    x = x < splat(-126.0f) ? splat(-126.0f) : x;
#if defined(__AVX512F__)
    vf n = (vf)_mm512_roundscale_ps((__m512)x, 0);
#else
    vf shifted = x + 12582912.0f;
    vf n = shifted - 12582912.0f;
#endif
    vf r = x - n;
    vf p = splat(DEGREE >= 6 ? 1.5403530e-4f : 9.6181291e-3f);
    if (DEGREE >= 6) {
        p = p * r + 1.3333558e-3f;
        p = p * r + 9.6181291e-3f;
    }
    p = p * r + 5.5504109e-2f;
    p = p * r + 2.4022651e-1f;
    p = p * r + 6.9314718e-1f;
    p = p * r + 1.0f;
#if defined(__AVX512F__)
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    vf y = (vf)((vi)p + ((vi)shifted << 23));
    return x == x ? y : x;
#endif
}

inline vf store_weights(float* p, vf w) {
    store(p, w);
    return w;
}
inline vf store_weights(bf16* p, vf w) {  // the sum is of what is multiplied: weights add up to one
    vh h = round_bf16(w);
    std::memcpy(p, &h, sizeof(h));
    return as_vf(__builtin_convertvector(h, vu) << 16);
}

// One row's scores s [n, a multiple of VL], seen from `low` to `high`, become weights; others are
// zero. Those of key i go to p[i / LINE * line_step + i % LINE]. Updates the running peak and total; returns the factor for the row's values so far.
template <class P>
inline float weigh(float* s, int64_t low, int64_t high, int64_t n, float scale, float softcap,
                   float& peak, float& total, P* p, int64_t line_step = LINE<P>) {
    constexpr int DEGREE = sizeof(P) == 2 ? 4 : 6;
    low = low < 0 ? 0 : low > n ? n : low;
    if (high > n) high = n;
    const vf zero = vf{};
    auto place = [=](int64_t i) { return p + i / LINE<P> * line_step + i % LINE<P>; };
    int64_t begin = low / VL * VL, end = low < high ? round_up(high, VL) : begin;
    for (int64_t i = 0; i < begin; i += VL) store_weights(place(i), zero);
    for (int64_t i = end; i < n; i += VL) store_weights(place(i), zero);
    if (begin == end) return 1.0f;
    if (softcap != 0.0f) {
        for (int64_t i = begin; i < end; i += VL)
            store(s + i, vtanh(load(s + i) * (scale / softcap)) * softcap);
        scale = 1.0f;
    }
    const float c = scale * LOG2E;
    // Of the first and the last vector some lanes may be unseen.
    auto hide = [&](int64_t i) {
        vf where = lanes_from((int)i);
        vf x = load(s + i) * c;
        x = where < splat((float)low) ? splat(-INFINITY) : x;
        store(s + i, where >= splat((float)high) ? splat(-INFINITY) : x);
    };
    int64_t inner = begin, last = end;
    if (low > begin || (high < end && end - begin == VL)) hide(begin), inner += VL;
    if (high < end && end - VL >= inner) hide(end - VL), last -= VL;
    vf top = splat(LOWEST);
    for (int64_t i = inner; i < last; i += VL) {
        vf x = load(s + i) * c;
        store(s + i, x);
        top = vmax(x, top);
    }
    if (inner > begin) top = vmax(load(s + begin), top);
    if (last < end) top = vmax(load(s + end - VL), top);
    float highest_seen = highest(top), factor = 1.0f;
    if (highest_seen > peak) {
        factor = std::exp2(peak - highest_seen);
        peak = highest_seen;
    }
    vf added = zero;
    for (int64_t i = begin; i < end; i += VL) {
        vf x = load(s + i);
        vf w = exp2_of<DEGREE>(x - peak);
        if (i < inner || i >= last) w = x == splat(-INFINITY) ? zero : w;
        added += store_weights(place(i), w);
    }
    total = total * factor + sum(added);
    return factor;
}

inline void rescale(float* values, int64_t count, float factor) {
    for (int64_t i = 0; i < count; i += VL) store(values + i, load(values + i) * factor);
}

// Few folded rows: bound by memory. Many: bound by arithmetic.
void attend_few(const Work& work, bool is_bf16);
void attend_many(const Work& work, bool is_bf16);
int64_t many_rows_block(int64_t k_dim, int64_t v_dim);  // folded rows that attend_many takes

}  // namespace yo
