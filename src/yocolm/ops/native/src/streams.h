// Four streams side by side, [size, 4]: vectors that hold VL / 4 places of each.
#pragma once
#include "elements.h"

namespace yo {

constexpr int GROUPS = VL / 4;

// Lane `lane` of each group of four, four times.
template <int lane>
inline vf spread4(vf v) {
#if defined(__AVX512F__)
    return (vf)_mm512_permute_ps((__m512)v, lane * 0x55);
#elif defined(__AVX2__)
    return (vf)_mm256_permute_ps((__m256)v, lane * 0x55);
#else
    return splat(v[lane]);
#endif
}

// GROUPS floats, each four times.
inline vf expand4(const float* p) {
#if defined(__AVX512F__)
    const __m512i index = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return (vf)_mm512_permutexvar_ps(index, _mm512_castps128_ps512(_mm_loadu_ps(p)));
#elif defined(__AVX2__)
    __m128 pair = _mm_castsi128_ps(_mm_loadl_epi64((const __m128i*)p));
    const __m256i index = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    return (vf)_mm256_permutevar8x32_ps(_mm256_castps128_ps256(pair), index);
#else
    return splat(p[0]);
#endif
}

// Writes lane `lane` of each group.
inline void take4(vf v, int lane, float* out) {
#if defined(__AVX512F__)
    __m512i index = _mm512_add_epi32(
        _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12), _mm512_set1_epi32(lane));
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(index, (__m512)v)));
#else
    float lanes[VL];
    store(lanes, v);
    for (int i = 0; i < GROUPS; ++i) out[i] = lanes[4 * i + lane];
#endif
}

// Sums of each group, in all its lanes.
inline vf sum4(vf v) {
#if defined(__AVX512F__)
    vf pairs = v + (vf)_mm512_permute_ps((__m512)v, 0xb1);
    return pairs + (vf)_mm512_permute_ps((__m512)pairs, 0x4e);
#elif defined(__AVX2__)
    vf pairs = v + (vf)_mm256_permute_ps((__m256)v, 0xb1);
    return pairs + (vf)_mm256_permute_ps((__m256)pairs, 0x4e);
#else
    return splat((v[0] + v[1]) + (v[2] + v[3]));
#endif
}

// Four floats, repeated.
inline vf repeat4(const float* p) {
    float lanes[VL];
    for (int i = 0; i < VL; ++i) lanes[i] = p[i % 4];
    return load(lanes);
}

}  // namespace yo
