// One vector type for all instruction sets: GCC's and Clang's vector extensions, and intrinsics only
// where they cannot say it (bfloat16 products and rounding). Loads and stores need no alignment.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace yo {

#if defined(__AVX512F__)
constexpr int VL = 16;  // floats a vector
#elif defined(__AVX2__)
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif
#if defined(__AVX512BF16__)
constexpr bool HAS_BF16_DOT = true;  // products of bfloat16 pairs, summed in float32
#else
constexpr bool HAS_BF16_DOT = false;
#endif

struct bf16 {
    uint16_t bits;
};

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));

template <class T>
inline T load_as(const void* p) {
    T v;
    std::memcpy(&v, p, sizeof(T));
    return v;
}

inline vf splat(float x) { return x - vf{}; }
inline vf as_vf(vu x) { return (vf)x; }
inline vu as_vu(vf x) { return (vu)x; }

inline vf load(const float* p) { return load_as<vf>(p); }
inline vf load(const bf16* p) {
    vh h = load_as<vh>(p);
    return as_vf(__builtin_convertvector(h, vu) << 16);
}
inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof(v)); }
inline vh round_bf16(vf v) {  // to nearest, ties to even; NaN stays NaN
#if defined(__AVX512BF16__)
    return (vh)_mm512_cvtneps_pbh((__m512)v);
#else
    vu u = as_vu(v);
    vu r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    vu quiet = (u >> 16) | 0x40u;
    vu nan = (vu)((u & 0x7fffffffu) > 0x7f800000u);
    return __builtin_convertvector((r & ~nan) | (quiet & nan), vh);
#endif
}
inline void store(bf16* p, vf v) {
    vh h = round_bf16(v);
    std::memcpy(p, &h, sizeof(h));
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t u = (uint32_t)x.bits << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}
inline void put(float* p, float x) { *p = x; }
inline void put(bf16* p, float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    bool nan = (u & 0x7fffffffu) > 0x7f800000u;
    p->bits = nan ? (uint16_t)((u >> 16) | 0x40u) : (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// The first n < VL lanes of p; the others are `fill`.
template <class T>
inline vf load_some(const T* p, int n, float fill = 0.0f) {
    float lanes[VL];
    for (int i = 0; i < VL; ++i) lanes[i] = i < n ? to_float(p[i]) : fill;
    return load(lanes);
}
template <class T>
inline void store_some(T* p, vf v, int n) {
    float lanes[VL];
    store(lanes, v);
    for (int i = 0; i < n; ++i) put(p + i, lanes[i]);
}

inline vf vmax(vf a, vf b) { return a > b ? a : b; }
inline vf vmin(vf a, vf b) { return a < b ? a : b; }
inline float sum(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float lanes[VL], s = 0;
    store(lanes, v);
    for (int half = VL / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    s = lanes[0];
    return s;
#endif
}
inline float highest(vf v) {
    float lanes[VL];
    store(lanes, v);
    float m = lanes[0];
    for (int i = 1; i < VL; ++i) m = lanes[i] > m ? lanes[i] : m;
    return m;
}

// acc + the products of 2 * VL pairs of bfloat16, each lane the sum of two neighbours.
inline vf dot_bf16(vf acc, const void* a, const void* b) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)acc, load_as<__m512bh>(a), load_as<__m512bh>(b));
#else
    vu x = load_as<vu>(a), y = load_as<vu>(b);
    acc += as_vf(x << 16) * as_vf(y << 16);
    return acc + as_vf(x & 0xffff0000u) * as_vf(y & 0xffff0000u);
#endif
}

// exp to about 2 units in the last place; 0 below -87.3, infinity above 88.7, NaN for NaN.
inline vf vexp(vf x) {
    const vf lowest = splat(-87.33654f), most = splat(88.72283f);
    vf c = vmin(vmax(x, lowest), most);
    vf n = c * 1.44269504f + 12582912.0f;  // to the nearest integer, in the low bits
    vi k = (vi)as_vu(n) - 0x4b400000;
    n -= 12582912.0f;
    vf r = c - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    // In two factors: 2^128 is no float.
    vi half = k >> 1;
    vf y = p * (vf)((half + 127) << 23) * (vf)((k - half + 127) << 23);
    y = x < lowest ? splat(0.0f) : y;
    y = x > most ? splat(INFINITY) : y;
    return x == x ? y : x;
}
inline vf vtanh(vf x) {
    vf a = vmin(vmax(x, splat(-15.0f)), splat(15.0f));
    vf e = vexp(a * 2.0f);
    vf t = (e - 1.0f) / (e + 1.0f);
    // Near 0 the difference above cancels: a Taylor polynomial there.
    vf s = a * a;
    vf small = a + a * s * (-0.333333333f + s * (0.133333333f + s * (-0.053968254f)));
    vf m = vmax(a, -a);
    t = m < splat(0.15f) ? small : t;
    return x == x ? t : x;
}
// exp of x cut to -87 .. 88; NaN gives anything.
inline vf bounded_exp(vf x) {
    x = vmin(vmax(x, splat(-87.0f)), splat(88.0f));
    vf n = x * 1.44269504f + 12582912.0f;  // to the nearest integer, in the low bits
    vi k = (vi)as_vu(n) - 0x4b400000;
    n -= 12582912.0f;
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = splat(1.3981999507e-3f);
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vf)((k + 127) << 23);
}
// GELU in its tanh form, x * (1 + tanh(u)) / 2 = x / (1 + exp(-2 u)), and SiLU: both are
// activation_top(x) divided by these. Where the divisor is cut, any x from -200 down gives 0.
inline vf activation_top(vf x) { return vmax(splat(-200.0f), x); }  // NaN stays
inline vf gelu_divisor(vf x) {
    return 1.0f + bounded_exp(-x * (1.5957691216f + 0.0713548163f * x * x));
}
inline vf silu_divisor(vf x) { return 1.0f + bounded_exp(-x); }
inline vf gelu_tanh(vf x) { return activation_top(x) / gelu_divisor(x); }
inline vf silu(vf x) { return activation_top(x) / silu_divisor(x); }

}  // namespace yo
