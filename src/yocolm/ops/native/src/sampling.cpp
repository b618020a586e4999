// A token drawn from each row of logits. The order of operations, and the draw, are those of
// ops/sampling.py: thresholds on values, then the inverse CDF over integer weights in the order of
// the vocabulary.
#include <algorithm>
#include <functional>
#include <vector>

#include "parallel.h"
#include "simd.h"

using namespace yo;

namespace {

constexpr float ONE = 1099511627776.0f;  // 2^40, the weight of the likeliest token
constexpr int64_t NUCLEUS = 256;         // candidates looked at for top-p; all if they are too few
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;

uint64_t splitmix64(uint64_t z) {
    z += GOLDEN;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

double uniform(int64_t seed, int64_t index) {
    uint64_t bits = splitmix64(splitmix64((uint64_t)seed) + (uint64_t)index * GOLDEN);
    return (double)(bits >> 12) * 0x1p-52;
}

// The greatest value; NaN if there is one.
float peak_of(const float* x, int64_t size) {
    vf most = splat(-INFINITY), nan = vf{};
    int64_t i = 0;
    for (; i + VL <= size; i += VL) {
        vf v = load(x + i);
        most = vmax(v, most);
        nan += v - v == vf{} ? vf{} : v - v;  // infinities turn into NaN too: looked at below
    }
    float peak = highest(most);
    bool odd = !(sum(nan) == 0.0f);
    for (; i < size; ++i) {
        peak = x[i] > peak ? x[i] : peak;
        odd |= !(x[i] - x[i] == 0.0f);
    }
    if (odd)
        for (i = 0; i < size; ++i)
            if (x[i] != x[i]) return x[i];
    return peak;
}

struct Cuts {
    float temperature, top_p, min_p;
    int64_t top_k;
};

struct Chance {
    float x, weight;
};

struct Buffers {
    std::vector<float> x, maxima, values, ordered, weights;
    std::vector<int64_t> ids;
    std::vector<Chance> chances;
};

void exp_all(const float* x, float* out, int64_t size) {
    int64_t i = 0;
    for (; i + VL <= size; i += VL) store(out + i, vexp(load(x + i)));
    if (i < size) store_some(out + i, vexp(load_some(x + i, (int)(size - i))), (int)(size - i));
}

// The sum of exp(x) over values of at least `least`.
double mass_of(const float* x, int64_t size, float least) {
    double total = 0;
    for (int64_t i = 0; i < size; i += 4096) {  // float32 sums of few, float64 sums of those
        int64_t stop = std::min(size, i + 4096), j = i;
        vf part = vf{};
        for (; j + VL <= stop; j += VL) {
            vf v = load(x + j);
            part += v >= splat(least) ? vexp(v) : vf{};
        }
        if (j < stop) {
            vf v = load_some(x + j, (int)(stop - j), -INFINITY);
            part += v >= splat(least) ? vexp(v) : vf{};
        }
        total += sum(part);
    }
    return total;
}

// A value no greater than the `width`-th greatest, from the maxima of short blocks, which are left in
// b.maxima: as many blocks have as many values that are no less.
float bound_of(Buffers& b, int64_t size, int64_t width) {
    int64_t blocks = size / VL;
    b.maxima.resize(blocks);
    for (int64_t i = 0; i < blocks; ++i) b.maxima[i] = highest(load(b.x.data() + i * VL));
    if (width > blocks) return -INFINITY;
    b.ordered.assign(b.maxima.begin(), b.maxima.end());
    auto nth = b.ordered.begin() + width - 1;
    std::nth_element(b.ordered.begin(), nth, b.ordered.end(), std::greater<float>());
    return *nth;
}

// Tokens of at least `bound`, in the order of the vocabulary: b.ids and b.values.
void collect(Buffers& b, int64_t size, float bound) {
    b.ids.clear();
    b.values.clear();
    auto look = [&](int64_t first, int64_t stop) {
        for (int64_t i = first; i < stop; ++i)
            if (b.x[i] >= bound) {
                b.ids.push_back(i);
                b.values.push_back(b.x[i]);
            }
    };
    int64_t blocks = size / VL;
    for (int64_t i = 0; i < blocks; ++i)
        if (b.maxima[i] >= bound) look(i * VL, (i + 1) * VL);
    look(blocks * VL, size);
}

// The first of `size` tokens whose cumulated weight exceeds u times the sum of all; b.weights has exp.
int64_t inverse_cdf(const Buffers& b, const float* x, int64_t size, float threshold, double u) {
    int64_t total = 0, sum = 0;
    auto weight = [&](int64_t i) { return x[i] >= threshold ? (int64_t)(b.weights[i] * ONE) : 0; };
    for (int64_t i = 0; i < size; ++i) total += weight(i);
    int64_t target = std::min((int64_t)((double)total * u), total - 1);
    for (int64_t i = 0; i < size; ++i) {
        sum += weight(i);
        if (sum > target) return i;
    }
    return size - 1;
}

// The greatest value so that those of at least as much have `target` in weight; -infinity if all have
// less. Quickselect by weight: no sort of a whole vocabulary.
float nucleus(std::vector<Chance>& c, double target) {
    auto first = c.begin(), stop = c.end();
    double before = 0;  // the weight of what is greater than all of first .. stop
    while (first != stop) {
        float a = first->x, m = first[(stop - first) / 2].x, z = stop[-1].x;
        float pivot = std::max(std::min(a, m), std::min(std::max(a, m), z));
        double greater = 0, equal = 0;
        auto more = std::partition(first, stop, [&](Chance t) { return t.x > pivot; });
        auto rest = std::partition(more, stop, [&](Chance t) { return t.x == pivot; });
        for (auto i = first; i != more; ++i) greater += i->weight;
        for (auto i = more; i != rest; ++i) equal += i->weight;
        if (more != first && before + greater >= target) {  // a target of 0 keeps the greatest
            stop = more;
        } else if (before + greater + equal >= target) {
            return pivot;
        } else {
            before += greater + equal;
            first = rest;
        }
    }
    return -INFINITY;
}

// The least value that top-k and then top-p keep of the candidates. `mass` is that of all tokens which
// min-p keeps, negative if it does not matter; -infinity if top-p needs more candidates.
float rank_threshold(Buffers& b, Cuts cuts, double mass) {
    int64_t size = (int64_t)b.values.size();
    float by_k = -INFINITY;
    if (cuts.top_k > 0 && cuts.top_k <= size) {
        b.ordered.assign(b.values.begin(), b.values.end());
        auto nth = b.ordered.begin() + cuts.top_k - 1;
        std::nth_element(b.ordered.begin(), nth, b.ordered.end(), std::greater<float>());
        by_k = *nth;
    }
    if (cuts.top_p >= 1) return by_k;
    b.weights.resize(size);
    exp_all(b.values.data(), b.weights.data(), size);
    b.chances.clear();
    double kept = 0;
    for (int64_t i = 0; i < size; ++i)
        if (b.values[i] >= by_k) {
            b.chances.push_back({b.values[i], b.weights[i]});
            kept += b.weights[i];
        }
    return std::max(by_k, nucleus(b.chances, (mass < 0 ? kept : mass) * (double)cuts.top_p));
}

int64_t draw_row(const float* logits, int64_t size, float peak, Cuts cuts, double u, Buffers& b) {
    b.x.resize(size);
    float temperature = std::max(cuts.temperature, 1e-30f);
    int64_t i = 0;
    for (; i + VL <= size; i += VL) store(b.x.data() + i, (load(logits + i) - peak) / temperature);
    for (; i < size; ++i) b.x[i] = (logits[i] - peak) / temperature;
    float least = cuts.min_p > 0 ? std::log(cuts.min_p) : -INFINITY;
    bool ranked = cuts.top_k > 0 || cuts.top_p < 1;
    if (!ranked && cuts.min_p <= 0) {
        b.weights.resize(size);
        exp_all(b.x.data(), b.weights.data(), size);
        return inverse_cdf(b, b.x.data(), size, -INFINITY, u);
    }
    float bound = bound_of(b, size, cuts.top_k > 0 ? cuts.top_k : ranked ? NUCLEUS : size);
    collect(b, size, std::max(bound, least));
    float threshold = least;
    if (ranked) {
        bool whole = cuts.top_k <= 0;
        double mass = whole ? mass_of(b.x.data(), size, least) : -1.0;
        float by_rank = rank_threshold(b, cuts, mass);
        if (whole && by_rank == -INFINITY && bound > least) {
            collect(b, size, least);
            by_rank = rank_threshold(b, cuts, mass);
        }
        threshold = std::max(threshold, by_rank);
    }
    int64_t count = (int64_t)b.values.size();
    b.weights.resize(count);
    exp_all(b.values.data(), b.weights.data(), count);
    return b.ids[inverse_cdf(b, b.values.data(), count, threshold, u)];
}

}  // namespace

extern "C" {

// out [rows]: a token for each row of logits [rows, size]. -1 where the peak of raw [rows, size], the
// logits before anything was added or masked, is not finite. Temperature 0 takes the first greatest.
void yo_sample(const float* logits, const float* raw, int64_t rows, int64_t size,
               const float* temperature, const int64_t* top_k, const float* top_p,
               const float* min_p, const int64_t* seeds, const int64_t* indices, int64_t* out,
               int threads) {
    if (rows * size < 16384) threads = 1;
    parallel_ranges(threads, rows, [&](int64_t first, int64_t stop) {
        static thread_local Buffers buffers;
        for (int64_t r = first; r < stop; ++r) {
            const float* row = logits + r * size;
            float peak = peak_of(row, size);
            float seen = raw == logits ? peak : peak_of(raw + r * size, size);
            if (!std::isfinite(seen)) {
                out[r] = -1;
            } else if (!std::isfinite(peak)) {
                out[r] = 0;  // everything is masked
            } else if (temperature[r] == 0) {
                out[r] = std::find(row, row + size, peak) - row;
            } else {
                Cuts cuts{temperature[r], top_p[r], min_p[r], top_k[r]};
                out[r] = draw_row(row, size, peak, cuts, uniform(seeds[r], indices[r]), buffers);
            }
        }
    });
}

}  // extern "C"
