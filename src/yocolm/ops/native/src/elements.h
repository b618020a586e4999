// What the element-wise kernels share: whole vectors and tails alike, and the norm of a row.
#pragma once
#include "parallel.h"
#include "simd.h"

namespace yo {

constexpr int64_t SERIAL_ELEMENTS = 32768;  // less is done sooner than a second thread wakes up

inline int threads_for(int64_t elements, int threads) {
    return elements < SERIAL_ELEMENTS ? 1 : threads;
}

struct Whole {};
struct Part {
    int count;
};
template <class T>
inline vf get(const T* p, Whole) {
    return load(p);
}
template <class T>
inline vf get(const T* p, Part part) {
    return load_some(p, part.count);
}
template <class T>
inline void set(T* p, vf v, Whole) {
    store(p, v);
}
template <class T>
inline void set(T* p, vf v, Part part) {
    store_some(p, v, part.count);
}

// Calls body(i, Whole or Part) for each vector of 0 .. size - 1.
template <class Body>
inline void each_vector(int64_t size, Body body) {
    int64_t i = 0;
    for (; i + VL <= size; i += VL) body(i, Whole{});
    if (i < size) body(i, Part{(int)(size - i)});
}

// v as T has it.
inline vf rounded(vf v, const float*) { return v; }
inline vf rounded(vf v, const bf16*) {
    return as_vf(__builtin_convertvector(round_bf16(v), vu) << 16);
}

template <class T>
inline float sum_of_squares(const T* x, int64_t size) {
    vf a = vf{}, b = vf{}, c = vf{}, d = vf{};
    int64_t i = 0;
    for (; i + 4 * VL <= size; i += 4 * VL) {
        vf s = load(x + i), t = load(x + i + VL);
        vf u = load(x + i + 2 * VL), v = load(x + i + 3 * VL);
        a += s * s;
        b += t * t;
        c += u * u;
        d += v * v;
    }
    for (; i + VL <= size; i += VL) {
        vf s = load(x + i);
        a += s * s;
    }
    if (i < size) {
        vf s = load_some(x + i, (int)(size - i));
        b += s * s;
    }
    return sum((a + b) + (c + d));
}

inline float inverse_root(float squares, int64_t size, float eps) {
    return 1.0f / std::sqrt(squares / (float)size + eps);
}

// 1 / rms of x [size].
template <class T>
inline float inverse_rms(const T* x, int64_t size, float eps) {
    return inverse_root(sum_of_squares(x, size), size, eps);
}

// out = x * scale * weight; weight may be null.
template <class T>
inline void scale_row(const T* x, const T* weight, float scale, T* out, int64_t size) {
    if (weight)
        each_vector(size, [&](int64_t i, auto k) {
            set(out + i, get(x + i, k) * scale * get(weight + i, k), k);
        });
    else
        each_vector(size, [&](int64_t i, auto k) { set(out + i, get(x + i, k) * scale, k); });
}

}  // namespace yo
