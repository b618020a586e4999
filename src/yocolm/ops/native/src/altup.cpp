// AltUp's streams (Gemma 3n): what is expected of a layer, and how its result corrects that.
// Streams lie side by side, [rows, size, streams].
#include <vector>

#include "packed.h"
#include "streams.h"

using namespace yo;

namespace {

constexpr int64_t MAX_STREAMS = 16;  // as in native/altup.py

template <class T>
float as(float x, const T*) {  // as T has it
    T y;
    put(&y, x);
    return to_float(y);
}

// What leads from a stream to coefficients: a norm, `streams` products, tanh.
template <class T>
struct Router {
    const T* norm;
    float eps;
    const T* weight;

    // tanh of the products / size for x [size] whose squares add up to `squares`; x is used up.
    void route(float* x, float squares, int64_t size, int64_t streams, float* out) const {
        float scale = inverse_root(squares, size, eps) / (float)size;
        each_vector(size, [&](int64_t i, auto k) { set(x + i, get(x + i, k) * get(norm + i, k), k); });
        for (int64_t s = 0; s < streams; ++s) {
            const T* w = weight + s * size;
            vf a = vf{}, b = vf{};
            int64_t i = 0;
            for (; i + 2 * VL <= size; i += 2 * VL) {
                a += load(x + i) * load(w + i);
                b += load(x + i + VL) * load(w + i + VL);
            }
            each_vector(size - i, [&](int64_t j, auto k) {
                a += get(x + i + j, k) * get(w + i + j, k);
            });
            out[s] = as(std::tanh(as(sum(a + b) * scale, w)), w);
        }
    }
};

template <class T>
float dot(const T* weight, const float* x, int64_t size) {
    float total = 0;
    for (int64_t i = 0; i < size; ++i) total += to_float(weight[i]) * x[i];
    return total;
}

inline float squares_of(const float* x, int64_t size) { return sum_of_squares(x, size); }

// One stream of x [size, streams].
template <class T>
void take_stream(const T* x, int64_t streams, int64_t stream, float* out, int64_t size) {
    int64_t i = 0;
    if (streams == 4)
        for (; i + GROUPS <= size; i += GROUPS) take4(load(x + 4 * i), (int)stream, out + i);
    for (; i < size; ++i) out[i] = to_float(x[i * streams + stream]);
}

// Sums of the streams, each times its factor.
template <class T>
void mix_streams(const T* x, int64_t streams, const float* factors, float* out, int64_t size) {
    int64_t i = 0;
    if (streams == 4) {
        const vf by = repeat4(factors);
        for (; i + GROUPS <= size; i += GROUPS) take4(sum4(load(x + 4 * i) * by), 0, out + i);
    }
    for (; i < size; ++i) out[i] = dot(x + i * streams, factors, streams);
}

template <class T>
void predict(const T* x, const Router<T>& router, const T* prediction, int64_t active,
             const T* next_weight, float next_eps, T* expected, T* mixing, T* normed, int64_t rows,
             int64_t size, int64_t streams, int threads) {
    threads = threads_for(rows * size * streams, threads);
    parallel_ranges(threads, rows, [&](int64_t first, int64_t stop) {
        std::vector<float> own(size), moved(size);
        for (int64_t r = first; r < stop; ++r) {
            const T* from = x + r * size * streams;
            float routed[MAX_STREAMS], factors[MAX_STREAMS];
            take_stream(from, streams, active, own.data(), size);
            std::memcpy(moved.data(), own.data(), size * sizeof(float));
            router.route(moved.data(), squares_of(own.data(), size), size, streams, routed);
            T* mix = mixing + r * streams * streams;  // [from, to]
            for (int64_t to = 0; to < streams; ++to)
                for (int64_t s = 0; s < streams; ++s)
                    put(mix + s * streams + to,
                        dot(prediction + (to * streams + s) * streams, routed, streams));
            for (int64_t s = 0; s < streams; ++s) factors[s] = to_float(mix[s * streams + active]);
            mix_streams(from, streams, factors, moved.data(), size);
            vf squares = vf{};
            T* out = expected + r * size;
            each_vector(size, [&](int64_t i, auto k) {
                vf v = rounded(get(&own[i], k) + get(&moved[i], k), out);
                squares += v * v;
                set(out + i, v, k);
            });
            scale_row(out, next_weight, inverse_root(sum(squares), size, next_eps),
                      normed + r * size, size);
        }
    });
}

template <class T>
void join(const T* active, const T* attended, const T* attended_weight, const T* normed,
          const T* low, const T* low_weight, float eps, const T* next_weight, T* joined, T* next,
          int64_t rows, int64_t size, int threads) {
    threads = threads_for(2 * rows * size, threads);
    parallel_ranges(threads, rows, [&](int64_t first, int64_t stop) {
        for (int64_t at = first * size; at < stop * size; at += size) {
            const T *a = active + at, *b = attended + at, *c = normed + at, *d = low + at;
            float b_scale = inverse_rms(b, size, eps), d_scale = inverse_rms(d, size, eps);
            vf squares = vf{};
            T* out = joined + at;
            each_vector(size, [&](int64_t i, auto k) {
                vf v = get(a + i, k) + get(b + i, k) * b_scale * get(attended_weight + i, k);
                v += get(c + i, k) + get(d + i, k) * d_scale * get(low_weight + i, k);
                v = rounded(v * 0.70710678f, out);
                squares += v * v;
                set(out + i, v, k);
            });
            scale_row(out, next_weight, inverse_root(sum(squares), size, eps), next + at, size);
        }
    });
}

template <class T>
struct Layer {  // what a layer made of the active stream: h and the norm of y, to be added
    const T* h;
    const T* y;
    const T* y_weight;
    float eps;
    const T* active;
};

template <class T>
void correction(const Layer<T>& layer, const Router<T>& router, const T* weight, int64_t index,
                const T* scale, T* error, T* gains, T* corrected, int64_t rows, int64_t size,
                int64_t streams, int threads) {
    threads = threads_for(3 * rows * size, threads);
    parallel_ranges(threads, rows, [&](int64_t first, int64_t stop) {
        std::vector<float> made(size);
        for (int64_t r = first; r < stop; ++r) {
            const T *h = layer.h + r * size, *y = layer.y + r * size;
            const T* active = layer.active + r * size;
            T *off = error + r * size, *gain = gains + r * streams, *out = corrected + r * size;
            float inverse = inverse_rms(y, size, layer.eps), routed[MAX_STREAMS];
            vf squares = vf{};
            each_vector(size, [&](int64_t i, auto k) {
                vf v = get(h + i, k) + get(y + i, k) * inverse * get(layer.y_weight + i, k);
                v = rounded(v, off);
                squares += v * v;
                set(&made[i], v, k);
                set(off + i, v - get(active + i, k), k);
            });
            router.route(made.data(), sum(squares), size, streams, routed);
            for (int64_t s = 0; s < streams; ++s)
                put(gain + s, as(dot(weight + s * streams, routed, streams), gain) + 1.0f);
            float own = to_float(gain[index]);
            each_vector(size, [&](int64_t i, auto k) {
                vf v = get(active + i, k) + get(off + i, k) * own;
                set(out + i, scale ? v * get(scale + i, k) : v, k);
            });
        }
    });
}

// x + x @ mixing + error * gains + own to all streams but the first, of one row.
template <class T>
void correct_row(const T* x, const float* mixing, const float* error, const float* gains,
                 const float* own, T* out, int64_t size, int64_t streams) {
    int64_t i = 0;
    if (streams == 4) {
        const float others[4] = {0, 1, 1, 1};
        const vf m0 = repeat4(mixing), m1 = repeat4(mixing + 4), m2 = repeat4(mixing + 8),
                 m3 = repeat4(mixing + 12), gain = repeat4(gains), other = repeat4(others);
        for (; i + GROUPS <= size; i += GROUPS) {
            vf v = load(x + 4 * i);
            vf a = v + spread4<0>(v) * m0 + spread4<1>(v) * m1;
            vf b = spread4<2>(v) * m2 + spread4<3>(v) * m3;
            a += expand4(error + i) * gain;
            b += expand4(own + i) * other;
            store(out + 4 * i, a + b);
        }
    }
    for (; i < size; ++i) {
        const T* from = x + i * streams;
        for (int64_t to = 0; to < streams; ++to) {
            float v = to_float(from[to]) + error[i] * gains[to] + (to ? own[i] : 0.0f);
            for (int64_t s = 0; s < streams; ++s) v += to_float(from[s]) * mixing[s * streams + to];
            put(out + i * streams + to, v);
        }
    }
}

template <class T>
void widen(const T* x, float* out, int64_t size) {
    each_vector(size, [&](int64_t i, auto k) { set(out + i, get(x + i, k), k); });
}

template <class T>
void correct(const T* x, const T* mixing, const T* error, const T* gains, const T* own,
             const T* own_weight, float eps, T* out, int64_t rows, int64_t size, int64_t streams,
             int threads) {
    threads = threads_for(rows * size * streams, threads);
    parallel_ranges(threads, rows, [&](int64_t first, int64_t stop) {
        std::vector<float> wide(2 * size + streams * (streams + 1));
        float *off = wide.data(), *added = off + size, *mix = added + size;
        float* gain = mix + streams * streams;
        for (int64_t r = first; r < stop; ++r) {
            const T* o = own + r * size;
            widen(error + r * size, off, size);
            widen(mixing + r * streams * streams, mix, streams * streams);
            widen(gains + r * streams, gain, streams);
            float inverse = inverse_rms(o, size, eps);
            each_vector(size, [&](int64_t i, auto k) {
                set(added + i, get(o + i, k) * inverse * get(own_weight + i, k), k);
            });
            correct_row(x + r * size * streams, mix, off, gain, added, out + r * size * streams,
                        size, streams);
        }
    });
}

// By what x [size] is multiplied to be as large as `magnitude`, a root mean square.
template <class T>
float as_large(float magnitude, float squares, int64_t size, const T* kind) {
    const float least = 3.16227766e-3f;  // as ops/altup.py's MIN_MAGNITUDE
    float own = std::sqrt(squares / (float)size);
    return as(magnitude / (own < least ? least : own), kind);
}

template <class T>
void spread(const T* x, const T* others, T* out, int64_t rows, int64_t size, int64_t streams,
            int threads) {
    threads = threads_for(2 * rows * size * streams, threads);
    parallel_ranges(threads, rows, [&](int64_t first, int64_t stop) {
        for (int64_t r = first; r < stop; ++r) {
            const T *own = x + r * size, *other = others + r * size * (streams - 1);
            T* to = out + r * size * streams;
            float magnitude = std::sqrt(sum_of_squares(own, size) / (float)size);
            for (int64_t i = 0; i < size; ++i) to[i * streams] = own[i];
            for (int64_t s = 1; s < streams; ++s, other += size) {
                float scale = as_large(magnitude, sum_of_squares(other, size), size, x);
                for (int64_t i = 0; i < size; ++i)
                    put(to + i * streams + s, to_float(other[i]) * scale);
            }
        }
    });
}

template <class T>
void merge(const T* x, const T* others, T* out, int64_t rows, int64_t size, int64_t streams,
           int threads) {
    threads = threads_for(rows * size * streams, threads);
    parallel_ranges(threads, rows, [&](int64_t first, int64_t stop) {
        std::vector<float> total(size);
        for (int64_t r = first; r < stop; ++r) {
            take_stream(x + r * size * streams, streams, 0, total.data(), size);
            float magnitude = std::sqrt(squares_of(total.data(), size) / (float)size);
            for (int64_t s = 0; s < streams - 1; ++s) {
                const T* other = others + (s * rows + r) * size;
                float scale = as_large(magnitude, sum_of_squares(other, size), size, x);
                each_vector(size, [&](int64_t i, auto k) {
                    set(&total[i], get(&total[i], k) + get(other + i, k) * scale, k);
                });
            }
            each_vector(size, [&](int64_t i, auto k) {
                set(out + r * size + i, get(&total[i], k) / (float)streams, k);
            });
        }
    });
}

}  // namespace

// Calls `form` with pointers to bfloat16 or float32.
#define WITH_TYPE(is_bf16, ...)    \
    auto run = [&](auto kind) {    \
        using T = decltype(kind);  \
        __VA_ARGS__;               \
    };                             \
    (is_bf16) ? run(bf16{}) : run(0.0f)

extern "C" {

// expected [rows, size]: the active stream, moved by the mixing [rows, from, to] that its router
// and `prediction` [streams * streams, streams] give; normed: its norm with next_weight.
void yo_altup_predict(const void* x, const void* norm, float eps, const void* router,
                      const void* prediction, int64_t active, const void* next_weight,
                      float next_eps, void* expected, void* mixing, void* normed, int64_t rows,
                      int64_t size, int64_t streams, int is_bf16, int threads) {
    WITH_TYPE(is_bf16,
              predict((const T*)x, Router<T>{(const T*)norm, eps, (const T*)router},
                      (const T*)prediction, active, (const T*)next_weight, next_eps, (T*)expected,
                      (T*)mixing, (T*)normed, rows, size, streams, threads));
}

// joined [rows, size] = (active + norm of attended + normed + norm of low) / sqrt(2); next: its norm.
void yo_altup_join(const void* active, const void* attended, const void* attended_weight,
                   const void* normed, const void* low, const void* low_weight, float eps,
                   const void* next_weight, void* joined, void* next, int64_t rows, int64_t size,
                   int is_bf16, int threads) {
    WITH_TYPE(is_bf16,
              join((const T*)active, (const T*)attended, (const T*)attended_weight,
                   (const T*)normed, (const T*)low, (const T*)low_weight, eps,
                   (const T*)next_weight, (T*)joined, (T*)next, rows, size, threads));
}

// error [rows, size] = h + norm of y - active; gains [rows, streams] of h + norm of y;
// corrected = (active + error * gains[index]) * scale, which may be null.
void yo_altup_correction(const void* h, const void* y, const void* y_weight, float y_eps,
                         const void* active, const void* norm, float eps, const void* router,
                         const void* weight, int64_t index, const void* scale, void* error,
                         void* gains, void* corrected, int64_t rows, int64_t size, int64_t streams,
                         int is_bf16, int threads) {
    WITH_TYPE(is_bf16,
              correction(Layer<T>{(const T*)h, (const T*)y, (const T*)y_weight, y_eps,
                                  (const T*)active},
                         Router<T>{(const T*)norm, eps, (const T*)router}, (const T*)weight, index,
                         (const T*)scale, (T*)error, (T*)gains, (T*)corrected, rows, size, streams,
                         threads));
}

// out [rows, size, streams] = x + x @ mixing + error * gains + (0, norm of own, norm of own, ...).
void yo_altup_correct(const void* x, const void* mixing, const void* error, const void* gains,
                      const void* own, const void* own_weight, float eps, void* out, int64_t rows,
                      int64_t size, int64_t streams, int is_bf16, int threads) {
    WITH_TYPE(is_bf16, correct((const T*)x, (const T*)mixing, (const T*)error, (const T*)gains,
                               (const T*)own, (const T*)own_weight, eps, (T*)out, rows, size,
                               streams, threads));
}

// out [rows, size, streams]: x, and others [rows, streams - 1, size] made as large.
void yo_altup_spread(const void* x, const void* others, void* out, int64_t rows, int64_t size,
                     int64_t streams, int is_bf16, int threads) {
    WITH_TYPE(is_bf16, spread((const T*)x, (const T*)others, (T*)out, rows, size, streams, threads));
}

// out [rows, size]: the mean of x's first stream and of others [streams - 1, rows, size] made as large.
void yo_altup_merge(const void* x, const void* others, void* out, int64_t rows, int64_t size,
                    int64_t streams, int is_bf16, int threads) {
    WITH_TYPE(is_bf16, merge((const T*)x, (const T*)others, (T*)out, rows, size, streams, threads));
}

}  // extern "C"

YO_PACKED(yo_altup_predict)
YO_PACKED(yo_altup_join)
YO_PACKED(yo_altup_correction)
YO_PACKED(yo_altup_correct)
YO_PACKED(yo_altup_spread)
YO_PACKED(yo_altup_merge)
