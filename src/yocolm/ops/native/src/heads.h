// One head of queries, keys or values finished: its norm, then its rotation.
#pragma once
#include "elements.h"

namespace yo {

typedef uint64_t vq __attribute__((vector_size(VL * 4)));     // pairs of floats
typedef uint32_t vuh __attribute__((vector_size(VL * 2)));    // half as many floats

inline vf swap_pairs(vf v) { return (vf)(((vq)v >> 32) | ((vq)v << 32)); }

// VL / 2 floats (or `pairs`, if fewer are left), each one twice.
inline vq twice(const float* p, Whole) {
    vq q = __builtin_convertvector(load_as<vuh>(p), vq);
    return q | (q << 32);
}
inline vq twice(const float* p, Part part) {
    float lanes[VL / 2] = {};
    for (int i = 0; i < part.count / 2; ++i) lanes[i] = p[i];
    return twice(lanes, Whole{});
}

// What is still to be done to a head; tables are [rows, pairs], null where nothing turns.
struct Finish {
    bool norm;
    float eps;
    const float* cos;
    const float* sin;
    int64_t pairs;
    bool interleaved;

    // out [size] = x, normed and turned as row `row` of the tables says; weight may be null.
    template <class T>
    inline void head(const T* x, const T* weight, int64_t row, T* out, int64_t size) const {
        float scale = norm ? inverse_rms(x, size, eps) : 1.0f;
        if (!cos) {
            if (norm)
                scale_row(x, weight, scale, out, size);
            else
                std::memcpy(out, x, size * sizeof(T));
        } else if (weight) {
            turn([&](int64_t i, auto k) { return get(x + i, k) * scale * get(weight + i, k); }, row,
                 out, size);
        } else {
            turn([&](int64_t i, auto k) { return get(x + i, k) * scale; }, row, out, size);
        }
    }

   private:
    template <class T, class Value>
    inline void turn(Value value, int64_t row, T* out, int64_t size) const {
        const float *c = cos + row * pairs, *s = sin + row * pairs;
        if (interleaved) {
            const vq sign = twice_sign();
            each_vector(size, [&](int64_t i, auto k) {
                vf v = value(i, k);
                vf turned = swap_pairs(v) * (vf)(twice(s + i / 2, k) ^ sign);
                set(out + i, v * (vf)twice(c + i / 2, k) + turned, k);
            });
            return;
        }
        int64_t half = size / 2;
        each_vector(pairs, [&](int64_t i, auto k) {
            vf a = value(i, k), b = value(half + i, k);
            vf cosine = get(c + i, k), sine = get(s + i, k);
            set(out + i, a * cosine - b * sine, k);
            set(out + half + i, b * cosine + a * sine, k);
        });
        each_vector(half - pairs, [&](int64_t i, auto k) {
            set(out + pairs + i, value(pairs + i, k), k);
            set(out + half + pairs + i, value(half + pairs + i, k), k);
        });
    }

    static inline vq twice_sign() { return (vq{} + 1) << 31; }  // of the first of each pair
};

}  // namespace yo
